"""Judge policies by two yardsticks: the model that a search hands back, and its configuration trained again plainly.

A configuration that is trained again has its last epoch's own weights, with seeds that the search has not seen. A
search has half of a table's configurations. Each policy is compared with ASHA on the same half. ASHA on the other half
is compared with ASHA on this half, too. Scores are test scores. A score counts as no worse if it is behind by at most a
standard deviation of plain trainings between seeds.

Tasks fall into two halves, the tasks of `FIRST` and the others. Each half chooses a rule, which the other half judges.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.replay.policies import RACE_FACTOR, Ladder, Policy, Search, Tables, Tune, asha, swept, today
from benchmarks.replay.table import Floats, Ints, Keep, Table, complete_seeds, goodness, halvings, seed_spread, truth
from hydro_rasda.schedulers import Race, chances

RESAMPLES = 100
AGAIN = "ASHA, another sample"
TODAY = "today's rule"
TODAY_LAST = f'{TODAY}, `keep="last"`'
HEAT = "eight at 1/4 of the width to the end, two at full size"
FIRST = ("breast_cancer", "diabetes", "digits", "recurrent", "residual", "warm_up")
"""The tasks on which all earlier rules were chosen."""
NOT_TO_CHOOSE = ("spoken_digits",)
"""Tasks that only judge rules, but do not choose any."""
MOST_TRAININGS = 4.0
"""A half chooses no rule with a higher mean cost over its tasks. On some tasks, a sweep costs as much as a race."""
MOST = 10.0
"""The most standard deviations between seeds that a winner counts as behind. Diverged ones would be infinitely so."""
RULES: dict[str, Policy] = {
    TODAY: today,
    "Hyperband sweeps": Tune(rule="hyperband"),
    "median stopping sweeps": Tune(rule="median"),
    "no stopping in the sweep": Tune(rule="none"),
    "cooldowns of 10 % in the sweep": Tune(cooldown=0.1),
    "cooldowns of 25 % in the sweep": Tune(cooldown=0.25),
    "cooldowns of 50 % in the sweep": Tune(cooldown=0.5),
    "cooldowns of 25 % in the race": Tune(race_cooldown=0.25),
    "averaged weights rank the sweep": Tune(sweep_by="averaged"),
    "surrogates of 1/4 of the width": Tune(width=1 / 4),
    "the sweep at full width": Tune(width=1.0),
    "first look after a ninth": Tune(first_look=1 / 9),
    "first look after a third": Tune(first_look=1 / 3),
    "first look after two thirds": Tune(first_look=2 / 3, full_trainings=10 / 3),
    "no last look": Tune(last_look=False),
    "weights decide as training left them, not averages": Tune(by="last weights"),
    "best epochs decide": Tune(by="best epochs"),
    "best epochs decide, first look after a ninth": Tune(first_look=1 / 9, by="best epochs"),
    "three finalists, all to the end": swept(3),
    "four finalists, all to the end": swept(4),
    "six finalists": Tune(finalists=6),
    HEAT: Ladder(),
    "the best surrogate's alone (Hydro)": swept(1),
}


@dataclass(frozen=True)
class Draw:
    """The configurations of a search, and the seeds that judge its winner.

    Attributes:
        rest: Another sample: as many configurations, none of which is in `subset`.
        best: The last validation score of the best configuration in `subset`, as a mean over the seeds that judge.
    """

    seed: int
    others: list[int]
    subset: Ints
    rest: Ints
    best: float


def draws(table: Table, resamples: int = RESAMPLES, keep: Keep = "last") -> Iterator[Draw]:
    """Yield a draw for each seed and half. The halves are the same for each seed and in every call."""
    full = complete_seeds(table, 1.0)
    for seed in complete_seeds(table, 1 / 8, 1.0):
        others = [s for s in full if s != seed]
        known = truth(table, others, keep=keep)
        for subset, rest in halvings(len(table.about.configs), resamples):
            yield Draw(seed, others, subset, rest, float(known[subset].max()))


def comparable(tables: Mapping[str, Table]) -> dict[str, Table]:
    """Return the tables with surrogates, and with at least two seeds at full width, so that one can judge another."""
    return {
        name: table
        for name, table in tables.items()
        if len(complete_seeds(table, 1.0)) > 1 and complete_seeds(table, 1 / 8, 1.0)
    }


def halves(tables: Mapping[str, Table]) -> list[dict[str, Table]]:
    """Return the tables of the tasks of `FIRST`, and those of the others."""
    ready = comparable(tables)
    return [{name: table for name, table in ready.items() if (name in FIRST) == first} for first in (True, False)]


@dataclass(frozen=True)
class Judged:
    """Quality of a policy's winners: arrays with a number for each search. Higher scores are better.

    Attributes:
        cost: Cost in full trainings.
        validation: The validation score of the model handed back.
        handed: The test score of the model handed back.
        retrained: The mean test score of its configuration, trained again with the other seeds.
        regret: How far the configuration, trained again, validates behind the best of the search, in standard
            deviations between seeds, at most `MOST`. Here lower is better.
        cost_by_width: Cost in full trainings, by `price_by_width` rather than by seconds.
    """

    cost: Floats
    validation: Floats
    handed: Floats
    retrained: Floats
    regret: Floats
    cost_by_width: Floats


@dataclass(frozen=True)
class PolicyRow:
    """Shares of searches in which a policy is no worse than ASHA.

    Attributes:
        cost: Median cost, in full trainings.
        reaches: Share by the validation score of the model handed back.
        handed: Share by its test score, up to a seed's spread.
        retrained: Share by the test score of its configuration trained again, up to a seed's spread.
        regret: Mean regret (see `Judged`).
        cost_by_width: Median cost by width (see `Judged`).
    """

    cost: float
    reaches: float
    handed: float
    retrained: float
    regret: float = math.nan
    cost_by_width: float = math.nan

    @property
    def quality(self) -> float:
        """Return the mean share by both yardsticks."""
        return (self.handed + self.retrained) / 2


def mean(rows: Iterable[PolicyRow]) -> PolicyRow:
    """Return the mean over tasks."""
    return PolicyRow(*np.mean([astuple(row) for row in rows], 0).tolist())


class Judge:
    """A table's searches.

    Args:
        table: A table with at least two seeds at full width.
        resamples: Number of halves of the configurations that are searched with each seed.
    """

    def __init__(self, table: Table, resamples: int = RESAMPLES) -> None:
        self._tables = Tables(table)
        self._draws = list(draws(table, resamples))
        keeps: tuple[Keep, ...] = ("last", "best")
        self._tests = {keep: goodness(table, 1.0, "test", keep=keep) for keep in keeps}
        self._validation = {"last": self._tables.scores[1.0, "own"], "best": self._tables.kept}
        self._spread = seed_spread(table, complete_seeds(table, 1.0), "test")
        self._unit = max(seed_spread(table, complete_seeds(table, 1.0)), 1e-12)  # above 0 even if seeds change nothing
        self._baseline = self._judged(asha, "last", self._draws)

    def row(self, policy: Policy, keep: Keep = "best") -> PolicyRow:
        """Compare a policy with ASHA. The policy hands back the best epoch or the last."""
        return self.against(self.judged(policy, keep))

    def judged(self, policy: Policy, keep: Keep = "best") -> Judged:
        """Return the quality of a policy's winners in each of the searches."""
        return self._judged(policy, keep, self._draws)

    def again(self) -> PolicyRow:
        """Compare ASHA with another sample of configurations with ASHA itself.

        Both have the same seed, as a policy and ASHA have, so that effects of the seed make neither better.
        """
        return self.against(self._judged(asha, "last", [replace(draw, subset=draw.rest) for draw in self._draws]))

    def _judged(self, policy: Policy, keep: Keep, of: Iterable[Draw]) -> Judged:
        rows = []
        for draw in of:
            search = Search(self._tables, draw.seed, draw.subset.tolist())
            winner = policy(search)
            at = np.s_[draw.seed, winner, search.reached(winner) - 1]
            again = self._tests["last"][draw.others, winner, -1].mean()
            behind = (draw.best - self._validation["last"][draw.others, winner, -1].mean()) / self._unit
            row = search.spent, self._validation[keep][at], self._tests[keep][at], again
            rows.append((*row, min(behind, MOST), search.spent_by_width()))
        return Judged(*np.array(rows).T)

    def against(self, found: Judged) -> PolicyRow:
        """Return shares and means over the searches."""
        handed, retrained = self.no_worse(found)
        return PolicyRow(
            cost=float(np.median(found.cost)),
            reaches=float((found.validation >= self._baseline.validation).mean()),
            handed=float(handed.mean()),
            retrained=float(retrained.mean()),
            regret=float(found.regret.mean()),
            cost_by_width=float(np.median(found.cost_by_width)),
        )

    def no_worse(self, found: Judged) -> NDArray[np.bool_]:
        """Tell whether each winner is no worse than ASHA's, in two rows: handed back, and trained again."""
        least = self._baseline.handed - self._spread, self._baseline.retrained - self._spread
        return np.stack([found.handed >= least[0], found.retrained >= least[1]])


