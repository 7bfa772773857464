"""One wording for every refused argument: its name, its value and the rule."""

from __future__ import annotations


class PlanMismatch(ValueError):
    """A plan was found for a model of another structure."""


def require(holds: bool, argument: str, value: object, rule: str) -> None:
    """Refuse an argument that breaks its rule.

    Raises:
        ValueError: where `holds` is false.
    """
    if not holds:
        raise ValueError(f"`{argument}` is {value!r}, but must be {rule}")


def check_width_ratio(width_ratio: float, argument: str = "width_ratio") -> None:
    """Refuse anything that is not a number in (0, 1].

    Raises:
        ValueError: where it is none.
    """
    is_number = isinstance(width_ratio, int | float) and not isinstance(width_ratio, bool)
    rule = "a number in (0, 1]: a surrogate is no wider than its target"
    require(is_number and 0.0 < width_ratio <= 1.0, argument, width_ratio, rule)
