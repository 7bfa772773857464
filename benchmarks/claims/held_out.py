"""`tune` against ASHA on tasks that chose none of its rules: recorded trainings, and real runs."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from benchmarks.claims.claim import Claim, of_source
from benchmarks.replay.anytime import AHEAD as AHEAD_OF_ASHA
from benchmarks.replay.anytime import IN_TIME, SHARES
from benchmarks.replay.table import Table, pooled
from benchmarks.replay.yardsticks import AGAIN, RESAMPLES, RULES, TODAY, Row, Rows, halves, mean, races, rows
from benchmarks.vs_asha.report import of_today, read
from benchmarks.vs_asha.statistics import BASELINE, overall
from benchmarks.vs_asha.words import machine
from benchmarks.vs_asha.yardsticks import by_chance

AHEAD = 0.10
"""By how much more often than ASHA with another sample `tune` is to be no worse than ASHA."""
COST = 3.5
"""Full trainings that a search is to cost at most."""
SURE = 0.8
"""Stated probabilities from which on calibration is judged."""
ABLATIONS = (
    TODAY,
    "averaged weights rank the sweep",
    "cooldowns of 25 % in the sweep",
    "cooldowns of 25 % in the race",
    "surrogates of 1/4 of the width",
    "the sweep at full width",
    "best epochs decide",
    "first look after a third",
    "no last look",
    f'{TODAY}, `keep="last"`',
)

REPLAY = "replay.md"
ASKED = {
    "Hyperband sweeps": "Hyperband",
    "median stopping sweeps": "median stopping",
    "no stopping in the sweep": "no stopping",
}
"""The rules that the page of the replay compares with halving, by their names there."""


def held_out(folder: Path, resamples: int = RESAMPLES) -> list[Claim]:
    """Return the claims on the second half of the tasks: replayed, then really run."""
    tables = halves(pooled(folder / "replay"))[1]
    return [*_replayed(tables, resamples), *_anytime(_page(folder)), *_live(folder, tables)]


def _replayed(tables: Mapping[str, Table], resamples: int) -> list[Claim]:
    if not tables:
        return []
    found = rows(tables, {name: rule for name, rule in RULES.items() if name in ABLATIONS}, resamples)
    today, again = mean(found[TODAY].values()), mean(found[AGAIN].values())
    searches = sum(resamples * len(table.about.seeds) for table in tables.values())
    claim = of_source(REPLAY, f"recorded trainings of {len(tables)} tasks; {searches} searches")
    claims = []
    for what, share in (
        ("The model handed back tests no worse than ASHA's by more than a seed's spread (replayed)", "handed"),
        ("... its configuration, trained again plainly from other seeds", "retrained"),
    ):
        ours, theirs = getattr(today, share), getattr(again, share)
        measured = f"{ours:.0%} of searches; ASHA with another sample {theirs:.0%}"
        claims.append(claim(what, measured, f"{AHEAD:.0%} more often", ours >= theirs + AHEAD))
        behind = [name for name in tables if getattr(found[TODAY][name], share) < getattr(found[AGAIN][name], share)]
        claims.append(claim("... tasks on which it is less often so than ASHA with another sample", *_tasks(behind)))
    costs = [row.cost for row in found[TODAY].values()]
    measured = f"{today.cost:.1f}, by task {min(costs):.1f} to {max(costs):.1f}; ASHA {again.cost:.1f}"
    claims.append(claim("... cost in full trainings", measured, f"at most {COST}", max(costs) <= COST))
    sure = [race for table in tables.values() for race in races(table, resamples) if race.probability >= SURE]
    stated, best = (sum(values) / len(sure) for values in ([r.probability for r in sure], [r.best for r in sure]))
    what = f"... stated probabilities of at least {SURE:g} that the winner is the best of its finalists"
    measured = f"{stated:.2f} in the mean; it was the best in {best:.0%}"
    claims.append(claim(what, measured, "within 5 points", abs(stated - best) <= 0.05))
    claims += [
        claim(f"... with one thing changed: {name.removeprefix(TODAY + ', ')}", _ablation(found, name))
        for name in ABLATIONS[1:]
        if name in found
    ]
    return claims


def _ablation(found: Rows, name: str) -> str:
    """Compare a rule with today's on the tasks on which it can be replayed."""
    row, today = mean(found[name].values()), mean(found[TODAY][task] for task in found[name])
    return f"{_shares(row)}, cost {row.cost:.1f}; today's rule {_shares(today)}, cost {today.cost:.1f}"


