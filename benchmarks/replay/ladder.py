"""Replay a ladder of heats: between the sweep and full size, the best trials train narrow models to their ends.

`tune` has such a heat if `full_trainings` is 1 or 2: "8 at 1/4", then one or two at full size. The page compares
variants of it with today's rule, on both halves of the tasks. It compares the two yardsticks of `yardsticks.py`,
regret, and cost. Each half chooses a variant, which the other half judges.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from benchmarks.replay.anytime import in_hand
from benchmarks.replay.policies import Heat, Ladder, Policy, Tune, asha, today
from benchmarks.replay.table import FOLDER, Floats, Table, pooled
from benchmarks.replay.yardsticks import AGAIN, NOT_TO_CHOOSE, TODAY, Judge, Judged, PolicyRow, applies, halves, mean
from benchmarks.result_files import columns, texts

SAMPLES = 200
"""Number of random halves of a task's configurations. Each half is searched with each seed."""
TIE = 0.05
"""Two variants count as equally expensive if their costs differ by at most this many full trainings."""
ERRORS = 2.0
"""A variant counts as no worse than today's rule if it is behind by at most this many standard errors."""
COSTS = np.array([0.5, 1, 1.5, 2, 2.5, 3, 4])
"""Full trainings, priced by width, at which the models in hand are compared."""
ASHA = "ASHA"

Price = Literal["cost", "cost_by_width"]
PRICES: dict[Price, str] = {"cost_by_width": "by width", "cost": "by seconds"}


def _ladder(count: int, full_size: int = 2, **more: Any) -> Ladder:
    """Make a ladder with one heat of `count` trials at 1/4 of the width, to the end."""
    return Ladder(heats=(Heat(count),), full_size=full_size, **more)


VARIANTS: dict[str, Ladder] = {
    "no heat, one at full size": Ladder(heats=(), full_size=1),
    "no heat, two at full size": Ladder(heats=()),
    **{f"{m} at 1/4, one at full size": _ladder(m, 1) for m in (2, 3, 4, 6, 8, 12)},
    **{f"{m} at 1/4, two at full size": _ladder(m) for m in (3, 4, 6, 8, 12)},
    **{f"{m} at 1/4, three at full size": _ladder(m, 3) for m in (4, 6, 8, 12)},
    "8 at 1/4, three to a half, two to the end": _ladder(8, 3, look="race", full_trainings=2.5),
    "8 at 1/4, four in today's race": _ladder(8, 4, look="race"),
    **{f"{m} at 1/4, two, never stopped": _ladder(m, look=None) for m in (4, 8)},
    **{f"{m} at 1/4, two, look at 1/2": _ladder(m, look=1 / 2) for m in (4, 8)},
    "8 at 1/4, two, look at 1/2 with forecasts": _ladder(8, look=1 / 2, forecast=True),
    "8 at 1/4, two, look at 3/4 with forecasts": _ladder(8, forecast=True),
    **{f"8 at 1/4, two within {x:g} of a change": _ladder(8, margin=x) for x in (0.1, 0.25, 0.5, 1.0)},
    "8 at 1/4 by averages, two": _ladder(8, heats_by="averaged"),
    **{f"{m} at 1/4 for a half, two": Ladder(heats=(Heat(m, length=1 / 2),)) for m in (4, 8)},
    "8 at 1/8 to the end, one": Ladder(heats=(Heat(8, 1 / 8),), full_size=1),
    **{f"{m} at 1/8 to the end, two": Ladder(heats=(Heat(m, 1 / 8),)) for m in (4, 8)},
    "12 at 1/8 to the end, 4 at 1/4, two": Ladder(heats=(Heat(12, 1 / 8), Heat(4))),
    "12 at 1/4 for a half, 4 of them to the end, two": Ladder(heats=(Heat(12, length=1 / 2), Heat(4))),
    "sweep at 1/4, 8 of it to the end, two": Ladder(width=1 / 4),
    "4 at 1/2, one at full size": Ladder(heats=(Heat(4, 1 / 2),), full_size=1),
    "4 at 1/2, two at full size": Ladder(heats=(Heat(4, 1 / 2),)),
    "8 at 1/2, two at full size": Ladder(heats=(Heat(8, 1 / 2),)),
    "8 at 1/4, 3 at 1/2, one": Ladder(heats=(Heat(8), Heat(3, 1 / 2)), full_size=1),
    "8 at 1/4, 3 at 1/2, two": Ladder(heats=(Heat(8), Heat(3, 1 / 2))),
}


