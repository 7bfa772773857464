"""Decides how many trials to fuse, from measured values only, without a model, a device or a clock.

K is the width of a group: its number of members. `speedup[K]` is the throughput of K fused trials, divided by the
throughput of trials one after another. `peak_bytes[K]` is the peak memory of K fused trials.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Timings on one machine vary by this share, so a smaller gain is not worth a wider group.
TOLERANCE = 0.03
# The next width to measure is twice the last one. A group of all trials may be wider than that by up to this factor.
STRETCH = 1.25
# A wider group counts as slower if its speedup is lower by more than this share.
LOSS = 0.1
# Measuring a width may end early if there are at least this number of measurements, and all agree. Fewer could agree by
# chance.
AGREEING = 5


@dataclass(frozen=True)
class FusionPlan:
    """A plan for training trials of one shape.

    Attributes:
        width: Number of members in a group. With 1, trials train one after another, because fusing does not pay or is
            not possible.
        limit: The largest width that fits memory; None if the memory is not known.
        bytes_per_trial: Memory that each member adds.
        fixed_bytes: Memory that a group takes at any width.
        throughput: Width -> steps per second, summed over trials. Width 1 stands for trials one after another.
        micro_batches: Number of parts into which a batch must be split to fit; 1 unless a single trial does not fit.
        obstacle: The reason why members cannot be evaluated at once, so that the width is 1; empty if they can.
    """

    width: int
    limit: int | None
    bytes_per_trial: int
    fixed_bytes: int
    throughput: Mapping[int, float]
    micro_batches: int = 1
    obstacle: str = ""

    def groups(self, trials: int) -> list[int]:
        """Return the sizes of the groups for `trials` trials: as few as the width allows, of nearly equal size.

        >>> FusionPlan(width=8, limit=None, bytes_per_trial=0, fixed_bytes=0, throughput={}).groups(20)
        [7, 7, 6]
        """
        count = -(-trials // self.width)
        return [trials // count + (i < trials % count) for i in range(count)] if trials else []


def best_width(speedup: Mapping[int, float], limit: int | None = None) -> int:
    """Return the smallest width whose throughput is within 3 % of the highest, among widths up to `limit`.

    Return 1 (no fusing) unless fusing is more than 3 % faster.

    >>> best_width({2: 1.4, 4: 1.9, 8: 1.91})
    4
    >>> best_width({2: 0.7, 4: 1.02})
    1
    """
    fitting = {1: 1.0, **{K: s for K, s in speedup.items() if limit is None or limit >= K}}
    highest = max(fitting.values())
    if highest <= 1.0 + TOLERANCE:
        return 1
    return min(K for K, s in fitting.items() if s >= highest * (1 - TOLERANCE))


def next_width(speedup: Mapping[int, float], trials: int, limit: int | None = None) -> int | None:
    """Return the next width to measure: twice the last width, but at most `trials`; None if the search ends.

    If `trials` is less than 1.25 times this width, the next width is `trials`, provided that all fit within `limit`.

    The search ends if two widths in a row are more than 10 % slower than a narrower one, because caches are full then.
    A smaller loss may be noise of a busy machine. The search also ends at the number of trials or at `limit`.

    >>> [next_width({}, 32), next_width({2: 1.5}, 32), next_width({2: 1.5, 4: 2.0}, 6), next_width({16: 5.0}, 36)]
    [2, 4, 6, 36]
    >>> next_width({2: 1.5, 4: 2.0, 8: 1.6, 16: 1.4}, 32) is None
    True
    """
    measured = sorted(speedup)
    width = min(2 * measured[-1] if measured else 2, trials)
    if trials < width * STRETCH and (limit is None or trials <= limit):
        width = trials
    if (measured and width <= measured[-1]) or width < 2 or (limit is not None and width > limit):
        return None
    best_before = max((speedup[K] for K in measured[:-2]), default=0.0)
    stalled = all(speedup[K] < best_before * (1 - LOSS) for K in measured[-2:])
    return None if measured and stalled else width


def is_clear(measured: Sequence[float], best: float) -> bool:
    """Return whether a width is clearly faster or slower than the best narrower one, so that measuring can stop.

    There must be at least 5 measured speedups, and all of them must be more than 10 % above `best`, or all more than
    10 % below it.

    >>> is_clear([1.9, 1.7, 2.2, 1.8, 1.9], best=1.0), is_clear([1.9, 1.7, 2.2, 1.8, 1.9], best=1.8)
    (True, False)
    >>> is_clear([1.9, 1.7, 2.2], best=1.0), is_clear([0.8, 0.7, 0.8, 0.6, 0.8], best=1.0)
    (False, True)
    """
    if len(measured) < AGREEING:
        return False
    return min(measured) > best * (1 + LOSS) or max(measured) < best * (1 - LOSS)


def memory_line(peak_bytes: Mapping[int, int]) -> tuple[int, int]:
    """Fit `fixed + per_trial * K` to the measured peaks by least squares; return (fixed, per_trial), both >= 0.

    >>> memory_line({2: 50, 4: 90, 8: 170})
    (10, 20)
    >>> memory_line({4: 80})
    (0, 20)
    """
    points = [(K, peak) for K, peak in peak_bytes.items()]
    mean_K = sum(K for K, _ in points) / len(points)
    mean_peak = sum(peak for _, peak in points) / len(points)
    spread = sum((K - mean_K) ** 2 for K, _ in points)
    slope = sum((K - mean_K) * (peak - mean_peak) for K, peak in points) / spread if spread else 0.0
    fixed = mean_peak - slope * mean_K
    if slope <= 0 or fixed < 0:
        # The fit predicts negative memory, or memory that does not grow with K. Fit a line through the origin instead.
        fixed, slope = 0.0, sum(K * peak for K, peak in points) / sum(K * K for K, _ in points)
    return round(fixed), round(slope)


def memory_limit(fixed: int, per_trial: int, memory: int) -> int:
    """Return the largest width whose predicted peak fits `memory` bytes; 0 if not even one trial fits.

    >>> memory_limit(10, 20, 100)
    4
    """
    return max(0, (memory - fixed) // max(per_trial, 1))
