"""Both yardsticks on every table: the model that a search hands back, and its configuration trained again plainly.

A configuration that is trained again has its last epoch's own weights, with seeds that the search has not seen. Each
policy is compared with ASHA on the same configurations, and so is ASHA itself with another seed and another sample.
Scores are test scores; they count as no worse up to a standard deviation between seeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.replay.policies import Policy, Search, Tables, asha
from benchmarks.replay.study import SHARE, Draw, draws
from benchmarks.replay.table import Table
from benchmarks.replay.truth import Keep, complete_seeds, goodness, seed_spread

RESAMPLES = 50
AGAIN = "ASHA, another seed"


@dataclass(frozen=True)
class Judged:
    """What a policy's winners are worth, [run] each; higher is better.

    Attributes:
        cost: In full trainings.
        validation: Of the model handed back.
        handed: Its test score.
        retrained: The mean test score of its configuration, trained again with the other seeds.
    """

    cost: np.ndarray
    validation: np.ndarray
    handed: np.ndarray
    retrained: np.ndarray


class Judge:
    """A table's searches.

    Args:
        table: With at least two seeds at full width.
        resamples: How many subsets of the configurations are searched, with each seed.
    """

    def __init__(self, table: Table, resamples: int = RESAMPLES) -> None:
        self.table = table
        self._draws: list[Draw] = list(draws(table, resamples, share=SHARE))
        self._tables = {keep: Tables(table, keep) for keep in _KEEPS}
        self._tests = {keep: goodness(table, 1.0, "test", keep=keep) for keep in _KEEPS}
        seeds = complete_seeds(table, 1.0)
        self._spreads = {keep: seed_spread(table, seeds, "test", keep) for keep in _KEEPS}
        self._own = {keep: seed_spread(table, seeds, keep=keep) for keep in _KEEPS}
        self.baseline = self.judged(asha, "last")

    def judged(self, policy: Policy, keep: Keep = "best") -> Judged:
        """A policy's winners in all searches."""
        tables, rows = self._tables[keep], []
        for draw in self._draws:
            search = Search(tables, draw.seed, draw.subset.tolist())
            winner = policy(search)
            at = np.s_[draw.seed, winner, search.reached(winner) - 1]
            again = self._tests["last"][draw.others, winner, -1].mean()
            rows.append((search.spent, tables.curves[1.0, False][at], self._tests[keep][at], again))
        return Judged(*np.array(rows).T)

    def again(self) -> Judged:
        """ASHA's own winners of other searches: of another seed and another sample."""
        count = len(self._draws)
        other = np.roll(np.arange(count), count // len(complete_seeds(self.table, 1 / 8, 1.0)) + 1)
        return Judged(*(getattr(self.baseline, name)[other] for name in Judged.__dataclass_fields__))

    def row(self, found: Judged, keep: Keep) -> dict[str, float]:
        """Shares of searches in which a policy is no worse than ASHA, and its median cost."""
        base = self.baseline
        return {
            "cost": float(np.median(found.cost)),
            "reaches": float((found.validation >= base.validation).mean()),
            "near": float((found.validation >= base.validation - self._own[keep]).mean()),
            "handed": float((found.handed >= base.handed - self._spreads[keep]).mean()),
            "retrained": float((found.retrained >= base.retrained - self._spreads["last"]).mean()),
        }


_KEEPS: tuple[Keep, ...] = ("last", "best")


def rows(table: Table, policies: Mapping[str, Policy], resamples: int = RESAMPLES) -> dict[str, dict[str, float]]:
    """By policy, what `Judge.row` gives; ASHA with another seed besides."""
    judge = Judge(table, resamples)
    found = {AGAIN: judge.row(judge.again(), "last")}
    for keep in _KEEPS:
        found |= {f"{name}, {keep}": judge.row(judge.judged(policy, keep), keep) for name, policy in policies.items()}
    return found


def page(tables: Mapping[str, Table], policies: Mapping[str, Policy], resamples: int = RESAMPLES) -> str:
    """A table for each policy's shares, task by task, and in the mean."""
    of_all = {name: rows(table, policies, resamples) for name, table in tables.items()}
    return "\n".join(_lines(of_all))


def _lines(of_all: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Iterator[str]:
    head = ["policy", "task", "cost", "reaches ASHA's validation score", "... but for a seed's spread"]
    head += ["handed back: test no worse", "retrained: test no worse"]
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for policy in next(iter(of_all.values()), {}):
        values = {task: list(found[policy].values()) for task, found in of_all.items()}
        for task, (cost, *shares) in {"**mean**": np.mean(list(values.values()), 0).tolist(), **values}.items():
            cells = [policy, task, f"{cost:.1f}", *(f"{share:.0%}" for share in shares)]
            yield f"| {' | '.join(cells)} |"
