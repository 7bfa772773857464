"""One wording for every refused number."""

from __future__ import annotations


def check_number(name: str, value: object, above: float | None = None) -> None:
    """Raises unless ``value`` is a number >= 0, or > ``above``.

    Raises:
        TypeError: it is no number.
        ValueError: it is too small.
    """
    rule = ">= 0" if above is None else f"> {above:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"`{name}` is {value!r}, but must be a number {rule}")
    if not (value >= 0 if above is None else value > above):
        raise ValueError(f"`{name}` is {value}, but must be {rule}")
