"""Several objectives: one order of trials, the front of the best trials, and its hypervolume.

Trials are sorted into fronts by dominance. Within a front, the order depends on a trial's distance from the others.
This is the order of NSGA-II (Deb et al. 2002) with its crowding distance, or of MO-ASHA (Schmucker et al. 2021) with
its epsilon-net. Trials that break a constraint come last, the least violation first (Deb et al. 2002, Sec. VI).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Literal

from hydro_rasda.schedulers.ranking import Mode

Point = Sequence[float]
"""The values of a trial's objectives."""

Bounds = tuple[float | None, float | None]
"""The lowest and the highest value that a constraint allows; None for no bound."""

Spread = Literal["crowding", "epsilon-net"]


def losses(point: Point, modes: Sequence[Mode]) -> tuple[float, ...]:
    """Negate the values of objectives whose mode is "max", so that lower is better in each objective."""
    return tuple(value if mode == "min" else -value for value, mode in zip(point, modes, strict=True))


def fronts(points: Sequence[Point]) -> list[list[int]]:
    """Sort points into fronts, and return the indices of each front. Lower is better in each objective.

    A point dominates another one if it is in no objective worse, and is better in at least one. No point of a front
    dominates another point of the same front. Each point of a later front is dominated by a point of the front before.
    Points that are equal share a front. A point's front is found by binary search (ENS-BS: Zhang et al. 2015).

    >>> fronts([(1, 3), (2, 2), (3, 3), (3, 1), (4, 4)])
    [[0, 1, 3], [2], [4]]
    """
    found, values = list[list[int]](), None
    if points and len(points[0]) > 2:
        import numpy as np  # imported only here, because reading a journal should not wait for it

        values = np.array(points, dtype=float)

    def spares(index: int, front: Sequence[int]) -> bool:
        """Tell whether no point of a front dominates the point at `index`, which comes later and is none of them."""
        if values is not None:
            return not bool((values[front] <= values[index]).all(1).any())
        # With two objectives, the last point of a front is the lowest in the second one.
        return points[front[-1]][-1] > points[index][-1]

    at, before = 0, None
    for index in sorted(range(len(points)), key=lambda i: (tuple(points[i]), i)):
        if before is None or tuple(points[index]) != before:
            at, before = bisect_left(found, True, key=partial(spares, index)), tuple(points[index])
        if at == len(found):
            found.append([])
        found[at].append(index)
    return [sorted(front) for front in found]


def crowding(points: Sequence[Point]) -> list[float]:
    """Return the crowding distance of each point of one front (NSGA-II); infinite at both ends of an objective.

    >>> crowding([(0, 4), (1, 2), (4, 0)])
    [inf, 2.0, inf]
    """
    distances = [0.0] * len(points)
    for axis in range(len(points[0]) if points else 0):
        order = sorted(range(len(points)), key=lambda i: points[i][axis])
        least, most = points[order[0]][axis], points[order[-1]][axis]
        if most > least:
            distances[order[0]] = distances[order[-1]] = math.inf
            for (before, _), (at, after) in pairwise(pairwise(order)):
                distances[at] += (points[after][axis] - points[before][axis]) / (most - least)
    return distances


def epsilon_net(points: Sequence[Point]) -> list[int]:
    """Order a front's points so that each prefix of the order covers the front.

    The first point is the best in the first objective. Each next point is the farthest from all points before it.
    Objectives are scaled to the front's range.

    >>> epsilon_net([(0, 4), (1, 3), (2, 2), (4, 0)])
    [0, 3, 2, 1]
    """
    if not points:
        return []
    axes = [*zip(*points, strict=True)]
    widths = [max(axis) - min(axis) or 1.0 for axis in axes]
    scaled = [tuple(value / width for value, width in zip(point, widths, strict=True)) for point in points]
    left = sorted(range(len(points)), key=lambda i: (tuple(points[i]), i))
    found = [left.pop(0)]
    nearest = {i: math.dist(scaled[i], scaled[found[0]]) for i in left}
    while nearest:
        farthest = max(nearest, key=lambda i: (nearest[i], -i))
        found.append(farthest)
        del nearest[farthest]
        nearest = {i: min(distance, math.dist(scaled[i], scaled[farthest])) for i, distance in nearest.items()}
    return found


