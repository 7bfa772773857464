"""The command line: it shows, compares and cleans runs from their folders alone, and forecasts the cost of a search.

Each command imports its modules when it is called. Only `simulate` and writing a model need torch or Ray.
"""

from hydro_rasda.cli.commands_and_exit_status import main

__all__ = ["main"]
