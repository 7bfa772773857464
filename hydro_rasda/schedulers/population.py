"""Population based training: the worst trials continue as copies of the best trials, with changed hyperparameters.

Jaderberg et al., "Population based training of neural networks" (2017): exploitation by truncation selection,
exploration by perturbing and resampling. The whole population is decided together, every `interval` epochs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from hydro_rasda.common.argument_checks import check_int, is_number, require
from hydro_rasda.schedulers.ranking import Mode, ranked
from hydro_rasda.schedulers.sweep_rule import Continue, Move, RuleToLast, Stop
from hydro_rasda.schedulers.sweep_state import SweepState


@dataclass(frozen=True)
class Range:
    """The values that a hyperparameter may take, from `low` to `high`.

    Attributes:
        log: If True, values are drawn uniformly on a logarithmic scale; if False, on a linear scale.

    >>> Range(0.01, 1.0, log=True).at(0.5), Range(0.0, 0.5).nearest(0.6)
    (0.1..., 0.5)
    """

    low: float
    high: float
    log: bool = False

    def at(self, share: float) -> float:
        """Return the quantile at `share`: this share of random draws lies below the returned value."""
        if self.log:
            return self.nearest(self.low * (self.high / self.low) ** share)
        return self.nearest(self.low + (self.high - self.low) * share)

    def nearest(self, value: float) -> float:
        """Return the nearest value within the range."""
        return min(max(value, self.low), self.high)


Explored = Mapping[str, Range | Sequence[float]]
"""Maps the name of a hyperparameter to a range, or to a list of values in ascending order."""


@dataclass(frozen=True)
class PopulationBasedTraining(RuleToLast):
    """Replace the worst trials by copies of the best trials at every interval, and change the copies' hyperparameters.

    A trial that diverged or failed is replaced, too. All trials are decided together: a device waits at the end of an
    interval until the last trial is there. Selection and exploration are those of Ray Tune's
    `PopulationBasedTraining(synch=True)`, except that ties may differ and values stay within their ranges.

    Attributes:
        explored: The hyperparameters that a copy changes. A key that the configuration of the copied trial lacks is
            skipped.
        last: The epoch at which the sweep ends.
        interval: Epochs between two decisions.
        quantile: Share of the population that is replaced, at most a half. The same share is copied.
        resample: Probability that a hyperparameter is drawn anew.
        factors: A hyperparameter that is not drawn anew is multiplied by one of these factors. If it has a list of
            values, it moves to a neighbor in the list instead.

    Raises:
        ValueError: If an argument is out of range, or nothing is explored.
    """

    explored: Explored
    last: int
    interval: int = 1
    quantile: float = 0.25
    resample: float = 0.25
    factors: Sequence[float] = (0.8, 1.2)

    def __post_init__(self) -> None:
        check_int("last", self.last, at_least=1)
        check_int("interval", self.interval, at_least=1)
        named = isinstance(self.explored, Mapping) and bool(self.explored)
        rule = "a dict of at least one hyperparameter: a rising `Range` (above 0 with `log`), or a list of values"
        require(named and all(map(_holds_values, self.explored.values())), "explored", self.explored, rule)
        require(is_number(self.quantile) and 0 <= self.quantile <= 0.5, "quantile", self.quantile, "in [0, 0.5]")
        require(is_number(self.resample) and 0 <= self.resample <= 1, "resample", self.resample, "in [0, 1]")
        good = len(self.factors) > 0 and all(is_number(factor) and factor > 0 for factor in self.factors)
        require(good, "factors", self.factors, "a list of numbers > 0")

    def decide(self, sweep: SweepState) -> Mapping[int, Move]:
        """Let all trials train to the end of the next interval, the worst as copies of the best."""
        if new := sweep.waiting_at(0):
            return {number: Continue(min(self.interval, self.last)) for number in new}
        at = min((trial.epoch for trial in sweep.waiting.values()), default=self.last)
        if sweep.left or sweep.training or at >= self.last:
            return {}
        to = min(at + self.interval, self.last)
        there = sweep.waiting_at(at)
        lower, upper = self.quantiles({number: trial.score for number, trial in there.items()}, sweep.mode)
        moves: dict[int, Move] = {number: Continue(to) for number in there} | {number: Stop() for number in lower}
        draws = {number: _draws(sweep.seed, at, number) for number in lower if upper}
        for number, numbers in draws.items():
            source = _chosen(upper, next(numbers))
            moves[number] = Continue(to, source, self.explore(sweep.trials[source].config, numbers))
        return moves

    def quantiles(self, scores: Mapping[int, float], mode: Mode) -> tuple[list[int], list[int]]:
        """Return the trials that become copies, and the trials that are copied; both lists go from better to worse.

        >>> PopulationBasedTraining({"lr": Range(0.0, 1.0)}, 9).quantiles({0: 4.0, 1: 3.0, 2: 2.0, 3: 1.0}, "min")
        ([0], [3])
        """
        best_first = ranked(dict(sorted(scores.items())), mode)
        sound = [number for number in best_first if math.isfinite(scores[number])]
        size = min(math.ceil(len(sound) * self.quantile), len(sound) // 2)
        upper = sound[: size or (1 if self.quantile else 0)]
        return sound[len(sound) - size :] + best_first[len(sound) :], upper

    def explore(self, config: Mapping[str, Any], draws: Iterator[float]) -> dict[str, float]:
        """Return the changed values for a copy of `config`. Each hyperparameter uses two of the `draws` in [0, 1)."""
        changes: dict[str, float] = {}
        for key, values in self.explored.items():
            anew, which = next(draws) < self.resample, next(draws)
            value = config.get(key)
            if not is_number(value):
                continue
            if isinstance(values, Range):
                changes[key] = values.at(which) if anew else values.nearest(value * _chosen(self.factors, which))
            elif anew or value not in values:
                changes[key] = _chosen(values, which)
            else:
                neighbour = values.index(value) + _chosen((-1, 1), which)
                changes[key] = values[min(max(neighbour, 0), len(values) - 1)]
        return changes


def _holds_values(values: object) -> bool:
    if isinstance(values, Range):
        sound = is_number(values.low) and is_number(values.high) and values.low <= values.high
        return sound and (0 if values.log else -math.inf) < values.low
    return isinstance(values, list | tuple) and len(values) > 0 and all(map(is_number, values))


def _chosen(of: Sequence[Any], share: float) -> Any:
    return of[int(share * len(of))]


def _draws(*of: int) -> Iterator[float]:
    """Yield random numbers in [0, 1), which are the same for the same `of`: seed, epoch and trial."""
    for i in count():
        digest = hashlib.blake2b(repr((*of, i)).encode(), digest_size=8).digest()
        yield (int.from_bytes(digest, "big") >> 11) / 2**53
