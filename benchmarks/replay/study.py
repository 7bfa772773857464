"""Policies replayed on random subsets of a table's configurations, with each of its seeds.

What a policy chose is judged by the other seeds: the mean of their last test scores at full width, in standard
deviations between seeds. Subsets overlap, and so do the seeds that judge: intervals over them would be too narrow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.replay.guided import Guided
from benchmarks.replay.policies import (
    Policy,
    Search,
    Tables,
    asha,
    at_random,
    halved,
    one_epoch,
    swept,
    today,
)
from benchmarks.replay.shares import Rule, telescoped
from benchmarks.replay.table import Table
from benchmarks.replay.tpe import TPE
from benchmarks.replay.truth import Ints, Keep, complete_seeds, goodness, seed_spread, subsets, truth

SHARE, RESAMPLES = 0.75, 100
BASELINE = "ASHA"
MOST = 10.0
"""Standard deviations that a run counts as behind or ahead at most: what diverges is infinitely behind."""
LATE = ((1 / 3, 2 / 3), (1.0, 1.0))
LATER = ((1 / 3, 1 / 3), (1.0, 1.0))
RULES: list[Rule | Guided] = [
    *(Rule(1 / 8, 1.0, LATE, finalists) for finalists in (1, 2, 3)),
    Rule(1 / 8, 1.0, LATE, 4, raced=True),
    Rule(1 / 8, 1.0, LATE, 2, ema=True),
    *(Rule(1 / 8, 1 / 4, LATER, finalists) for finalists in (1, 2)),
    *(Guided(1 / 8, 1 / 8, (4,), LATER, finalists) for finalists in (1, 2)),
    Guided(1 / 8, 1 / 8, (4, 4), LATER, 2),
    *(Guided(1 / 8, 1 / 12, batches, LATER, finalists, early=4) for batches in ((4,), (4, 4)) for finalists in (1, 2)),
]
POLICIES: dict[str, Policy] = {
    "ASHA": asha,
    "2 at random": at_random(2),
    "1 epoch at full size, 2 to the end": one_epoch(2),
    "today": today,
    "today, halved to one": halved,
    "today's sweep, 4 to the end": swept(4),
    "today's sweep, 2 to the end": swept(2),
    "today's sweep, 1 to the end (Hydro)": swept(1),
    "today's sweep by averages, 2 to the end": swept(2, ema=True),
    **{tpe.name: tpe for tpe in (TPE(3.5), TPE(7.5))},
    **{rule.name: rule for rule in RULES},
}
TELESCOPED = "8 of the late sweep at width 1/4, 2 to the end"


@dataclass(frozen=True)
class Draw:
    """What a search may try, and how its winner is judged.

    Attributes:
        seed: Place of the search's seed in the table.
        others: Of those that judge.
        subset: Numbers of the configurations, in order.
        best: The best mean of their last validation scores with the seeds that judge.
    """

    seed: int
    others: list[int]
    subset: Ints
    best: float


def draws(table: Table, resamples: int = RESAMPLES, keep: Keep = "last", share: float = SHARE) -> Iterator[Draw]:
    """The same subsets with each seed, in every call."""
    full = complete_seeds(table, 1.0)
    for seed in complete_seeds(table, 1 / 8, 1.0):
        others = [s for s in full if s != seed]
        known = truth(table, others, keep=keep)
        for subset in subsets(len(table.about.configs), share, resamples):
            yield Draw(seed, others, subset, float(known[subset].max()))


def comparable(tables: Mapping[str, Table]) -> dict[str, Table]:
    """Those with surrogates, and at full width with a seed to judge what another one chose."""
    return {
        name: table
        for name, table in tables.items()
        if len(complete_seeds(table, 1.0)) > 1 and complete_seeds(table, 1 / 8, 1.0)
    }


@dataclass(frozen=True)
class Replayed:
    """What a policy gave in each run, [run] each.

    Attributes:
        cost: In full trainings.
        validation: The winner's validation score with the search's seed, higher is better.
        test: The mean of its test scores with the other seeds, likewise.
        regret: By how much its validation with the other seeds is behind the best configuration's in the end.
    """

    cost: np.ndarray
    validation: np.ndarray
    test: np.ndarray
    regret: np.ndarray


def replay(
    table: Table,
    policies: Mapping[str, Policy] = POLICIES,
    resamples: int = RESAMPLES,
    keep: Keep = "last",
    share: float = SHARE,
) -> dict[str, Replayed]:
    """Each policy on the same subsets, of a share of the configurations, and seeds."""
    tables = Tables(table, keep)
    rows: dict[str, list[tuple[float, ...]]] = {name: [] for name in policies}
    validation, test = tables.curves[1.0, False], goodness(table, 1.0, "test", keep=keep)
    for draw in draws(table, resamples, keep, share):
        for name, policy in policies.items():
            search = Search(tables, draw.seed, draw.subset.tolist())
            winner = policy(search)
            end = np.s_[:, winner, search.reached(winner) - 1]
            regret = draw.best - validation[end][draw.others].mean()
            rows[name].append((search.spent, validation[end][draw.seed], test[end][draw.others].mean(), regret))
    return {name: Replayed(*np.array(found).T) for name, found in rows.items()}


HEAD = ["policy", "cost", "regret", "test against ASHA", "not worse by 1", "reaches ASHA's validation score"]
Row = tuple[float, float, float, float, float]


def page(tables: Mapping[str, Table], keep: Keep = "last") -> str:
    """For each task and policy, what it costs, and how it compares with ASHA, whose last weights always count."""
    parts, rows = list[str](), dict[str, dict[str, Row]]()
    for name, table in comparable(tables).items():
        seeds = complete_seeds(table, 1.0)
        fourth = complete_seeds(table, 1 / 8, 1 / 4, 1.0) == complete_seeds(table, 1 / 8, 1.0)
        policies = POLICIES | ({TELESCOPED: telescoped(2)} if fourth else {})
        rows[name] = compared(table, policies, keep)
        parts += [f"**{name}** ({len(table.about.configs)} configurations, {len(seeds)} seeds)", ""]
        parts += [*_lines(rows[name]), ""]
    if not rows:
        return ""
    means = {policy: tuple(np.mean([row[policy] for row in rows.values()], 0).tolist()) for policy in POLICIES}
    return "\n".join([f"**Means over {len(rows)} tasks**: {', '.join(rows)}", "", *_lines(means), "", *parts])


def compared(
    table: Table, policies: Mapping[str, Policy] = POLICIES, keep: Keep = "last", resamples: int = RESAMPLES
) -> dict[str, Row]:
    """By policy: cost, regret, and the three comparisons with ASHA of the page."""
    seeds = complete_seeds(table, 1.0)
    found, spread = replay(table, policies, resamples, keep), seed_spread(table, seeds, "test", keep)
    baseline = replay(table, {BASELINE: POLICIES[BASELINE]}, resamples)[BASELINE]
    own = seed_spread(table, seeds, keep=keep)
    rows = {}
    for policy, got in found.items():
        ahead = np.clip((got.test - baseline.test) / spread, -MOST, MOST)
        regret = float(np.minimum(got.regret / own, MOST).mean())
        shares = float((ahead >= -1).mean()), float((got.validation >= baseline.validation).mean())
        rows[policy] = (float(np.median(got.cost)), regret, float(ahead.mean()), *shares)
    return rows


def _lines(rows: Mapping[str, Row]) -> list[str]:
    lines = [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    for policy, (cost, regret, ahead, not_worse, reached) in rows.items():
        lines.append(f"| {policy} | {cost:.2f} | {regret:.2f} | {ahead:+.2f} | {not_worse:.0%} | {reached:.0%} |")
    return lines
