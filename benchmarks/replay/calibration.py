"""Compare stated probabilities with how often the winner of a race is the best of its finalists."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from benchmarks.replay.policies import RACE_FACTOR, Search, Tables, today
from benchmarks.replay.table import Table
from benchmarks.replay.yardsticks import RESAMPLES, draws, halves
from hydro_rasda.schedulers import Race, chances

EDGES = (0.0, 0.6, 0.8, 0.95, 1.0)


class Stated(NamedTuple):
    """A race that is over.

    Attributes:
        probability: That its winner would be the best of all finalists, had all gone on.
    """

    probability: float
    best: bool


def races(table: Table, resamples: int = RESAMPLES) -> Iterator[Stated]:
    """Today's races; those with a finalist that diverges are left out."""
    tables = Tables(table)
    for draw in draws(table, resamples):
        search = Search(tables, draw.seed, draw.subset.tolist())
        winner = today(search)
        finalists = today.sweep(search)
        ends = {n: float(tables.scores[1.0, "own"][draw.seed, n, -1]) for n in finalists}
        if all(map(math.isfinite, ends.values())):
            stops = today.stops_of(search)
            full = {n: {at: search.look(1.0, n, at) for at in stops if at <= search.reached(n)} for n in finalists}
            found = Race(search.max_t, "max", RACE_FACTOR, today.full_trainings).expected_ends(full)
            yield Stated(chances(found, "max")[winner], ends[winner] >= max(ends.values()))


def page(tables: Mapping[str, Table], resamples: int = RESAMPLES) -> str:
    """By half and range of probabilities: how many races, what was stated in the mean, and how often it held."""
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
