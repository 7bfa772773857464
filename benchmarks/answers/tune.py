"""Compare `tune` with ASHA and other searches, and tell the time that the library itself takes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import own_loop, own_loop_ppo, peers, scale
from benchmarks.answers.answer import NOT_RUN, Answer, machine_of, machines_of
from benchmarks.result_files import read
from benchmarks.vs_asha.report import TASK_NAMES, Cells, is_of_today, lost, not_run, of_today, rows_of
from benchmarks.vs_asha.report import read as read_cells
from benchmarks.vs_asha.statistics import (
    BASELINE,
    Cell,
    MethodRow,
    Spread,
    baseline_of,
    is_timed,
    overall,
    seed_spread,
    spread,
)
from benchmarks.vs_asha.statistics import row as vs_asha_row
from benchmarks.vs_asha.words import how_often, show
from benchmarks.vs_asha.yardsticks import by_chance

FOLDERS = ("vs_asha", "vs_asha_gpu")


class _Task(NamedTuple):
    """A task on which `tune` and ASHA were run."""

    name: str
    cells: list[Cell]
    own: MethodRow
    base: MethodRow
    against_ray: bool
    in_one_process: MethodRow
    between_seeds: float

    @property
    def gain(self) -> float:
        """Return by how many seed spreads the model of `tune` tests better in the median."""
        assert self.own.gain is not None
        return self.own.gain.median / self.between_seeds


def _tasks(folder: Path) -> list[_Task]:
    found = []
    for place in FOLDERS:
        cells = read_cells(folder / place)
        for task, methods in cells.items():
            rows, base = rows_of(cells, task), baseline_of(methods)
            if "tune" not in rows or rows["tune"].gain is None:
                continue
            everything = [cell for of_method in methods.values() for cell in of_method]
            name = TASK_NAMES[task] + ", on a GPU" * ("gpu" in everything[0]["environment"])
            name += " (reduced)" * everything[0]["reduced"] + " (older defaults)" * (not is_of_today(methods["tune"]))
            in_one_process = vs_asha_row(methods["tune"], methods.get("asha", ()))
            of = rows["tune"], rows[base], base == BASELINE, in_one_process
            found.append(_Task(name, everything, *of, seed_spread(everything)))
    return found


def sooner(folder: Path) -> Iterator[Answer]:
    """Tell how many times as fast as ASHA `tune` hands back a model, by task."""
    timed = [task for task in _tasks(folder) if task.own.speedup is not None]
    if not timed:
        return
    ray = [task.own.speedup for task in timed if task.against_ray]
    alone = [task.own.speedup for task in timed if not task.against_ray]
    told = [
        f"{_range(values)} times as soon as {what}"
        for values, what in ((ray, "Ray Tune's ASHA"), (alone, "ASHA in one process"))
        if values
    ]
    part = " Part of the lead over Ray Tune is Ray's start-up." * bool(ray)
    rows = [
        [
            task.name,
            show(task.own.speedup if task.against_ray else None, "x"),
            show(task.own.speedup_without_start, "x"),
            show(task.in_one_process.speedup, "x"),
            show(task.own.floors),
            _sweep(task.cells),
            str(task.own.timed),
        ]
        for task in sorted(timed, key=lambda task: -_median(task.own.speedup))
    ]
    for place in FOLDERS:
        if (folder / f"{place}.md").exists():
            rows += [[TASK_NAMES[task], *[NOT_RUN] * 4, "", ""] for task in not_run(read_cells(folder / place))]
    yield Answer(
        "How much sooner than ASHA does `tune` hand back a trained model?",
        f"Expect a trained model {', and '.join(told)}.{part}",
        (
            "task",
            "times as fast as Ray Tune's ASHA",
            "... without Ray's start-up",
            "times as fast as ASHA in one process",
            "cost, in full trainings of the winner",
            "of it the sweep",
            "runs",
        ),
        rows,
        _sources(folder),
        machines_of(cell["environment"] for task in timed for cell in task.cells),
    )


def _sweep(cells: Sequence[Cell]) -> str:
    own = [cell for cell in cells if cell["method"] == "tune" and is_timed(cell)]
    return show(spread([cell["apart"]["sweep"] / cell["floor"]["seconds"] for cell in own])) if own else ""


def _range(values: Sequence[Spread | None]) -> str:
    """Return the least and the most of some medians as text, such as "2.0 to 3.1"."""
    medians = [value.median for value in values if value is not None]
    low, high = f"{min(medians):.1f}", f"{max(medians):.1f}"
    return low if low == high else f"{low} to {high}"


def _median(value: Spread | None) -> float:
    return -math.inf if value is None else value.median


def _sources(folder: Path) -> list[str]:
    return [f"{place}.md" for place in FOLDERS if (folder / place).exists()]


def as_good(folder: Path) -> Iterator[Answer]:
    """Tell how often the model of `tune` is as good as ASHA's over all tasks, and then the scores by task."""
    yield from _overall(of_today(read_cells(folder / "vs_asha")))
    yield from _by_task(folder)


