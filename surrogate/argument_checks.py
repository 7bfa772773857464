"""Checks of arguments. Every error message names the argument, its value and the rule that the value breaks."""

from __future__ import annotations

import inspect
import math
import reprlib
from typing import Any, TypeGuard

_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = 200


class PlanMismatch(ValueError):
    """Raised if a plan belongs to a model of another structure."""


def require(holds: bool, argument: str, value: object, rule: str) -> None:
    """Raise ValueError if `holds` is False. The message names the argument, its value (cut if long) and its rule."""
    if not holds:
        raise ValueError(f"`{argument}` is {_shown.repr(value)}, but must be {rule}{_in_python(value)}")


def _in_python(value: object) -> str:
    """Return a hint to call `.item()` if the value is a scalar of NumPy or torch, whose type breaks rules; else ""."""
    scalar = hasattr(value, "item") and getattr(value, "ndim", None) == 0
    return "; `.item()` makes Python's own of it" if scalar and not isinstance(value, int | float | str) else ""


def is_metric(value: object) -> TypeGuard[float]:
    """Return whether a training may report a value as a metric: an int or float, also infinite or NaN, but no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_width_ratio(width_ratio: float, argument: str = "width_ratio") -> None:
    """Raise ValueError unless the ratio is a number in (0, 1]."""
    rule = "a number in (0, 1]: a surrogate is no wider than its target"
    require(is_metric(width_ratio) and 0.0 < width_ratio <= 1.0, argument, width_ratio, rule)


def check_int(argument: str, value: object, at_least: int, at_most: float = math.inf) -> None:
    """Raise ValueError unless the value is an integer from `at_least` to `at_most`."""
    holds = isinstance(value, int) and not isinstance(value, bool) and at_least <= value <= at_most
    bound = f">= {at_least}" if at_most == math.inf else f"from {at_least} to {at_most}"
    require(holds, argument, value, f"an integer {bound}")


def check_flag(argument: str, value: object) -> None:
    """Raise ValueError unless the value is True or False."""
    require(isinstance(value, bool), argument, value, "True or False")


def check_list(argument: str, value: object, kind: Any, least: int = 1) -> None:
    """Raise ValueError unless the value is a list or tuple of at least `least` objects of the class `kind`."""
    require(isinstance(value, list | tuple), argument, value, "a list")
    assert isinstance(value, list | tuple)
    require(len(value) >= least, f"len({argument})", len(value), f">= {least}")
    for i, item in enumerate(value):
        require(isinstance(item, kind), f"{argument}[{i}]", item, f"a {getattr(kind, '__name__', 'number')}")


def check_function(argument: str, value: object, arguments: int) -> None:
    """Raise ValueError unless the value is a function that takes this number of positional arguments."""
    holds = callable(value) and not isinstance(value, type)
    try:
        inspect.signature(value).bind(*range(arguments))  # type: ignore[arg-type]
    except TypeError:
        holds = False
    except ValueError:  # a function written in C may have no signature, so its arguments cannot be checked
        pass
    require(holds, argument, value, f"a function of {arguments} arguments")
