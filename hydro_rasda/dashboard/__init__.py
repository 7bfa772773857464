"""All runs of a folder, live, in a browser: the pages of `hydro_rasda.page`, which follow their journals.

It only reads, so that it may start before a run, during it or after it, and the run does not know of it.
"""

from hydro_rasda.dashboard.server import serve

__all__ = ["serve"]