PolicyRows = dict[str, dict[str, PolicyRow]]
"""`rows[rule][task]`."""


def rows(tables: Mapping[str, Table], rules: Mapping[str, Policy] = RULES, resamples: int = RESAMPLES) -> PolicyRows:
    """Judge each rule on each task that has the scores that it looks at, and ASHA with another sample."""
    found: PolicyRows = {AGAIN: {}, **{name: {} for name in rules}, TODAY_LAST: {}}
    for task, table in tables.items():
        judge = Judge(table, resamples)
        found[AGAIN][task] = judge.again()
        for name, rule in rules.items():
            if isinstance(rule, Tune) and not applies(rule, table):
                continue
            found[name][task] = judge.row(rule)
        found[TODAY_LAST][task] = judge.row(replace(today, by="last weights"), "last")
    return {name: of_task for name, of_task in found.items() if of_task}


def applies(rule: Tune, table: Table) -> bool:
    """Tell whether a table has the cooldowns and widths that a rule looks at."""
    has_cooldowns = bool(table.about.branches) or not (rule.cooldown or rule.race_cooldown)
    return has_cooldowns and complete_seeds(table, *rule.widths, 1.0) == complete_seeds(table, 1 / 8, 1.0)


def chosen(found: PolicyRows, names: Iterable[str] = RULES) -> str:
    """Return the rule that tasks choose: the best by both yardsticks that costs no more than `MOST_TRAININGS`.

    Only rules that could be replayed on all of these tasks are compared.
    """
    tasks = {task for task in found[AGAIN] if task not in NOT_TO_CHOOSE}
    means = {name: mean(found[name][task] for task in tasks) for name in names if tasks <= found.get(name, {}).keys()}
    affordable = {name: row for name, row in means.items() if row.cost <= MOST_TRAININGS}
    return max(affordable, key=lambda name: affordable[name].quality)


