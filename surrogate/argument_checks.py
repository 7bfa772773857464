"""One wording for every refused argument: its name, its value and the rule."""

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
    """Refuse an argument that breaks its rule; long values are cut in the message."""
    if not holds:
        raise ValueError(f"`{argument}` is {_shown.repr(value)}, but must be {rule}{_in_python(value)}")


def _in_python(value: object) -> str:
    """Return a hint how to convert a scalar of NumPy or torch, which may break a rule only by its type; else ""."""
    scalar = hasattr(value, "item") and getattr(value, "ndim", None) == 0
    return "; `.item()` makes Python's own of it" if scalar and not isinstance(value, int | float | str) else ""


def is_metric(value: object) -> TypeGuard[float]:
    """Return whether a value is a number that a training may report, infinities and NaN included; a bool is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_width_ratio(width_ratio: float, argument: str = "width_ratio") -> None:
    """Refuse anything that is not a number in (0, 1] (ValueError)."""
    rule = "a number in (0, 1]: a surrogate is no wider than its target"
    require(is_metric(width_ratio) and 0.0 < width_ratio <= 1.0, argument, width_ratio, rule)


def check_int(argument: str, value: object, at_least: int, at_most: float = math.inf) -> None:
    """Refuse values that are no integer in a range."""
    holds = isinstance(value, int) and not isinstance(value, bool) and at_least <= value <= at_most
    bound = f">= {at_least}" if at_most == math.inf else f"from {at_least} to {at_most}"
    require(holds, argument, value, f"an integer {bound}")


def check_flag(argument: str, value: object) -> None:
    """Refuse values that are neither True nor False."""
    require(isinstance(value, bool), argument, value, "True or False")


def check_list(argument: str, value: object, kind: Any, least: int = 1) -> None:
    """Refuse values that are no list or tuple of at least `least` objects of the class `kind`."""
    require(isinstance(value, list | tuple), argument, value, "a list")
    assert isinstance(value, list | tuple)
    require(len(value) >= least, f"len({argument})", len(value), f">= {least}")
    for i, item in enumerate(value):
        require(isinstance(item, kind), f"{argument}[{i}]", item, f"a {getattr(kind, '__name__', 'number')}")


def check_function(argument: str, value: object, arguments: int) -> None:
    """Refuse values that cannot be called with a number of positional `arguments`."""
    holds = callable(value) and not isinstance(value, type)
    try:
        inspect.signature(value).bind(*range(arguments))  # type: ignore[arg-type]
    except TypeError:
        holds = False
    except ValueError:  # functions written in C may have no signature
        pass
    require(holds, argument, value, f"a function of {arguments} arguments")
