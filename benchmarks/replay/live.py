"""Replay the searches that `vs_asha` ran live, each with its own configurations, weights and orders of examples.

A policy that is replayed here meets the conditions of the live run, so replay and live can be compared search by
search. The scores of ASHA are those that Ray's ASHA reached in the live run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.replay.policies import Policy, Search, Tables, Tune, asha, swept, today
from benchmarks.replay.table import FOLDER, Table, goodness, samples
from benchmarks.vs_asha.report import Cells, read
from benchmarks.vs_asha.statistics import BASELINE, as_good, ended, maximizes, paired, seed_spread
from hydro_rasda.schedulers import agreement

EQUAL = 1e-4
"""Relative difference up to which scores count as equal, because tables are rounded and last digits differ by group."""
POLICIES: dict[str, Policy] = {
    "today: tune's defaults": today,
    "first look after a ninth, best epochs decide": Tune(first_look=1 / 9, by="best epochs"),
    "the sweep at full width (`surrogate=1`)": Tune(width=1.0),
    "four to the end": swept(4),
    "ASHA, one after another": asha,
}


@dataclass(frozen=True)
class Setup:
    """One search that was run live.

    Attributes:
        validation: The validation score with which Ray's ASHA ended; higher is better.
        test: The test score of ASHA's winner; higher is better.
        margin: Standard deviation of a test score between two trainings.
        live: True if `tune` reached ASHA's validation score in that run, False if not; None if it did not run.
    """

    task: str
    seed: int
    tables: Tables
    validation: float
    test: float
    margin: float
    live: bool | None


@dataclass(frozen=True)
class Replayed:
    """Result of a policy in one search.

    Attributes:
        cost: Cost in full trainings.
        reached: True if its validation score is as good as that of ASHA's winner.
        test: How much better its test score is than that of ASHA's winner, in standard deviations between seeds.
    """

    winner: int
    cost: float
    reached: bool
    test: float


def setups(folder: Path = FOLDER) -> list[Setup]:
    """Return all searches that were run live with Ray's ASHA and whose configurations are recorded at both widths."""
    cells = read(folder.parent / "vs_asha")
    return [setup for seed, tables in samples(folder).items() for setup in _setups(seed, tables, cells)]


def _setups(seed: int, tables: Mapping[str, Table], cells: Cells) -> Iterator[Setup]:
    for task, table in tables.items():
        methods = cells.get(task, {})
        baselines = methods.get(BASELINE, ())
        at = [cell for cell in baselines if cell["seed"] == seed]
        if at and table.complete(1 / 8, seed) and table.complete(1.0, seed):
            sign = 1 if maximizes(at[0]) else -1
            scores = sign * ended(at[0]), sign * at[0]["winner"]["test"]
            live = next((as_good(cell, base) for cell, base in paired(methods.get("tune", ()), at)), None)
            yield Setup(task, seed, Tables(table), *scores, seed_spread(baselines), live)


def replayed(setup: Setup, policy: Policy) -> Replayed:
    """Replay a policy in a search that was run live."""
    table, search = setup.tables.table, _search(setup)
    winner = policy(search)
    at = search.seed, winner, search.reached(winner) - 1
    validation, test = setup.tables.kept[at], goodness(table, 1.0, "test", keep="best")[at]
    reached = validation >= setup.validation - EQUAL * abs(setup.validation)
    return Replayed(winner, search.spent, bool(reached), float(test - setup.test) / setup.margin)


class Agreement(NamedTuple):
    """Numbers of searches: all, those alike in replay and live, and those that reach ASHA's score live and replayed."""

    searches: int
    alike: int
    live: int
    replayed: int


def agreement_with_live(policy: Policy, folder: Path = FOLDER) -> Agreement:
    """Count how often a policy's replay has the same outcome as `tune` had live with the same seed."""
    both = [(setup.live, replayed(setup, policy).reached) for setup in setups(folder) if setup.live is not None]
    return Agreement(
        searches=len(both),
        alike=sum(live == again for live, again in both),
        live=sum(live for live, _ in both),
        replayed=sum(again for _, again in both),
    )


def agreements(setups: Sequence[Setup]) -> str:
    """Say what the runs would have stated about the agreement of widths after the first look; empty without runs."""
    told = Counter[str]()
    for setup in setups:
        search = _search(setup)
        stop, finalists = today.first_look_of(search), today.sweep(search)
        narrow, full = ({n: search.look(width, n, stop) for n in finalists} for width in (1 / 8, 1.0))
        both = {n: (narrow[n], full[n]) for n in finalists}
        told[agreement(stop, both, "max").verdict] += 1
    return (
        f"After the first look, `TuneResult.agreement` would say of their finalists: that widths agree in "
        f"{told['agree']} of {len(setups)}, disagree in {told['disagree']}, too few to tell in {told['open']}."
        if setups
        else ""
    )


def _search(setup: Setup) -> Search:
    about = setup.tables.table.about
    return Search(setup.tables, about.seeds.index(setup.seed), range(len(about.configs)))


def page(setups: Sequence[Setup], policies: Mapping[str, Policy] = POLICIES) -> str:
    """Return a table: each policy's cost, and how often it is no worse than the live ASHA, in all and by task."""
    if not setups:
        return ""
    tasks = list(dict.fromkeys(setup.task for setup in setups))
    head = ["policy", "cost", "reaches ASHA's validation score", "test not worse by 1", *tasks]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for name, policy in policies.items():
        found = [replayed(setup, policy) for setup in setups]
        of_task = {task: [got for got, setup in zip(found, setups) if setup.task == task] for task in tasks}
        cost = np.mean([np.mean([got.cost for got in of]) for of in of_task.values()])
        shares = [f"{sum(got.reached for got in of)} of {len(of)}" for of in (found, *of_task.values())]
        not_worse = f"{sum(got.test >= -1 for got in found)} of {len(found)}"
        lines.append(f"| {' | '.join([name, f'{cost:.2f}', shares[0], not_worse, *shares[1:]])} |")
    return "\n".join(lines)
