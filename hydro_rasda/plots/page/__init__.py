"""A run as one HTML page, which works offline: the figures of `hydro_rasda.plots`, and what they mean, in words."""

from hydro_rasda.plots.page.write import write_page

__all__ = ["write_page"]
