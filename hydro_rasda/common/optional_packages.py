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
        package = (error.name or str(error)).partition(".")[0]
        told = f"{feature} needs {package}, which is not there: pip install 'hydro-rasda[{extra}]'"
        raise ImportError(told) from error