class Compared(NamedTuple):
    """A rule on one task.

    Attributes:
        ahead: The excess of its two shares, handed back and trained again, over those of today's rule.
        error: Standard errors of `ahead`, from pairs of searches.
    """

    row: PolicyRow
    ahead: Floats
    error: Floats


Half = dict[str, dict[str, Compared]]
"""`half[rule][task]`."""


def replayed(tables: Mapping[str, Table], variants: Mapping[str, Ladder] = VARIANTS, samples: int = SAMPLES) -> Half:
    """Replay today's rule, ASHA, and each variant on each task that has its widths."""
    found: Half = {TODAY: {}, AGAIN: {}, ASHA: {}, **{name: {} for name in variants}}
    for task, table in tables.items():
        judge = Judge(table, samples)
        own = judge.no_worse(judge.judged(today)).astype(float)
        found[AGAIN][task] = Compared(judge.again(), np.full(2, math.nan), np.full(2, math.nan))
        asked = {TODAY: today, **{name: rule for name, rule in variants.items() if applies(rule, table)}}
        for name, rule in asked.items():
            found[name][task] = _paired(judge, judge.judged(rule), own)
        found[ASHA][task] = _paired(judge, judge.judged(asha, "last"), own)
    return found


def _paired(judge: Judge, found: Judged, own: Floats) -> Compared:
    """Compare a rule's searches on one task with today's. `own` is `Judge.no_worse` of today's searches."""
    differences = judge.no_worse(found) - own
    errors = differences.std(1) / math.sqrt(differences.shape[1])
    return Compared(judge.against(found), differences.mean(1), errors)


def no_worse(found: Iterable[Compared]) -> bool:
    """Tell whether both shares, in the mean over tasks, are behind today's by no more than the resampling error."""
    rows = list(found)
    ahead = np.mean([one.ahead for one in rows], 0)
    error = np.sqrt(np.square([one.error for one in rows]).sum(0)) / len(rows)
    return bool((ahead >= -ERRORS * error).all())


def chosen(half: Half, price: Price) -> str:
    """Return the cheapest rule that is no worse than today's; of equally expensive ones, the one with least regret.

    Only rules that could be replayed on all tasks of the half are compared, today's among them.
    """
    tasks = [task for task in half[TODAY] if task not in NOT_TO_CHOOSE]
    whole = [name for name in half if name not in (AGAIN, ASHA) and {*tasks} <= half[name].keys()]
    good = [name for name in whole if no_worse(half[name][task] for task in tasks)]
    means = {name: mean(half[name][task].row for task in tasks) for name in good}
    least = min(getattr(row, price) for row in means.values())
    tied = [name for name, row in means.items() if getattr(row, price) <= least + TIE]
    return min(tied, key=lambda name: means[name].regret)


def page(tables: Mapping[str, Table], samples: int) -> str:
    """Return a page of the choices, every variant on each half, and the models in hand; empty without both halves."""
    named = {name: half for name, half in zip(("first", "second"), halves(tables), strict=True) if half}
    if len(named) < 2:
        return ""
    told = texts("replay_ladder")
    found = {name: replayed(half, VARIANTS, samples) for name, half in named.items()}
    parts = ["# A middle heat, replayed", told["head"].format(samples=samples, searches=2 * samples, errors=ERRORS)]
    parts += ["## Each half chooses, the other judges", told["choices"].format(tie=TIE), _choices(found)]
    for name, half in found.items():
        parts += [f"## The {name} half: {', '.join(half[TODAY])}", told[f"{name} half"], _variants(half)]
    parts += ["## Task by task", told["tasks"], _by_task(found)]
    return "\n\n".join([*parts, "## In hand", told["in hand"], _in_hand(named, samples)]) + "\n"


