"""One wording for every refused argument: its name, its value and the rule."""

from __future__ import annotations

from typing import Literal

Mode = Literal["min", "max"]


def check_int(name: str, value: object, at_least: int) -> None:
    """Raises unless ``value`` is an integer (and no bool) of ``at_least`` or more.

    Raises:
        TypeError: ``value`` is no integer.
        ValueError: ``value`` is too small.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`{name}` is {value!r}, but must be an integer >= {at_least}")
    if value < at_least:
        raise ValueError(f"`{name}` is {value}, but must be >= {at_least}")


def check_mode(mode: object) -> None:
    """Raises ValueError unless ``mode`` is "min" or "max"."""
    if mode not in ("min", "max"):
        raise ValueError(f"`mode` is {mode!r}, but must be 'min' or 'max'")
