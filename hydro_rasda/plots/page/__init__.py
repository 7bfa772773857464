"""A run as one HTML page that works offline: the figures of `hydro_rasda.plots`, and their meaning in words."""

from hydro_rasda.plots.page.write import write_page

__all__ = ["write_page"]