def _overall(tasks: Cells) -> Iterator[Answer]:
    if len(tasks) < 2:
        return
    found, chance = overall(tasks, "tune"), by_chance(tasks, "tune")
    cells = [cell for methods in tasks.values() for method in (BASELINE, "tune") for cell in methods[method]]
    rows = [
        ("its model tests worse by no more than a seed's spread", found.not_worse, chance.not_worse),
        ("its model reaches the validation score of ASHA's winner", found.reached, chance.reached),
        ("its configuration, trained again, tests as well", found.again_not_worse, chance.again_not_worse),
    ]
    of = [(found.runs, chance.runs), (found.runs, chance.runs), (found.again, chance.again)]
    yield Answer(
        "Is the model as good as ASHA's?",
        f"The model of `tune` tests as well as Ray Tune's ASHA's in {found.not_worse / found.runs:.0%} of "
        f"runs; a second ASHA, with another seed, does so in {chance.not_worse / chance.runs:.0%}.",
        ("how often", "`tune`", "ASHA with another seed, and so with other configurations"),
        [
            (what, f"{own} of {runs}", f"{theirs:.3g} of {others}")
            for (what, own, theirs), (runs, others) in zip(rows, of, strict=True)
        ],
        ["vs_asha.md"],
        f"{len(tasks)} tasks; {machines_of(cell['environment'] for cell in cells)}",
    )


def _by_task(folder: Path) -> Iterator[Answer]:
    tasks = _tasks(folder)
    if not tasks:
        return
    worse = [task for task in tasks if lost(task.own, task.between_seeds)]
    meaning = "On no task, the model tests worse than ASHA's by more than a seed's spread."
    if worse:
        meaning = (
            f"On {len(worse)} of {len(tasks)} tasks, the model tests worse than ASHA's by more than a seed's spread: "
        )
        meaning += "they are the last rows."
    rows = [
        (
            task.name,
            str(task.cells[0]["score"]),
            f"{task.own.test.median:.3g}",
            f"{task.base.test.median:.3g}",
            f"{task.between_seeds:.2g}",
            f"{round(task.gain, 1) + 0.0:+.1f} spreads" + ", **worse**" * lost(task.own, task.between_seeds),
            how_often(task.own),
        )
        for task in sorted(tasks, key=lambda task: -task.gain)
    ]
    columns = (
        "task",
        "score",
        "`tune`",
        "ASHA",
        "a seed's spread",
        "better by",
        "runs that reach ASHA's validation score",
    )
    where = machines_of(cell["environment"] for task in tasks for cell in task.cells)
    yield Answer("On which tasks is it better, and on which worse?", meaning, columns, rows, _sources(folder), where)


PRICES = {"tune": "3", "tune_two": "2", "tune_one": "1"}
"""`full_trainings` of each method."""


def at_smaller_prices(folder: Path) -> Iterator[Answer]:
    """Tell how fast and how good `tune` is with `full_trainings` of 2 and 1, on tasks where 1 was run."""
    rows, ones, environments = list[tuple[str, ...]](), list[MethodRow](), list[dict[str, Any]]()
    for task, methods in read_cells(folder / "vs_asha").items():
        if "tune_one" not in methods:
            continue
        between_seeds = seed_spread([cell for of_method in methods.values() for cell in of_method])
        for method in PRICES.keys() & {*methods}:
            own = vs_asha_row(methods[method], methods[baseline_of(methods)])
            environments += [cell["environment"] for cell in methods[method]]
            ones += [own] * (method == "tune_one")
            better = round(own.gain.median / between_seeds, 1) + 0.0 if own.gain else math.nan
            name = TASK_NAMES[task] + " (older defaults)" * (not is_of_today(methods[method]))
            measured = show(own.speedup, "x"), show(own.floors), f"{better:+.1f} spreads", how_often(own)
            rows.append((name, PRICES[method], *measured, f"{own.timed} of {own.cells}"))
    if not rows:
        return
    columns = (
        "task",
        "`full_trainings`",
        "times as fast as ASHA",
        "cost, in full trainings of the winner",
        "its model tests better than ASHA's by",
        "runs that reach ASHA's validation score",
        "timed runs",
    )
    yield Answer(
        "What do smaller prices give, for wide models?",
        f"With `full_trainings=1`, a search costs {_range([own.floors for own in ones])} full trainings. It is "
        f"{_range([own.speedup for own in ones])} times as fast as ASHA.",
        columns,
        sorted(rows, key=lambda row: (row[0].partition(" (")[0], row[1])),
        ["vs_asha.md"],
        machines_of(environments),
    )


