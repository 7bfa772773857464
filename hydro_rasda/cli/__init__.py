"""The command line: it shows, compares and cleans runs, of which it reads the folders, and forecasts search costs.

Each command imports its modules when it is called. Only `simulate` and writing a model need torch or Ray.
"""

from hydro_rasda.cli.commands_and_exit_status import main

__all__ = ["main"]
