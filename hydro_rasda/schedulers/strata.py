"""Shares of a sample among structures: half for all of them alike, the rest for the best."""

from __future__ import annotations

import math
from collections.abc import Mapping

KEPT = 3
"""One in so many structures gets the second half."""


def first_shares(structures: int, samples: int) -> list[tuple[int, int]]:
    """Return how many of the samples each structure gets first, by index; about half of them in all.

    If there are too many structures for two samples each, the first of them get two.

    >>> first_shares(12, 64)[:2], len(first_shares(12, 64)), first_shares(9, 8)
    ([(0, 2), (1, 2)], 12, [(0, 2), (1, 2)])
    """
    tried = max(1, min(structures, samples // 4))
    each = samples if structures == 1 else max(1, samples // (2 * tried))
    return [(index, each) for index in range(tried)]


def later_shares(places: Mapping[int, float], samples: int) -> list[tuple[int, int]]:
    """Return how many of the samples that are left each of the best structures gets.

    Args:
        places: By structure, the place of its best trial; lower is better.

    >>> later_shares({0: 5.0, 1: 0.0, 2: 7.0, 3: 2.0}, 9)
    [(1, 5), (3, 4)]
    """
    kept = sorted(places, key=lambda index: (places[index], index))[: min(samples, math.ceil(len(places) / KEPT))]
    return [(index, samples // len(kept) + (i < samples % len(kept))) for i, index in enumerate(kept)]
