"""The command line: show, compare and clean runs, for which it needs only their folders, and forecast search costs.

Each command imports its modules when it is called. Only `simulate` and writing a model need torch or Ray.
"""

from hydro_rasda.cli.commands_and_exit_status import main

__all__ = ["main"]
