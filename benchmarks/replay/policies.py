"""Policies that choose one configuration of a replay table, and the cost of the scores that they look at.

A policy is `policy(search) -> number`. It looks at validation scores through `Search`, which trains nothing, but counts
costs. A configuration costs its epochs at a width, up to the latest one that was looked at. A cooldown costs its
length. "Goodness" is a score of which higher is better; it is -inf if a training diverged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal, NamedTuple

from benchmarks.replay.table import Floats, Table, after_cooldown, goodness
from hydro_rasda.schedulers import (
    AsyncSuccessiveHalving,
    Decision,
    Race,
    Stop,
    SweepRule,
    SweepState,
    final_score,
    first_milestone,
    milestones,
)
from hydro_rasda.schedulers.milestones import last_look, race_milestones, sweep_milestones
from hydro_rasda.schedulers.named_rules import HALVING, RuleName, named_rule

TOP_K = 4
REDUCTION_FACTOR = 3
RACE_FACTOR = 2
Weights = Literal["own", "averaged"]


@dataclass
class Tables:
    """Arrays that all searches in a table share, computed once.

    Attributes:
        scores: `scores[width, weights]`: goodness [seed, config, epoch] of the weights that training left ("own"), or
            of averaged ones.
        kept: Goodness [seed, config, epoch] of the weights that would be handed back at full width after each epoch.
        cooled: `cooled[width, epoch, share]`: goodness [seed, config] after a cooldown.
        costs: Width -> cost of an epoch, in full trainings.
        by_width: If True, epochs are priced by `price_by_width`. If False, by the table's CPU seconds.
    """

    table: Table
    by_width: bool = False
    scores: dict[tuple[float, Weights], Floats] = field(init=False)
    kept: Floats = field(init=False)
    cooled: dict[tuple[float, int, float], Floats] = field(init=False)
    costs: dict[float, float] = field(init=False)

    def __post_init__(self) -> None:
        about = self.table.about
        widths = [width for width, there in zip(about.widths, self.table.recorded) if there.any()]
        self.scores = {(width, "own"): goodness(self.table, width) for width in widths}
        self.scores |= {(width, "averaged"): goodness(self.table, width, ema=True) for width in widths}
        self.kept = goodness(self.table, 1.0, keep="best")
        branches = [(width, *branch) for width in widths for branch in about.branches]
        self.cooled = {of: after_cooldown(self.table, *of) for of in branches}
        price = price_by_width if self.by_width else self.table.cost
        self.costs = {width: price(width) / about.max_t for width in widths}


def price_by_width(width: float) -> float:
    """Return the cost of a training if models are wide, in full trainings: its multiplications, and a little more.

    >>> price_by_width(1.0), price_by_width(1 / 4)
    (1.0, 0.0825)
    """
    return 1.0 if width == 1 else width**2 + 0.02


@dataclass
class Search:
    """One search: some configurations, in order, with one seed.

    Attributes:
        spent: Cost so far, in full trainings.
        trained: An entry for each look at full width that trained: cost after it, number, epoch.
    """

    tables: Tables
    seed: int
    numbers: Sequence[int]
    spent: float = field(default=0.0, init=False)
    trained: list[tuple[float, int, int]] = field(default_factory=list, init=False)
    _paid: dict[tuple[float, int], int] = field(default_factory=dict)

    @property
    def max_t(self) -> int:
        """Return the epochs of a full training."""
        return self.tables.table.about.max_t

    @property
    def warmup(self) -> float:
        """Return the longest warm-up in epochs. `tune` has no rung before it is over."""
        return max(float(self.tables.table.about.configs[n].get("warmup_epochs", 0)) for n in self.numbers)

    def look(self, width: float, number: int, epoch: int, weights: Weights = "own") -> float:
        """Return the goodness of a configuration after an epoch, and pay for the epochs that are new."""
        added = epoch - self.reached(number, width)
        if added > 0:
            self._paid[width, number] = epoch
            self.spent += self.tables.costs[width] * added
            if width == 1:
                self.trained.append((self.spent, number, epoch))
        return float(self.tables.scores[width, weights][self.seed, number, epoch - 1])

    def look_cooled(self, width: float, number: int, epoch: int, share: float) -> float:
        """Do the same as `look`, after a cooldown that lasts a share of the epochs so far, if one is recorded."""
        score = self.look(width, number, epoch)
        cooled = self.tables.cooled.get((width, epoch, share))
        if cooled is None:
            return score
        self.spent += self.tables.costs[width] * share * epoch
        return float(cooled[self.seed, number])

    def reached(self, number: int, width: float = 1.0) -> int:
        """Return the number of epochs that a configuration has trained at a width."""
        return self._paid.get((width, number), 0)

    def spent_by_width(self) -> float:
        """Return the cost of all epochs in full trainings by `price_by_width`. Cooldowns do not count."""
        return sum(price_by_width(width) * epochs for (width, _), epochs in self._paid.items()) / self.max_t


Policy = Callable[[Search], int]


def best_of(scores: Mapping[int, float], count: int) -> list[int]:
    """Return the best `count` numbers, best first. If scores are equal, the lower number comes first."""
    return sorted(scores, key=lambda n: (-scores[n], n))[:count]


def asha(search: Search) -> int:
    """Run ASHA at full size, one trial after another, and return the best trial that finished.

    The rule is that of Li et al. (2020), with which Ray stops trials.
    """
    rule = AsyncSuccessiveHalving(search.max_t, 1, REDUCTION_FACTOR, mode="max")
    rungs, finished = rule.init(), dict[int, float]()
    for n in search.numbers:
        for epoch in range(1, search.max_t + 1):
            score = search.look(1.0, n, epoch)
            rungs, decision = rule.report(rungs, str(n), epoch, score)
            if epoch == search.max_t:
                finished[n] = score
            if decision is Decision.STOP:
                break
    (winner,) = best_of(finished, 1)
    return winner


def one_epoch(count: int) -> Policy:
    """Train all for one epoch at full size, then the best `count` to the end (arXiv:2307.15422)."""

    def policy(search: Search) -> int:
        return to_the_end(search, best_of({n: search.look(1.0, n, 1) for n in search.numbers}, count))

    return policy


def at_random(count: int) -> Policy:
    """Train the first `count` to the end."""
    return lambda search: to_the_end(search, list(search.numbers)[:count])


def swept(count: int, width: float = 1 / 8) -> Policy:
    """Sweep by today's rule, then train the best `count` to the end. A count of 1 is Hydro's rule."""
    rule = Tune(finalists=count, width=width)
    return lambda search: rule.best_in_the_end(search, rule.sweep(search))


def to_the_end(search: Search, numbers: Sequence[int]) -> int:
    """Train these at full size to the end, and return the best by the weights that training left."""
    (winner,) = best_of({n: search.look(1.0, n, search.max_t) for n in numbers}, 1)
    return winner


@dataclass(frozen=True)
class Tune:
    """`tune`: its sweep, and the race of its finalists.

    Attributes:
        width: Width of the sweep's models. At 1, finalists go on from where they are.
        cooldown: Length of a cooldown before comparisons of the sweep, as a share of the epochs trained.
        race_cooldown: The same in the race.
        sweep_by: Weights that the sweep compares.
        first_look: Share of a training after which the race compares its finalists first.
        rule: Name of the sweep's rule. Only "halving" uses `cooldown` and `sweep_by`; other rules compare own weights.
        last_look: If True, finalists stop midway to the end if they are not worth the rest of their training.
        leader_first: If True, the sweep's best trains to its end before the others, as if `time_budget_s` were short.
        by: "both": the race compares last weights, and in the end also averages (`final_score`). The trial with the
            best averages always goes on. "last weights": it compares only these. "best epochs": it compares averages,
            and in the end their best epochs.
    """

    finalists: int = TOP_K
    width: float = 1 / 8
    cooldown: float = 0.0
    race_cooldown: float = 0.0
    sweep_by: Weights = "own"
    first_look: float = 1 / 2
    full_trainings: float = 3.0
    last_look: bool = True
    leader_first: bool = False
    by: Literal["both", "last weights", "best epochs"] = "both"
    rule: RuleName = HALVING

    @property
    def widths(self) -> tuple[float, ...]:
        """Return all widths below the full one at which it trains."""
        return (self.width,)

    def __call__(self, search: Search) -> int:
        """Return the winner's number."""
        finalists = left = self.sweep(search)
        rule = Race(search.max_t, "max", RACE_FACTOR, self.full_trainings)
        # The race does not pay for epochs that a sweep at full width has trained.
        before = sum(map(search.reached, finalists))
        if self.leader_first:
            search.look(1.0, finalists[0], search.max_t)
        for stop in self.stops_of(search):
            scores = {n: self.compared(search, n, stop) for n in left}
            if stop == self._last_look_of(search):
                curves = {n: {at: search.look(1.0, n, at, "averaged") for at in range(1, stop + 1)} for n in left}
                left = rule.worthwhile(stop, scores, curves) or left[:1]
            else:
                trained = sum(min(stop, search.reached(n)) for n in finalists)
                left = rule.promote(stop, scores, trained - before) or left[:1]
            if self.by == "both" and stop < search.max_t:
                left = rule.with_leader(left, {n: search.look(1.0, n, stop, "averaged") for n in scores})
        if self.by == "best epochs":
            return best_of({n: best_epoch(search, n) for n in finalists}, 1)[0]
        return self.best_in_the_end(search, [*left[:1], *finalists[: self.leader_first]])

    def best_in_the_end(self, search: Search, numbers: Sequence[int]) -> int:
        """Train these to the end, and return the best."""
        return best_of({n: self.compared(search, n, search.max_t) for n in numbers}, 1)[0]

    def sweep(self, search: Search) -> list[int]:
        """Sweep as `tune` does, and return the finalists, best first."""
        first = first_milestone(1, search.max_t, REDUCTION_FACTOR, search.warmup)
        left, stops = list(search.numbers), sweep_milestones(first, search.max_t, REDUCTION_FACTOR)
        if self.rule != HALVING:
            rule = named_rule(self.rule, stops, REDUCTION_FACTOR, "max", self.finalists)
            return played(rule, search, self.width, self.finalists)
        for stop in stops:
            if self.cooldown:
                scores = {n: search.look_cooled(self.width, n, stop, self.cooldown) for n in left}
            else:
                scores = {n: search.look(self.width, n, stop, self.sweep_by) for n in left}
            left = best_of(scores, max(self.finalists, len(left) // REDUCTION_FACTOR))
            if len(left) <= self.finalists:
                break
        return left[: self.finalists]

    def first_look_of(self, search: Search) -> int:
        """Return the epoch of the race's first milestone. No milestone lies before the end of warm-ups."""
        asked = max(1, math.ceil(self.first_look * search.max_t - 1e-9))
        return first_milestone(asked, search.max_t, RACE_FACTOR, search.warmup)

    def stops_of(self, search: Search) -> tuple[int, ...]:
        """Return the epochs at which the race compares."""
        rule = milestones if self._last_look_of(search) is None else race_milestones
        return rule(self.first_look_of(search), search.max_t, RACE_FACTOR)

    def _last_look_of(self, search: Search) -> int | None:
        looks = self.last_look and self.by != "best epochs"
        return last_look(milestones(self.first_look_of(search), search.max_t, RACE_FACTOR)) if looks else None

    def compared(self, search: Search, number: int, stop: int) -> float:
        """Train to an epoch, and return the goodness by which the race compares there."""
        if self.race_cooldown and stop < search.max_t:
            return search.look_cooled(1.0, number, stop, self.race_cooldown)
        own, averaged = search.look(1.0, number, stop), search.look(1.0, number, stop, "averaged")
        if self.by == "both" and stop == search.max_t:
            first = search.look(1.0, number, 1, "averaged")
            return final_score(own, max(own, averaged), first, "max")  # the better weights are handed back
        return averaged if self.by == "best epochs" else own


class Heat(NamedTuple):
    """Trainings on narrow models, between the sweep and full size.

    Attributes:
        trials: Number of trials that take part, the best ones.
        length: Share of a training after which they are compared.
    """

    trials: int
    width: float = 1 / 4
    length: float = 1.0


@dataclass(frozen=True)
class Ladder(Tune):
    """The sweep, heats on narrow models, and a race of the few trials that are left. `tune` has at most one such heat.

    Attributes:
        heats: Heats that run one after another. Each compares narrow models by `heats_by`.
        full_size: Number of the last heat's best trials that train at full size.
        look: Share of a training after which trials behind the leader stop if they are not worth the rest of their
            training. None: all train to the end. "race": trials are compared as often as in today's race.
        margin: A trial trains at full size only if it is close to the best of the last heat. It may be behind by at
            most `margin` times the usual change of scores in the second half of the heat.
        forecast: If True, expect at the look that scores will change as those of the narrow models did from there on.
    """

    heats: tuple[Heat, ...] = (Heat(8),)
    full_size: int = 2
    look: float | Literal["race"] | None = 3 / 4
    heats_by: Weights = "own"
    margin: float = math.inf
    forecast: bool = False

    @property
    def widths(self) -> tuple[float, ...]:
        """Return all widths below the full one at which it trains."""
        return (self.width, *(heat.width for heat in self.heats))

    def sweep(self, search: Search) -> list[int]:
        """Sweep and train the heats, and return the trials that train at full size, best first."""
        counts = [*(heat.trials for heat in self.heats), self.full_size]
        left = Tune(finalists=counts[0], width=self.width).sweep(search)
        for heat, count in zip(self.heats, counts[1:]):
            scores = {n: search.look(heat.width, n, self._end_of(heat, search), self.heats_by) for n in left}
            left = best_of(scores, count)
        return self._near(search, left) if self.margin < math.inf else left

    def stops_of(self, search: Search) -> tuple[int, ...]:
        """Return the epochs at which the race compares."""
        if self.look == "race":
            return super().stops_of(search)
        look = self._last_look_of(search)
        return (search.max_t,) if look is None else (look, search.max_t)

    def compared(self, search: Search, number: int, stop: int) -> float:
        """Train to an epoch, and return the goodness by which the race compares there."""
        score, width = super().compared(search, number, stop), self.widths[-1]
        if not self.forecast or stop == search.max_t:
            return score
        change = search.look(width, number, search.max_t) - search.look(width, number, stop)
        return score + change if math.isfinite(change) else score

    def _last_look_of(self, search: Search) -> int | None:
        if self.look == "race":
            return super()._last_look_of(search)
        return None if self.look is None else math.ceil(self.look * search.max_t)

    @staticmethod
    def _end_of(heat: Heat, search: Search) -> int:
        return math.ceil(heat.length * search.max_t)

    def _near(self, search: Search, left: list[int]) -> list[int]:
        """Return the best of the last heat, and the trials that are behind it by at most the margin."""
        width, end = self.heats[-1].width, self._end_of(self.heats[-1], search)
        there = [n for n in search.numbers if search.reached(n, width) >= end]
        changes = [search.look(width, n, end) - search.look(width, n, math.ceil(end / 2)) for n in there]
        usual = math.sqrt(fmean([change**2 for change in changes if math.isfinite(change)] or [0.0]))
        least = search.look(width, left[0], end) - self.margin * usual
        return [left[0], *(n for n in left[1:] if search.look(width, n, end) >= least)]


def played(rule: SweepRule, search: Search, width: float, finalists: int) -> list[int]:
    """Sweep by a rule, on one device that trains each trial to its milestone at once."""
    state = SweepState("max", search.max_t, finalists)
    for place in range(len(search.numbers)):
        state.admit(place, {})
    while True:
        moves = rule.decide(state)
        if not moves:
            state.idle = True
            moves, state.idle = rule.decide(state), False
        if not moves:
            return [search.numbers[place] for place in rule.finalists(state)][:finalists]
        for place, move in moves.items():
            if isinstance(move, Stop):
                state.drop(place)
                continue
            number, start = search.numbers[place], state.trials[place].epoch
            state.go_on(place, move.to)
            state.come(place, {at: search.look(width, number, at) for at in range(start + 1, move.to + 1)})


def best_epoch(search: Search, number: int) -> float:
    """Return the best goodness of averaged weights at full width, over all epochs so far."""
    curve = search.tables.scores[1.0, "averaged"][search.seed, number, : search.reached(number)]
    return float(curve.max(initial=-math.inf))


today = Tune()
"""The rule of `tune`."""
