"""Warnings that name the line of the user's own code, however deep in the library they arise."""

from __future__ import annotations

import sys
import warnings

OURS = frozenset({"contextlib", "fusion", "hydro_rasda", "surrogate"})
"""The packages of this distribution, and the module that runs the bodies of their context managers."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost frame that runs no code of this distribution."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in OURS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
