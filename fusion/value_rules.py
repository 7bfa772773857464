"""Rules for the plain Python values of a configuration, which several keys share."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any


def number(holds: Callable[[float], bool]) -> Callable[[Any], bool]:
    """Make a rule for numbers; a bool is none."""
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and holds(value)


def is_count(value: Any) -> bool:
    """Tell integers >= 1 from other values."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_flag(value: Any) -> bool:
    """Tell True and False from other values."""
    return isinstance(value, bool)


def is_norm(value: Any) -> bool:
    """Tell None, and norms that gradients can be clipped to, from other values."""
    return value is None or number(lambda norm: norm > 0)(value)


is_finite = number(lambda value: 0 <= value < math.inf)
is_positive = number(lambda value: 0 < value < math.inf)
is_fraction = number(lambda value: 0 <= value < 1)
is_share = number(lambda value: 0 <= value <= 1)


def takes(value: Any, *args: Any, **kwargs: Any) -> bool:
    """Tell functions that can be called with these arguments from other values."""
    try:
        inspect.signature(value).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # a function written in C may have no signature
        pass
    return callable(value)


def plain(value: Any) -> Any:
    """Return Python's own number in place of one of NumPy, or of a tensor with one element; else the value."""
    if not hasattr(value, "item"):
        return value
    try:
        return value.item()
    except (RuntimeError, TypeError, ValueError):  # of several numbers
        return value