def page(tables: Mapping[str, Table], resamples: int = RESAMPLES) -> str:
    """Return a page of each half's choice, and of all rules on either half, in the mean and by task; may be empty."""
    named = dict(zip(("first", "second"), (rows(half, resamples=resamples) for half in halves(tables) if half)))
    if not named:
        return ""
    parts = []
    if len(named) == 2:
        for half, other in (("first", "second"), ("second", "first")):
            rule, judge = chosen(named[half]), named[other]
            row = mean(judge[rule].values()) if rule in judge else None
            told = f"The {half} half chooses *{rule}*"
            again = mean(judge[AGAIN].values())
            told += "" if row is None else f". On the {other} half it is {_words(row)}. {AGAIN}: {_words(again)}"
            parts += [f"- {told}."]
        parts.append("")
    for half, found in named.items():
        parts += [f"**The {half} half**: {', '.join(found[AGAIN])}.", "", *_means(found), ""]
        parts += [*_by_task(found), ""]
    return "\n".join(parts).rstrip()


def _words(row: PolicyRow) -> str:
    return f"no worse than ASHA in {row.handed:.0%} (handed back) and {row.retrained:.0%} (trained again)"


def _means(found: PolicyRows) -> Iterator[str]:
    yield "| rule | tasks | cost | reaches ASHA's validation score | handed back: no worse | trained again: no worse |"
    yield f"|{'---|' * 6}"
    for name, of_task in found.items():
        row = mean(of_task.values())
        cells = [name, f"{len(of_task)}", f"{row.cost:.2f}", *map(_share, (row.reaches, row.handed, row.retrained))]
        yield f"| {' | '.join(cells)} |"


