"""Packages that only some features need. If one is missing, the error names it, and says what to install."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def needed_by(feature: str, extra: str) -> Iterator[None]:
    """Run imports that `feature` needs. If one fails, its ImportError says to install the `extra` of this library."""
    try:
        yield
    except ImportError as error:
        # Optuna raises an ImportError without a name; its cause has the name of the package.
        name = error.name or getattr(error.__cause__, "name", None)
        package = f"{name.partition('.')[0]}, which" if name else "a package that"
        told = f"{feature} needs {package} is not there: pip install 'hydro-rasda[{extra}]'"
        raise ImportError(told) from error
