"""Policies that choose one configuration of a replay table, and what each pays for what it looks at.

A policy is `policy(search) -> number`: it looks at validation scores through `Search.look`, which trains nothing but
keeps account: a configuration at a width is paid as far as its latest epoch. What it returns counts as far as it was
trained at full width, which is to the end unless best epochs count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from benchmarks.replay.table import Table
from benchmarks.replay.truth import Floats, Keep, after_each_epoch, goodness
from hydro_rasda.schedulers import AsyncSuccessiveHalving, Decision, Race, first_milestone, milestones
from hydro_rasda.schedulers.milestones import sweep_milestones

TOP_K = 4
REDUCTION_FACTOR = 3


@dataclass
class Tables:
    """What all searches in a table share, computed once.

    Attributes:
        table: The table.
        keep: Which epoch's weights count.
        curves: Goodness by width and whether weights are averaged: [seed, config, epoch].
        latest: Likewise, of each epoch for itself, whichever is kept.
        costs: Of an epoch by width, in full trainings.
    """

    table: Table
    keep: Keep = "last"
    curves: dict[tuple[float, bool], Floats] = field(init=False)
    latest: dict[tuple[float, bool], Floats] = field(init=False)
    costs: dict[float, float] = field(init=False)

    def __post_init__(self) -> None:
        about = self.table.about
        widths = [width for width, there in zip(about.widths, self.table.recorded) if there.any()]
        which = [(width, ema) for width in widths for ema in (False, True)]
        self.curves = {(w, ema): goodness(self.table, w, ema=ema, keep=self.keep) for w, ema in which}
        self.latest = {(w, ema): after_each_epoch(self.table, w, ema=ema, keep=self.keep) for w, ema in which}
        self.costs = {width: self.table.cost(width) / about.max_t for width in widths}


@dataclass
class Search:
    """One search: some configurations, in order, with one seed.

    Attributes:
        tables: Where scores come from.
        seed: Place of the seed in the table.
        numbers: Of the configurations that may be tried.
        spent: In full trainings.
        trained: What each look at full width that trained added: spent after it, number, epoch.
    """

    tables: Tables
    seed: int
    numbers: Sequence[int]
    spent: float = field(default=0.0, init=False)
    trained: list[tuple[float, int, int]] = field(default_factory=list, init=False)
    _paid: dict[tuple[float, int], int] = field(default_factory=dict)

    @property
    def max_t(self) -> int:
        """Epochs of a full training."""
        return self.tables.table.about.max_t

    @property
    def warmup(self) -> float:
        """The longest warm-up, in epochs: `tune` has no rung before it is over."""
        return max(float(self.tables.table.about.configs[n].get("warmup_epochs", 0)) for n in self.numbers)

    def look(self, width: float, number: int, epoch: int, *, ema: bool = False, latest: bool = False) -> float:
        """Goodness of a configuration after an epoch: higher is better, -inf where it diverged.

        It is that of the weights that count, or of the `latest`; of averaged ones if `ema` says so.
        """
        added = epoch - self.reached(number, width)
        if added > 0:
            self._paid[width, number] = epoch
            self.spent += self.tables.costs[width] * added
            if width == 1:
                self.trained.append((self.spent, number, epoch))
        curves = self.tables.latest if latest else self.tables.curves
        return float(curves[width, ema][self.seed, number, epoch - 1])

    def reached(self, number: int, width: float = 1.0) -> int:
        """Epochs that a configuration has trained at a width."""
        return self._paid.get((width, number), 0)


Policy = Callable[[Search], int]


def best_of(scores: dict[int, float], count: int) -> list[int]:
    """The best so many, best first; ties go by the lower number."""
    return sorted(scores, key=lambda n: (-scores[n], n))[:count]


def best_of_each_schedule(search: Search, scores: dict[int, float], count: int) -> list[int]:
    """The best so many, of each schedule about as large a share as it has among them, best first."""
    configs, of_each = search.tables.table.about.configs, dict[str, list[int]]()
    for n in best_of(scores, len(scores)):
        of_each.setdefault(str(configs[n].get("schedule")), []).append(n)
    # As many as its share, rounded down; those that are left go to the largest remainders.
    shares = {schedule: count * len(those) / len(scores) for schedule, those in of_each.items()}
    whole = {schedule: math.floor(share) for schedule, share in shares.items()}
    short = sorted(shares, key=lambda schedule: whole[schedule] - shares[schedule])[: count - sum(whole.values())]
    kept = [n for schedule, those in of_each.items() for n in those[: whole[schedule] + (schedule in short)]]
    return best_of({n: scores[n] for n in kept}, count)


def asha(search: Search) -> int:
    """ASHA at full size, one trial after another (Li et al. 2020, as Ray stops trials): the best that finished."""
    rule = AsyncSuccessiveHalving(search.max_t, 1, REDUCTION_FACTOR, "max")
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
    """All for one epoch at full size, the best so many to the end (arXiv:2307.15422)."""

    def policy(search: Search) -> int:
        return to_the_end(search, best_of({n: search.look(1.0, n, 1) for n in search.numbers}, count))

    return policy


def at_random(count: int) -> Policy:
    """The first so many to the end."""
    return lambda search: to_the_end(search, list(search.numbers)[:count])


def swept(count: int, width: float = 1 / 8, *, ema: bool = False) -> Policy:
    """Today's sweep, then the best so many to the end; one is Hydro's rule."""
    return lambda search: to_the_end(search, sweep(search, width, max(count, 1), ema=ema)[:count])


@dataclass(frozen=True)
class Tune:
    """`tune`: its sweep, and the race of its finalists.

    Attributes:
        finalists: How many race.
        width: Of the sweep's models; with 1, finalists go on from where they are.
        by_schedule: Whether the sweep's rungs keep of each schedule as large a share as it has there.
        grace_period: Epochs of the sweep's first rung.
        swept_to_end: Whether the sweep has a rung at the end of a training, too.
        first_look: Share of a training after which the race may stop a finalist.
        full_trainings: That the race may cost; without any, it halves to one.
        prior: Whether the race expects of finalists what their surrogates' scores changed by.
        stop_unlikely: Whether those stop at its milestones that are unlikely to be the best.
        ema: Whether averaged weights rank the sweep, too.
    """

    finalists: int = TOP_K
    width: float = 1 / 8
    by_schedule: bool = False
    grace_period: int = 1
    swept_to_end: bool = False
    first_look: float = 1 / 9
    full_trainings: float = 3.0
    prior: bool = True
    stop_unlikely: bool = True
    ema: bool = False

    def __call__(self, search: Search) -> int:
        """The winner's number."""
        finalists = sweep(
            search,
            self.width,
            self.finalists,
            grace_period=self.grace_period,
            to_end=self.swept_to_end,
            ema=self.ema,
            by_schedule=self.by_schedule,
        )
        return race(
            search,
            finalists,
            self.full_trainings,
            swept_at=self.width,
            looked_after=self.first_look,
            prior=self.prior,
            stop_unlikely=self.stop_unlikely,
        )