def places(
    points: Mapping[int, Point],
    modes: Sequence[Mode],
    violations: Mapping[int, float] = {},
    spread: Spread = "crowding",
) -> dict[int, float]:
    """Return each trial's place in one order of all trials, 0 for the best; NaN if one of its values is not finite.

    Args:
        violations: Maps each trial that breaks a constraint to the size of its violation.
        spread: The order within a front. With "crowding", the least crowded trial comes first. With "epsilon-net", the
            order is that of `epsilon_net`.

    >>> places({0: (1, 3), 1: (9, 9), 2: (3, 1), 3: (0, 0)}, ("min", "min"), {3: 0.5})
    {0: 0.0, 1: 2.0, 2: 1.0, 3: 3.0}
    """
    numbers = sorted(n for n, point in points.items() if all(map(math.isfinite, point)))
    broken = {n: violations[n] for n in numbers if violations.get(n, 0) > 0}
    kept = [n for n in numbers if n not in broken]
    lows = [losses(points[n], modes) for n in kept]
    order: list[int] = []
    for front in fronts(lows):
        of_front = [lows[i] for i in front]
        if spread == "epsilon-net":
            inner = epsilon_net(of_front)
        else:
            distances = crowding(of_front)
            inner = sorted(range(len(front)), key=lambda i: -distances[i])
        order += [kept[front[i]] for i in inner]
    order += sorted(broken, key=lambda n: (broken[n], n))
    found = {n: float(place) for place, n in enumerate(order)}
    return {n: found.get(n, math.nan) for n in points}


def front_of(points: Mapping[int, Point], modes: Sequence[Mode]) -> list[int]:
    """Return the trials that no other trial dominates, ordered by the first objective, best first."""
    numbers = [n for n, point in points.items() if all(map(math.isfinite, point))]
    lows = [losses(points[n], modes) for n in numbers]
    (first, *_) = fronts(lows) or [[]]
    return [numbers[i] for i in sorted(first, key=lambda i: (lows[i], numbers[i]))]


def violation(values: Mapping[str, float], bounds: Mapping[str, Bounds]) -> float:
    """Return the sum by which values break bounds, each relative to its bound; infinite if one is NaN or missing.

    >>> violation({"macs": 150.0, "val_error": 0.5}, {"macs": (None, 100.0), "val_error": (0.25, 1.0)})
    0.5
    """
    total = 0.0
    for name, (low, high) in bounds.items():
        value = values.get(name, math.nan)
        if math.isnan(value):
            return math.inf
        for bound, excess in ((low, -1), (high, 1)):
            if bound is not None:
                total += max(0.0, excess * (value - bound)) / (abs(bound) or 1.0)
    return total


def hypervolume(points: Sequence[Point], reference: Point) -> float:
    """Return the volume that points dominate, up to a reference point. Lower is better in each objective.

    The volume is exact. It is computed by slices along the last objective, which is fast for tens of points.

    >>> hypervolume([(1, 3), (2, 2), (3, 1)], (4, 4))
    6.0
    """
    inside = [tuple(point) for point in points if all(a < b for a, b in zip(point, reference, strict=True))]
    return _volume(sorted({*inside}, key=lambda point: point[-1]), tuple(reference))


def _volume(inside: Sequence[Point], reference: Point) -> float:
    """Return the hypervolume of points in rising order of their last objective."""
    if not inside:
        return 0.0
    if len(reference) == 1:
        return float(reference[0] - min(point[0] for point in inside))
    total = 0.0
    for i, point in enumerate(inside):
        depth = (inside[i + 1][-1] if i + 1 < len(inside) else reference[-1]) - point[-1]
        if depth > 0:
            slab = sorted((below[:-1] for below in inside[: i + 1]), key=lambda below: below[-1])
            total += depth * _volume(slab, reference[:-1])
    return total
