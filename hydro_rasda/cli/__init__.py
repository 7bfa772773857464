"""The command line: runs seen, compared and cleaned from their folders alone, and forecasts of what a search takes.

What a command needs is imported once it is called: neither torch nor Ray, but for `simulate` and for writing a model.
"""

from hydro_rasda.cli.app import main

__all__ = ["main"]
