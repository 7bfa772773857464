"""`tune` against ASHA on tasks that chose none of its rules: recorded trainings, and real runs."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from benchmarks.answers.answer import Answer, machines_of
from benchmarks.replay import policies
from benchmarks.replay.anytime import AHEAD, IN_TIME, RIVALS, SHARES
from benchmarks.replay.live import agreement_with_live
from benchmarks.replay.table import Table, pooled
from benchmarks.replay.yardsticks import (
    AGAIN,
    HEAT,
    RESAMPLES,
    RULES,
    TODAY,
    PolicyRow,
    PolicyRows,
    halves,
    mean,
    races,
    rows,
)
from benchmarks.vs_asha.report import TASK_NAMES, of_today, read
from benchmarks.vs_asha.statistics import BASELINE, overall
from benchmarks.vs_asha.yardsticks import by_chance

SURE = 0.8
"""Calibration is judged on the races whose stated probability is at least this."""
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
    HEAT,
    f'{TODAY}, `keep="last"`',
)

PLAINLY = {
    TODAY: "**today's rule**",
    "cooldowns of 25 % in the sweep": "in the sweep, the rate decays to 0 before each comparison",
    "cooldowns of 25 % in the race": "at full size, the rate decays to 0 before each comparison",
    "best epochs decide": "at full size, each trial counts by its best epoch",
    "first look after a third": "at full size, the first comparison after a third of the training",
    "no last look": "at full size, no comparison between the first and the end",
}
"""Rules in words that a reader understands without another page. Names that are not here are clear themselves."""

REPLAY = "replay.md"
ASKED = {
    "Hyperband sweeps": "Hyperband",
    "median stopping sweeps": "median stopping",
    "no stopping in the sweep": "no stopping",
}
"""Maps the name of a rule on the replay page to its name here."""

Line = tuple[str, str, str]


def held_out(folder: Path, resamples: int = RESAMPLES) -> Iterator[Answer]:
    """Answer from the second half of the tasks: is `tune` as good there, is it sure, does another rule do better?"""
    tables = halves(pooled(folder / "replay"))[1]
    if not tables:
        return
    found = rows(tables, {name: rule for name, rule in RULES.items() if name in ABLATIONS}, resamples)
    where = f"recorded trainings of {len(tables)} tasks"
    yield _unseen(folder, tables, found, where)
    yield from _certainty(tables, resamples, where)
    yield _rules(folder, found, where)


def _unseen(folder: Path, tables: Mapping[str, Table], found: PolicyRows, where: str) -> Answer:
    today, again = mean(found[TODAY].values()), mean(found[AGAIN].values())
    lines: list[Line] = [
        ("the model handed back, replayed", f"{today.handed:.0%}", f"{again.handed:.0%}"),
        ("its configuration, trained again, replayed", f"{today.retrained:.0%}", f"{again.retrained:.0%}"),
        ("cost in full trainings, replayed", f"{today.cost:.1f}", f"{again.cost:.1f}"),
    ]
    for what, share in (("handed back", "handed"), ("trained again", "retrained")):
        behind = [name for name in tables if getattr(found[TODAY][name], share) < getattr(found[AGAIN][name], share)]
        lines.append((f"tasks on which the other ASHA is ahead, {what}, replayed", _named(behind), ""))
    live, where_live = _live(folder, tables)
    sources = [REPLAY, "replay_notes.md", *["vs_asha.md"] * bool(live)]
    return Answer(
        "Is it as good on tasks that were not used to choose its rules?",
        f"There, the model of `tune` tests as well as ASHA's in {today.handed:.0%} of searches; ASHA with other "
        f"configurations does so in {again.handed:.0%}.",
        ("tests as well as ASHA's", "`tune`", "ASHA with other configurations"),
        [*lines, *live, *_agreement(folder)],
        sources,
        f"{where}{where_live}",
    )


def _live(folder: Path, tables: Collection[str]) -> tuple[list[Line], str]:
    tasks = {task: methods for task, methods in of_today(read(folder / "vs_asha")).items() if task in tables}
    if not tasks:
        return [], ""
    found, chance = overall(tasks, "tune"), by_chance(tasks, "tune")
    handed = f"{found.not_worse} of {found.runs}", f"{chance.not_worse / chance.runs:.0%}"
    again = f"{found.again_not_worse} of {found.again}", f"{chance.again_not_worse / chance.again:.0%}"
    lines: list[Line] = [
        ("the model handed back, really run", *handed),
        ("its configuration, trained again, really run", *again),
        ("tasks on which it is worse in the mean, really run", _named(found.lost), ""),
    ]
    cells = [cell for methods in tasks.values() for name in (BASELINE, "tune") for cell in methods[name]]
    return lines, f"; real runs: {machines_of(cell['environment'] for cell in cells)}"


def _named(tasks: Iterable[str]) -> str:
    return "; ".join(TASK_NAMES.get(task, task) for task in tasks) or "none"


def _agreement(folder: Path) -> list[Line]:
    found = agreement_with_live(policies.today, folder / "replay")
    told = f"{found.alike} of {found.searches} searches"
    return [("replay and real run agree on whether ASHA's score is reached", told, "")] if found.searches else []


def _certainty(tables: Mapping[str, Table], resamples: int, where: str) -> Iterator[Answer]:
    sure = [race for table in tables.values() for race in races(table, resamples) if race.probability >= SURE]
    if not sure:
        return
    stated, best = (sum(values) / len(sure) for values in ([r.probability for r in sure], [r.best for r in sure]))
    yield Answer(
        "Can I believe the confidence that a run states?",
        f"If a run states a confidence of {stated:.0%}, expect its winner to be the best finalist in {best:.0%}.",
        ("stated confidence", "its mean", "winners that are the best of their finalists"),
        [(f"at least {SURE:.0%}", f"{stated:.0%}", f"{best:.0%}")],
        [REPLAY],
        where,
    )


def _rules(folder: Path, found: PolicyRows, where: str) -> Answer:
    """Compare other rules with today's on the tasks on which they can be replayed."""
    lines = []
    for name in ABLATIONS:
        if name in found:
            row, today = mean(found[name].values()), mean(found[TODAY][task] for task in found[name])
            other = "" if name == TODAY else f"{_percent(today)}, {today.cost:.1f}"
            of = f"{row.retrained:.0%}", f"{row.handed:.0%}", f"{row.cost:.1f}", other
            lines.append((row.retrained, (PLAINLY.get(name, name.removeprefix(f"{TODAY}, ")), *of)))
    lines += [(float(cells[1].rstrip("%")) / 100, cells) for cells in rules_of_page(folder)]
    own = round(mean(found[TODAY].values()).retrained, 2)
    better = [f"{cells[0]} ({cells[3]} full trainings)" for share, cells in lines if round(share, 2) > own]
    only = f"only {'; '.join(better)}" if better else "no other one"
    meaning = f"Keep the default rule: {only} finds better configurations."
    return Answer(
        "Would another rule of the search find more?",
        meaning,
        (
            "rule",
            "trained again, as good as ASHA",
            "handed back, as good as ASHA",
            "cost, in full trainings",
            "today's rule on the same tasks",
        ),
        [cells for _, cells in sorted(lines, key=lambda line: -line[0])],
        [REPLAY, "replay_ladder.md", "replay_notes.md"],
        where,
    )


