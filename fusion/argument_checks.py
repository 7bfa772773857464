"""Checks of arguments. Every error message has the same form: the argument's name, its value and the broken rule."""

from __future__ import annotations

import inspect
import re
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeGuard

_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = 200
_LARGEST = sys.float_info.max  # an integer may be larger, but computing with it then fails


class FusionMismatch(ValueError):
    """Raised if members of a fused model compute other results than they do alone."""


def require(holds: bool, name: str, value: object, rule: str) -> None:
    """Raise a `ValueError` about the argument `name` unless `holds` is True.

    >>> require(0.5 >= 1, "steps_per_epoch", 0.5, ">= 1")
    Traceback (most recent call last):
    ValueError: `steps_per_epoch` is 0.5, but must be >= 1
    """
    if not holds:
        raise ValueError(refusal(name, value, rule))


def refusal(name: str, value: object, rule: str) -> str:
    """Return the error message for an argument that breaks `rule`; a long value is shortened."""
    return f"`{name}` is {_shown.repr(value)}, but must be {rule}{_in_python(value)}{meant(value, rule)}"


def meant(value: object, rule: str) -> str:
    """Return "did you mean ...?" with the allowed word that `value` resembles; "" if it resembles none.

    The allowed words are read from a rule of the form "one of ..." or "None, one of ...".

    >>> meant("Adam", "one of sgd, adam, adamw"), meant("TPE", "None, one of 'tpe', 'gp'"), meant("new", "one of sgd")
    ('; did you mean "adam"?', '; did you mean "tpe"?', '')
    """
    listed = re.match(r"(None,? )?(or )?one of ", rule)
    if not isinstance(value, str) or listed is None:
        return ""
    words = [word.strip("'\"[]() ") for word in re.split(r",|;| or ", rule[listed.end() :])]
    close = get_close_matches(value.lower().replace("-", "_"), words, n=1, cutoff=0.75)
    return f'; did you mean "{close[0]}"?' if close else ""


def _in_python(value: object) -> str:
    """Return advice to call `.item()` if `value` is a scalar of NumPy or torch; "" for all other values."""
    scalar = hasattr(value, "item") and getattr(value, "ndim", None) == 0
    return "; `.item()` makes Python's own of it" if scalar and not isinstance(value, int | float | str) else ""


def is_int(value: object) -> TypeGuard[int]:
    """Return whether `value` is an integer; a bool does not count as one."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether `value` is a finite number that fits a float; a bool does not count as one."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def check_int(name: str, value: object, at_least: int) -> None:
    """Raise a `ValueError` unless `value` is an integer >= `at_least`."""
    require(is_int(value) and value >= at_least, name, value, f"an integer >= {at_least}")


def check_flag(name: str, value: object) -> None:
    """Raise a `ValueError` unless `value` is True or False."""
    require(isinstance(value, bool), name, value, "True or False")


def check_function(name: str, value: object, arguments: int | None = None) -> None:
    """Raise a `ValueError` unless `value` is a function, not a class, that takes `arguments` positional arguments.

    If `arguments` is None, the function may take any arguments.
    """
    holds = callable(value) and not isinstance(value, type) and (arguments is None or takes(value, *range(arguments)))
    require(holds, name, value, "a function" + (f" of {arguments} arguments" if arguments else ""))


def check_mapping(name: str, value: object, *keys: str) -> None:
    """Raise a `ValueError` unless `value` is a mapping whose keys are strings and include all of `keys`."""
    mapping = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    require(mapping and all(key in value for key in keys), name, value, f"a mapping with {keys or 'names as keys'}")  # type: ignore[operator]


def check_each(name: str, values: Sequence[Any], kind: type, count: int | None = None) -> None:
    """Raise a `ValueError` unless `values` is a sequence of `count` objects of the class `kind`.

    If `count` is None, the sequence may have any length >= 1.
    """
    listed = isinstance(values, Sequence) and not isinstance(values, str | bytes)
    require(listed, name, values, f"a list of objects of the class {kind.__name__}")
    many = len(values)
    if count is None and many == 0:
        raise ValueError(f"`{name}` is empty, but must have at least one")
    require(count is None or many == count, f"len({name})", many, str(count))
    for i, value in enumerate(values if isinstance(values, list | tuple) else ()):
        require(isinstance(value, kind), f"{name}[{i}]", value, f"of the class {kind.__name__}")


def number(holds: Callable[[float], bool]) -> Callable[[Any], bool]:
    """Return a function that returns True if its argument is a number, but no bool, and fulfills `holds`."""
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and holds(value)


def is_count(value: Any) -> bool:
    """Return whether `value` is an integer >= 1."""
    return is_int(value) and value >= 1


def is_flag(value: Any) -> bool:
    """Return whether `value` is True or False."""
    return isinstance(value, bool)


def is_norm(value: Any) -> bool:
    """Return whether `value` is a valid norm for gradient clipping: a number > 0, or None for no clipping."""
    return value is None or number(lambda norm: norm > 0)(value)


is_not_negative = number(lambda value: 0 <= value <= _LARGEST)
is_positive = number(lambda value: 0 < value <= _LARGEST)
is_fraction = number(lambda value: 0 <= value < 1)
is_share = number(lambda value: 0 <= value <= 1)


def takes(value: Any, *args: Any, **kwargs: Any) -> bool:
    """Return whether `value` can be called with the arguments `args` and `kwargs`."""
    try:
        inspect.signature(value).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # a function written in C may have no signature, so its arguments cannot be checked
        pass
    return callable(value)


def plain(value: Any) -> Any:
    """Convert a NumPy scalar, or a tensor with one element, to a Python number; return any other value as it is."""
    if not hasattr(value, "item"):
        return value
    try:
        return value.item()
    except (RuntimeError, TypeError, ValueError):  # a tensor or array of several elements is no single number
        return value
