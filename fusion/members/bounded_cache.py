"""A dict as a cache with a bounded number of values."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MOST = 8


def kept(values: dict[K, V], key: K, make: Callable[[], V]) -> V:
    """Return `values[key]`; make and keep it if it is missing. If the dict has `MOST` values already, clear it first.

    >>> squares = {2: 4}
    >>> kept(squares, 2, lambda: 5), kept(squares, 3, lambda: 9)
    (4, 9)
    """
    if key not in values:
        if len(values) == MOST:
            values.clear()
        values[key] = make()
    return values[key]
