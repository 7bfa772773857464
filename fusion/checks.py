"""One wording for every refused argument: its name, its value and the rule."""

from __future__ import annotations


def require(holds: bool, name: str, value: object, rule: str) -> None:
    """Refuse an argument that breaks its rule.

    Raises:
        ValueError: where `holds` is false.

    >>> require(0.5 >= 1, "steps_per_epoch", 0.5, ">= 1")
    Traceback (most recent call last):
    ValueError: `steps_per_epoch` is 0.5, but must be >= 1
    """
    if not holds:
        raise ValueError(f"`{name}` is {value!r}, but must be {rule}")
