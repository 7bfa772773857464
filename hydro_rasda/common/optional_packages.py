"""Packages that only some features need: if one is missing, the error says which, and what to install."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def needed_by(feature: str, extra: str) -> Iterator[None]:
    """Run imports that `feature` needs; an ImportError among them says to install the `extra` of this library."""
    try:
        yield
    except ImportError as error:
        name = error.name or getattr(error.__cause__, "name", None)  # Optuna raises an error of its own
        package = f"{name.partition('.')[0]}, which" if name else "a package that"
        told = f"{feature} needs {package} is not there: pip install 'hydro-rasda[{extra}]'"
        raise ImportError(told) from error
