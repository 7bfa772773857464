"""Warnings that point to the line of the user's code, even if they arise deep in the library."""

from __future__ import annotations

import sys
import warnings

OURS = frozenset({"contextlib", "fusion", "hydro_rasda", "surrogate"})
"""Top-level names of modules that are not the user's code. `contextlib` runs the library's context managers."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn with the location of the innermost frame whose package is not in `OURS`, usually of the user's code."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in OURS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