_COLUMNS = "handed back", "trained again", "regret", "cost by width", "cost by seconds"


def _cells(row: PolicyRow) -> list[str]:
    costs = f"{row.cost_by_width:.2f}", f"{row.cost:.2f}"
    return [f"{row.handed:.0%}", f"{row.retrained:.0%}", f"{row.regret:.2f}", *costs]


def _choices(found: Mapping[str, Half]) -> str:
    lines = []
    for half, other in (("first", "second"), ("second", "first")):
        for price, told in PRICES.items():
            rule = chosen(found[half], price)
            lines.append([f"the {half} half, cost {told}", rule, f"the {other} half", *_line(found[other], rule)])
        lines += [["", name, f"the {other} half", *_line(found[other], name)] for name in (TODAY, AGAIN)]
    return columns(["chosen by", "rule", "judged by", *_COLUMNS, "worse"], lines)


def _line(half: Half, rule: str) -> list[str]:
    """Return a rule's means over its tasks, and whether it is worse than today's rule there; empty without tasks."""
    found = half[rule].values()
    if not found:
        return ["" for _ in _COLUMNS] + [""]
    worse = "yes" if rule not in (TODAY, AGAIN, ASHA) and not no_worse(found) else ""
    return [*_cells(mean(one.row for one in found)), worse]


def _variants(half: Half) -> str:
    """Return a table of all rules, with today's rule once more, on the tasks of the rule that has the fewest."""
    lines = [[name, f"{len(found)}", *_line(half, name)] for name, found in half.items() if found]
    fewest = min((found for found in half.values() if found), key=len)
    if len(fewest) < len(half[TODAY]):
        there = {TODAY: {task: half[TODAY][task] for task in fewest}}
        lines.append([f"{TODAY}, on these {len(fewest)}", f"{len(fewest)}", *_line(there, TODAY)])
    return columns(["rule", "tasks", *_COLUMNS, "worse"], lines)


SHOWN = TODAY, "4 at 1/4, two at full size", "8 at 1/4, two at full size", "8 at 1/4, one at full size"


def _by_task(found: Mapping[str, Half]) -> str:
    lines = []
    for half in found.values():
        for task in half[TODAY]:
            rows = [half[name][task].row if task in half[name] else None for name in SHOWN]
            lines.append([task, *("" if row is None else ", ".join(_cells(row)) for row in rows)])
    return columns(["task", *SHOWN], lines)


METHODS: dict[str, Policy] = {
    TODAY: today,
    f"{TODAY}, the leader to its end first": Tune(leader_first=True),
    **{name: VARIANTS[name] for name in SHOWN[1:]},
    f"{SHOWN[2]}, the leader to its end first": replace(VARIANTS[SHOWN[2]], leader_first=True),
    ASHA: asha,
}


def _in_hand(named: Mapping[str, Mapping[str, Table]], samples: int) -> str:
    """Return a table of the mean regret at each of `COSTS`, on the tasks that have the width of the heat."""
    lines = []
    for half, tables in named.items():
        there = [table for table in tables.values() if applies(VARIANTS[SHOWN[1]], table)]
        means = np.mean([_regrets(table, samples) for table in there], 0)
        lines += [[half, name, *(f"{regret:.2f}" for regret in row)] for name, row in zip(METHODS, means)]
    return columns(["half", "rule", *(f"{cost:g}" for cost in COSTS)], lines)


def _regrets(table: Table, samples: int) -> Floats:
    searches = in_hand(table, list(METHODS.values()), samples, by_width=True)
    found: Floats = np.mean([[one.at(COSTS) for one in of_each] for of_each in searches], 0)
    return found


def write(folder: Path = FOLDER) -> Path:
    """Draw the page beside the folder of the tables."""
    path = folder.parent / "replay_ladder.md"
    path.write_text(page(pooled(folder), SAMPLES))
    return path