def _by_task(found: PolicyRows) -> Iterator[str]:
    shown = [AGAIN, TODAY, "best epochs decide, first look after a ninth"]
    yield f"| task | {' | '.join(f'{name}: cost, handed back, trained again' for name in shown if name in found)} |"
    yield f"|{'---|' * (1 + sum(name in found for name in shown))}"
    for task in found[AGAIN]:
        each = [found[name][task] for name in shown if name in found]
        cells = [f"{row.cost:.1f}, {_share(row.handed)}, {_share(row.retrained)}" for row in each]
        yield f"| {task} | {' | '.join(cells)} |"


def _share(value: float) -> str:
    return f"{value:.0%}"


EDGES = (0.0, 0.6, 0.8, 0.95, 1.0)


class Stated(NamedTuple):
    """A race that is over.

    Attributes:
        probability: The stated probability that its winner would be the best of all finalists if all had gone on.
        best: True if it would have been the best.
    """

    probability: float
    best: bool


def races(table: Table, resamples: int = RESAMPLES) -> Iterator[Stated]:
    """Yield races by today's rule. Races with a finalist that diverges are left out."""
    tables = Tables(table)
    for draw in draws(table, resamples):
        search = Search(tables, draw.seed, draw.subset.tolist())
        winner = today(search)
        finalists = today.sweep(search)
        stops, reached = today.stops_of(search), {n: search.reached(n) for n in finalists}
        ends = {n: today.compared(search, n, search.max_t) for n in finalists}
        if all(map(math.isfinite, ends.values())):
            full = {n: {at: search.look(1.0, n, at) for at in stops if at <= reached[n]} for n in finalists}
            rule = Race(search.max_t, "max", RACE_FACTOR, today.full_trainings)
            found = rule.expected_ends(full, ends={n: ends[n] for n in finalists if reached[n] >= search.max_t})
            yield Stated(chances(found, "max")[winner], ends[winner] >= max(ends.values()))


def probabilities(tables: Mapping[str, Table], resamples: int = RESAMPLES) -> str:
    """Return a table by half and range of probabilities: races, the mean stated probability, and how often it held."""
    lines = ["| half | stated between | races | stated, mean | winner is the best |", f"|{'---|' * 5}"]
    for name, half in zip(("first", "second"), halves(tables)):
        found = [race for table in half.values() for race in races(table, resamples)]
        for low, high in (*itertools.pairwise(EDGES), (EDGES[0], EDGES[-1])):
            there = [race for race in found if low < race.probability <= high]
            if there:
                stated = sum(race.probability for race in there) / len(there)
                best = sum(race.best for race in there) / len(there)
                lines.append(f"| {name} | {low:g} and {high:g} | {len(there)} | {stated:.2f} | {best:.2f} |")
    return "\n".join(lines)
