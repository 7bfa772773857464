"""What is worked out once and kept, as long as it is little."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MOST = 8


def kept(values: dict[K, V], key: K, make: Callable[[], V]) -> V:
    """The value of a key, made where it is missing; where there are `MOST` others, these are forgotten first.

    >>> squares = {2: 4}
    >>> kept(squares, 2, lambda: 5), kept(squares, 3, lambda: 9)
    (4, 9)
    """
    if key not in values:
        if len(values) == MOST:
            values.clear()
        values[key] = make()
    return values[key]
