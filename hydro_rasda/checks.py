"""The one form in which a bad argument is refused: its name, its value and the rule. Needs neither torch nor Ray.

A wrong type and a wrong value are refused alike, by a ValueError of one wording.
"""

from __future__ import annotations

from typing import TypeGuard


def require(holds: bool, argument: str, value: object, rule: str) -> None:
    """Refuse an argument unless its rule holds.

    Raises:
        ValueError: where `holds` is false; it names argument, value and rule.
    """
    if not holds:
        raise ValueError(f"`{argument}` is {value!r}, but must be {rule}")


def is_int(value: object) -> TypeGuard[int]:
    """Whether a value is an integer; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a number, infinities and NaN included; a bool is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_int(name: str, value: object, at_least: int, optional: bool = False) -> None:
    """Refuse what is no integer of `at_least` or more; where it is `optional`, None will do.

    Raises:
        ValueError: where `value` is something else.
    """
    holds = (optional and value is None) or (is_int(value) and value >= at_least)
    require(holds, name, value, f"{'None or ' if optional else ''}an integer >= {at_least}")


def check_number(name: str, value: object, above: float | None = None) -> None:
    """Refuse what is no number >= 0, or, where it is given, no number > `above`.

    Raises:
        ValueError: where `value` is something else, such as NaN.
    """
    holds = is_number(value) and (value >= 0 if above is None else value > above)
    require(holds, name, value, "a number >= 0" if above is None else f"a number > {above:g}")


def check_mode(mode: object) -> None:
    """Refuse what is neither "min" nor "max".

    Raises:
        ValueError: where `mode` is something else.
    """
    require(mode in ("min", "max"), "mode", mode, "'min' or 'max'")
