"""What was measured on this machine, kept for later runs, a file for each measurement.

It is a cache: it may be wrong, missing or unwritable, and then it is measured again.
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
"""After which it is measured again: by then what else runs on a machine, its drivers or its cooling may be others."""

Measured = dict[str, Any]


def cache_folder() -> Path:
    """Where measurements are kept, a file for each: below HYDRO_RASDA_CACHE, or the user's cache folder.

    Raises:
        RuntimeError: where the user has no home.
    """
    root = os.environ.get("HYDRO_RASDA_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "hydro_rasda" / "measured"


def recall(key: str) -> Measured | None:
    """What was measured under a key in the last weeks; None where it is not there. Its values may be odd."""
    try:
        measured = json.loads(_file(key).read_text())
        return measured if _is_fresh(measured, key) else None
    except (OSError, ValueError, OverflowError, RuntimeError):
        return None


def remember(key: str, measured: Measured) -> None:
    """Keep what was measured, if that can be written at all."""
    try:
        file = _file(key)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps({"key": key, "at": time.time(), **measured}, indent=1).encode())
    except (OSError, RuntimeError) as error:
        _say_it_is_not_kept(f"{type(error).__name__}: {error}")


def is_positive(number: Any) -> bool:
    """Whether something that was read is a finite number above 0."""
    return type(number) in (int, float) and math.isfinite(number) and number > 0


def is_count(text: str) -> bool:
    """Whether a key that was read is an integer above 0."""
    return text.isdecimal() and len(text) < 10 and int(text) > 0


def _is_fresh(measured: Any, key: str) -> bool:
    if not isinstance(measured, dict) or measured.get("key") != key:
        return False
    at: Any = measured.get("at")
    return is_positive(at) and 0 <= time.time() - at < WEEKS * 7 * 24 * 3600


@functools.cache
def _say_it_is_not_kept(why: str) -> None:
    """Once in a process."""
    warnings.warn(f"what is measured on this machine cannot be kept for later runs ({why})", stacklevel=3)


def _file(key: str) -> Path:
    return cache_folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
