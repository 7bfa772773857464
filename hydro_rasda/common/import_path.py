"""The folders in which this process finds modules, for Python processes that it starts."""

import os
import sys


def import_path() -> str:
    """Return `sys.path` as a value of PYTHONPATH. Entries that are no text are left out, as Python's imports do."""
    return os.pathsep.join(path or os.getcwd() for path in sys.path if isinstance(path, str))