def _shares(row: Row) -> str:
    return f"{row.handed:.0%} and {row.retrained:.0%}"


def _tasks(behind: Sequence[str]) -> tuple[str, str, bool]:
    return ", ".join(behind) or "none", "none", not behind


def _live(folder: Path, tables: Collection[str]) -> list[Claim]:
    tasks = {task: methods for task, methods in of_today(read(folder / "vs_asha")).items() if task in tables}
    if not tasks:
        return []
    found, chance = overall(tasks, "tune"), by_chance(tasks, "tune")
    before = sum("last_look" not in cell["settings"] for methods in tasks.values() for cell in methods["tune"])
    how = f"really run, {before} of them without the last look" if before else "really run"
    where = machine([cell for methods in tasks.values() for name in (BASELINE, "tune") for cell in methods[name]])
    claim, claims = of_source("vs_asha.md", where), []
    handed = f"The model handed back tests no worse than Ray Tune's ASHA's by more than a seed's spread ({how})"
    again = "... its configuration, trained again plainly from other seeds"
    for what, (count, runs), (chances, of) in (
        (handed, (found.not_worse, found.runs), (chance.not_worse, chance.runs)),
        (again, (found.again_not_worse, found.again), (chance.again_not_worse, chance.again)),
    ):
        by_itself = chances / of
        measured = f"{count} of {runs} runs; ASHA with another seed {by_itself:.0%}"
        claims.append(claim(what, measured, f"{AHEAD:.0%} more often", count / runs >= by_itself + AHEAD))
    claims.append(claim("... tasks on which the model handed back is worse by more in the mean", *_tasks(found.lost)))
    for task, methods in tasks.items():
        one = overall({task: methods}, "tune")
        measured = f"{one.not_worse} of {one.runs} runs; trained again {one.again_not_worse} of {one.again}"
        claims.append(claim(f"... on {task}", measured))
    return claims


def _anytime(page: str) -> list[Claim]:
    costs = re.findall(f"{re.escape(AHEAD_OF_ASHA)}([0-9.]+)", page)
    if not costs:
        return []
    what = "The regret of what a search has in hand is below ASHA's at every cost up to 4 full trainings (replayed)"
    halves = ("tasks that chose earlier rules", "tasks that chose none")
    measured = ", ".join(f"from {cost} on ({half})" for cost, half in zip(costs, halves))
    found = [Claim(what, measured, "from 0.5 on", all(float(cost) <= 0.5 for cost in costs), "", REPLAY)]
    rows = {cells[1]: cells[2:] for line in page.splitlines() if (cells := _cells(line))[:1] == ["second"]}
    if rows.keys() >= {*IN_TIME}:
        first, at_once, theirs = (rows[name] for name in IN_TIME)
        ours = [*first[:-1], at_once[-1]]  # a budget for the whole search changes nothing
        what = f"... given {', '.join(f'{share:.0%}' for share in SHARES)} of the time of a whole search (replayed)"
        measured = f"{', '.join(ours)} standard deviations; ASHA {', '.join(theirs)}"
        less = all(float(own) < float(other) for own, other in zip(ours, theirs, strict=True))
        found.append(Claim(what, measured, "less than ASHA", less, "", REPLAY))
    return found


def _cells(line: str) -> list[str]:
    return re.split(r" *\| *", line)[1:-1]


def _page(folder: Path) -> str:
    return (folder / REPLAY).read_text() if (folder / REPLAY).exists() else ""


def in_the_replay(folder: Path) -> list[Claim]:
    """Rules of the sweep against halving, on the tasks that chose no rule."""
    _, _, second = _page(folder).partition("**The second half**")
    rows = {cells[0]: cells[2:] for line in second.splitlines() if len(cells := _cells(line)) == 6}
    found = []
    for name, title in ASKED.items() if TODAY in rows else ():
        (cost, _, handed, again), (own, _, own_handed, own_again) = rows[name], rows[TODAY]
        measured = f"{cost} full trainings, no worse than ASHA in {handed} (trained again {again})"
        measured += f"; halving {own}, {own_handed} ({own_again})"
        found.append(Claim(f"{title} in the sweep, replayed", measured, "", None, "", REPLAY))
    return found
