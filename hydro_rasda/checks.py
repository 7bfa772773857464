"""One wording for every refused argument: its name, its value and the rule. Needs neither torch nor Ray."""

from __future__ import annotations

from hydro_rasda.config import MODES, require


def check_int(name: str, value: object, at_least: int) -> None:
    """Raises unless ``value`` is an integer (and no bool) of ``at_least`` or more.

    Raises:
        TypeError: ``value`` is no integer.
        ValueError: ``value`` is too small.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`{name}` is {value!r}, but must be an integer >= {at_least}")
    require(value >= at_least, name, value, f">= {at_least}")


def check_number(name: str, value: object, above: float | None = None) -> None:
    """Raises unless ``value`` is a number >= 0, or > ``above``.

    Raises:
        TypeError: it is no number.
        ValueError: it is too small.
    """
    rule = ">= 0" if above is None else f"> {above:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"`{name}` is {value!r}, but must be a number {rule}")
    require(value >= 0 if above is None else value > above, name, value, rule)


def check_mode(mode: object) -> None:
    """Raises ValueError unless ``mode`` is "min" or "max"."""
    require(mode in MODES, "mode", mode, "'min' or 'max'")