today = Tune()
halved = Tune(full_trainings=0)


def rungs(max_t: int, warmup: float, grace_period: int = 1, *, to_end: bool = False) -> Sequence[int]:
    """Epochs of the sweep's rungs: none before warm-ups are over; the last one where `tune` has it, or in the end."""
    first = first_milestone(min(grace_period, max_t), max_t, REDUCTION_FACTOR, warmup)
    return (milestones if to_end else sweep_milestones)(first, max_t, REDUCTION_FACTOR)


def sweep(
    search: Search,
    width: float,
    keep: int,
    *,
    grace_period: int = 1,
    to_end: bool = False,
    ema: bool = False,
    by_schedule: bool = False,
) -> list[int]:
    """Successive halving as `tune`'s, its rungs as `rungs` has them: the best `keep`, best first."""
    best = partial(best_of_each_schedule, search) if by_schedule else best_of
    left = list(search.numbers)
    for stop in rungs(search.max_t, search.warmup, grace_period, to_end=to_end):
        scores = {n: search.look(width, n, stop, ema=ema, latest=True) for n in left}
        left = best(scores, max(keep, len(left) // REDUCTION_FACTOR))
        if len(left) <= keep:
            break
    return left[:keep]


def race(
    search: Search,
    finalists: Sequence[int],
    full_trainings: float = 3.0,
    *,
    swept_at: float = 1 / 8,
    looked_after: float = 1 / 9,
    prior: bool = True,
    stop_unlikely: bool = True,
) -> int:
    """The full-size stage of `tune`: at each milestone, those go on that may still be the best; see `Race`.

    Without a prior, what their surrogates did later does not count. What a sweep at full width trained is no part of
    what the race costs.
    """
    left, max_t = list(finalists), search.max_t
    last = search.tables.keep == "last"
    rule = Race(max_t, "max", "last" if last else "best", 2, full_trainings)
    swept_to = max((search.reached(n, swept_at) for n in left), default=0)
    before = sum(map(search.reached, left)) if swept_at == 1 else 0
    for stop in milestones(first_look(search, looked_after), max_t, 2):
        full = {n: {at: search.look(1.0, n, at, latest=True) for at in range(1, stop + 1)} for n in left}
        looked_at = (stop, swept_to) if prior and swept_to > stop else ()
        narrow = {n: {at: search.look(swept_at, n, at, latest=True) for at in looked_at} for n in left}
        trained = sum(map(search.reached, finalists)) - before
        if stop_unlikely:
            left = rule.promote(stop, full, narrow, trained)
        else:
            ends = rule.outlooks(dict.fromkeys(full, stop), full, narrow)
            foreseen = {n: end.expected("max") for n, end in ends.items()}
            left = best_of(foreseen, max(len(left) // 2, rule.affordable(stop, trained)))
    if last:
        return left[0]
    return best_of({n: search.look(1.0, n, search.reached(n)) for n in finalists}, 1)[0]


def first_look(search: Search, share: float = 1 / 9) -> int:
    """The epoch of the race's first milestone: after that share of a training, none before warm-ups are over."""
    return first_milestone(max(1, math.floor(share * search.max_t + 1e-9)), search.max_t, 2, search.warmup)


def to_the_end(search: Search, numbers: Sequence[int]) -> int:
    """The best of these at full size in the end."""
    (winner,) = best_of({n: search.look(1.0, n, search.max_t) for n in numbers}, 1)
    return winner