def against_peers(folder: Path) -> Iterator[Answer]:
    """Compare test scores if other searches get the wall time that `tune` takes, or four times as much."""
    result = read(folder / peers.FILE)
    if result is None:
        return
    found, cells = [], read_cells(folder / "vs_asha")
    for name, rows, tests in peers.compared(result["rows"]):
        won, *later = [peers.wins(rows, of_budget) for of_budget in tests]
        trained = [cell for of_method in cells.get(rows[0]["task"], {}).values() for cell in of_method]
        close = peers.wins(rows, tests[0], seed_spread(trained) if trained else 0.0)
        found.append((peers.named(rows[0]), name, won, close, later[0] if later else None, len(rows)))
    found.sort(key=lambda line: (-line[2] / line[5], -line[3] / line[5]))
    won, close, of = (sum(line[2] for line in found), sum(line[3] for line in found), sum(line[5] for line in found))
    ahead = [line for line in found if 2 * line[2] < line[5]]
    yield Answer(
        "And in the time that `tune` takes, what do others find?",
        f"Given the same time, `tune` tests as well or better in {won} of {of} comparisons, and worse by no more than "
        f"a seed's spread in {close - won} others. {len(ahead)} of {len(found)} searches are mostly ahead of it.",
        (
            "task",
            "against",
            "`tune` is as good or better in the same time",
            "... or worse by no more than a seed's spread",
            "as good or better if the other has four times the time",
        ),
        [
            (task, name, f"{won} of {runs}", f"{close} of {runs}", NOT_RUN if later is None else f"{later} of {runs}")
            for task, name, won, close, later, runs in found
        ],
        ["peers.md"],
        machine_of(result["environment"]),
    )


def in_own_loops(folder: Path) -> Iterator[Answer]:
    """Tell the seconds and test losses of searches that use the user's own training loop."""
    result = read(folder / own_loop.FILE)
    if result is None:
        return
    found = own_loop.compared(result["rows"])
    faster = [line for line in found if line.faster is not None]
    told = " and ".join(f"{line.faster:.1f} times as fast as {line.search}" for line in faster)
    won = " and ".join(f"{line.as_good} of {line.seeds} seeds against {line.search}" for line in faster)
    yield Answer(
        "Does it gain with a training loop of one's own, which is not fused?",
        f"`tune(train=...)` is {told}. Its configuration, trained again, is as good or better with {won}.",
        ("search", "seconds", *own_loop.LOSSES),
        [(line.search, f"{line.seconds:.1f}", *line.losses) for line in found],
        ["own_loop.md"],
        machine_of(result["environment"]),
    )


def in_reinforcement_learning(folder: Path) -> Iterator[Answer]:
    """Tell the time until an agent of PPO has learned CartPole."""
    result = read(folder / own_loop_ppo.FILE)
    if result is None:
        return
    yield Answer(
        "Does it gain in reinforcement learning?",
        own_loop_ppo.told(result["rows"]),
        own_loop_ppo.SUMMARY,
        own_loop_ppo.summary(result["rows"]),
        ["own_loop_ppo.md"],
        machine_of(result["environment"]),
    )


def own_cost(folder: Path) -> Iterator[Answer]:
    """Tell the time that the library itself takes, with many trials, GPUs or ranks."""
    result = read(folder / scale.FILE)
    if result is None:
        return
    measured = {name: result["now"][name] for name in scale.ROWS if name in result["now"]}
    rows = [
        (row.what, scale.shown(measured[name], row), scale.shown(result["before"].get(name), row))
        for name, row in scale.ROWS.items()
        if name in measured
    ]
    meaning = "The library itself takes little beside training."
    if "imports" in measured:
        meaning = f"Importing `tune` takes {measured['imports']['number']:.2g} s of CPU beyond `import torch`."
    digits = read_cells(folder / "vs_asha").get("digits", {}).get("tune", ())
    if digits and is_of_today(digits):
        beside = spread([_beside_training(cell) for cell in digits])
        rows.append(("a search on digits, beside training", f"{show(beside)} s", ""))
        meaning += f" A search on digits spends {beside.median:.2g} s beside training."
    where = machines_of({**result["environment"], **cell} for cell in measured.values())
    columns = ("what", "now", "before it was made faster")
    yield Answer("What does the library itself cost?", meaning, columns, rows, ["scale.md"], where)


def _beside_training(cell: Cell) -> float:
    """Return the seconds of a search outside the sweep and the race, and those in which it measured widths."""
    apart = cell["apart"]
    return float(cell["wall"] - apart["sweep"] - apart["full size"] + apart["of it measuring widths"])