def _percent(row: PolicyRow) -> str:
    return f"{row.retrained:.0%}, {row.handed:.0%}"


def anytime(folder: Path) -> Iterator[Answer]:
    """Answer which model a search has if it is stopped after a part of its time."""
    page = _page(folder)
    costs = {name: re.findall(f"{re.escape(AHEAD.format(rival=name))}([0-9.]+)", page) for name in RIVALS}
    rows = {cells[1]: cells[2:] for line in page.splitlines() if (cells := _cells(line))[:1] == ["second"]}
    if not all(costs.values()) or not rows.keys() >= {*IN_TIME}:
        return
    first, at_once, *theirs = (rows[name] for name in IN_TIME)
    ours = [*first[:-1], at_once[-1]]  # if there is time for all, a budget changes nothing
    yield Answer(
        "What is in hand if the time is short?",
        "In the mean, a stopped search of `tune` has a better model than "
        + ", and than ".join(f"{name} from {max(costs[name], key=float)}" for name in RIVALS)
        + " full trainings on.",
        ("share of the time of a whole search", "regret of `tune`, in seeds' spreads", *(f"of {r}" for r in RIVALS)),
        [(f"{share:.0%}", *each) for share, *each in list(zip(SHARES, ours, *theirs, strict=True))[::-1]],
        [REPLAY],
        "recorded trainings",
    )


def _cells(line: str) -> list[str]:
    return re.split(r" *\| *", line)[1:-1]


def _page(folder: Path) -> str:
    return (folder / REPLAY).read_text() if (folder / REPLAY).exists() else ""


def rules_of_page(folder: Path) -> list[tuple[str, str, str, str, str]]:
    """Read from the page of the replay the rules of the sweep beside halving, on the tasks that chose no rule."""
    _, _, second = _page(folder).partition("**The second half**")
    rows = {cells[0]: cells[2:] for line in second.splitlines() if len(cells := _cells(line)) == 6}
    found = []
    for name, title in ASKED.items() if TODAY in rows else ():
        (cost, _, handed, again), (own, _, own_handed, own_again) = rows[name], rows[TODAY]
        there = f"{own_again}, {own_handed}, {own}".replace(" %", "%")
        found.append((f"{title} in the sweep", again.replace(" ", ""), handed.replace(" ", ""), cost, there))
    return found
