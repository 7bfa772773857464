"""A cache of measurements of this machine for later runs: one file per measurement.

If an entry is invalid, missing or unwritable, the library measures again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import time
import warnings
from pathlib import Path
from typing import Any

from hydro_rasda.run.files import write_atomically

WEEKS = 4
"""Weeks after which a measurement is repeated, because other programs, drivers or cooling may have changed the speed of
the machine."""

Measured = dict[str, Any]


def cache_folder() -> Path:
    """Return the folder of the measurements, below `HYDRO_RASDA_CACHE`, `XDG_CACHE_HOME` or the home folder."""
    root = os.environ.get("HYDRO_RASDA_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "hydro_rasda" / "measured"


def recall(key: str) -> Measured | None:
    """Return the measurement that `remember` stored under a key; None if it is missing, unreadable or too old.

    Its values may be invalid: check them.
    """
    try:
        measured = json.loads(_file(key).read_text())
        return measured if _is_fresh(measured, key) else None
    except (OSError, ValueError, OverflowError, RuntimeError):
        return None


def remember(key: str, measured: Measured) -> None:
    """Store a measurement under a key, by which `recall` returns it; warn if it cannot be written."""
    try:
        file = _file(key)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps({"key": key, "at": time.time(), **measured}, indent=1).encode())
    except (OSError, RuntimeError) as error:
        _warn_not_kept(f"{type(error).__name__}: {error}")


def is_positive(number: Any) -> bool:
    """Tell whether a value from a file is a finite number above 0."""
    return type(number) in (int, float) and math.isfinite(number) and number > 0


def is_count(text: str) -> bool:
    """Tell whether a key from a file is an integer above 0."""
    return text.isdecimal() and len(text) < 10 and int(text) > 0


def _is_fresh(measured: Any, key: str) -> bool:
    if not isinstance(measured, dict) or measured.get("key") != key:
        return False
    at: Any = measured.get("at")
    return is_positive(at) and 0 <= time.time() - at < WEEKS * 7 * 24 * 3600


@functools.cache
def _warn_not_kept(why: str) -> None:
    """Warn that measurements cannot be kept, once per process."""
    warnings.warn(f"measurements of this machine cannot be kept for later runs ({why})", stacklevel=3)


def _file(key: str) -> Path:
    return cache_folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
