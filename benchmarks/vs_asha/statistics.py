"""Statistics of the cells of the comparison: pure functions of their JSON.

`cell.py` writes a cell, the result of one task, method and seed. Comparisons are made between cells of one seed, which
tried the same configurations, and then summed up over seeds. If a baseline's score is never reached, the time to it is
infinite, and counts as infinite in medians and quartiles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, variance
from typing import Any, NamedTuple

Cell = Mapping[str, Any]

BASELINE = "ray_asha"
BEST = 6
TOLERANCE = 1e-5
"""Two scores count as equal if they differ by at most this, because cells hold six digits of them."""


class Spread(NamedTuple):
    """Median and quartiles."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Return the median and the quartiles, interpolated linearly between values. Infinite values count.

    >>> spread([1.0, 2.0, 3.0, 4.0, math.inf])
    Spread(median=3.0, low=2.0, high=4.0)
    >>> spread([5.0])
    Spread(median=5.0, low=5.0, high=5.0)
    """
    ordered = sorted(values)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low, part = math.floor(place), place - math.floor(place)
        return ordered[low] if part == 0 else (1 - part) * ordered[low] + part * ordered[low + 1]

    return Spread(at(0.5), at(0.25), at(0.75))


def maximizes(cell: Cell) -> bool:
    """Tell whether more is better. Accuracies are maximized, losses are not."""
    return bool(cell["mode"] == "max")


def reached(cell: Cell, goal: float) -> float:
    """Return the seconds until the validation score of a full-size model first reaches `goal`; infinity if never."""
    sign = 1 if maximizes(cell) else -1
    times = (
        seconds
        for seconds, _, full_size, _, score, _ in cell["events"]
        if full_size and score is not None and sign * (score - goal) >= -TOLERANCE
    )
    return next(times, math.inf)


def ended(cell: Cell) -> float:
    """Return the validation score that the winner reported last."""
    winner = cell["winner"]["trial"]
    *_, last = (score for _, trial, full_size, _, score, _ in cell["events"] if full_size and trial == winner)
    return float(last)


def paired(cells: Sequence[Cell], baselines: Sequence[Cell]) -> list[tuple[Cell, Cell]]:
    """Pair each cell with the baseline of its seed. Cells without such a baseline are left out."""
    of_seed = {cell["seed"]: cell for cell in baselines}
    return [(cell, of_seed[cell["seed"]]) for cell in cells if cell["seed"] in of_seed]


def as_good(cell: Cell, base: Cell) -> bool:
    """Tell whether a cell reached the baseline's final validation score."""
    return math.isfinite(reached(cell, ended(base)))


def is_timed(cell: Cell) -> bool:
    """Tell whether a cell's times count, because no other work shared the machine."""
    return bool(cell["environment"].get("timed", True))


class Point(NamedTuple):
    """A moment of a search."""

    seconds: float
    test: float
    finished: int


def curve(cell: Cell) -> list[Point]:
    """Return the average test score of the best 6 trials over time, from the time when there are six.

    A trial counts with its last scores, which are those of its surrogate until the full-size model has some. The
    validation score decides which trials are best. A trial is finished with its last epoch.
    """
    events = cell["events"]
    last = {event[1]: i for i, event in enumerate(events)}
    sign = 1 if maximizes(cell) else -1
    now: dict[int, tuple[float, float]] = {}
    points: list[Point] = []
    finished = 0
    for i, (seconds, trial, _, _, score, test) in enumerate(events):
        finished += last[trial] == i
        now.pop(trial, None)
        if score is not None and test is not None:
            now[trial] = (sign * score, test)
        best = sorted(now.values(), reverse=True)[:BEST]
        if len(best) < BEST:
            continue
        if points and points[-1].seconds == seconds:
            points.pop()
        points.append(Point(seconds, sum(test for _, test in best) / BEST, finished))
    return points


def epochs(cell: Cell) -> tuple[int, int]:
    """Count the epochs trained, over all trials, of surrogates and of full-size models."""
    full = sum(event[2] for event in cell["events"])
    return len(cell["events"]) - full, full


def seed_spread(cells: Sequence[Cell]) -> float:
    """Return the standard deviation of the test score between plain trainings that differ only in their seed.

    If winners were trained again several times, it comes from the variances between these trainings. Otherwise, it
    comes from two draws, the winner's and that of its one training again, whose variance is (a - b)^2 / 2. A winner
    with averaged weights is no such draw, so it counts only if there are no others.
    """
    if several := [variance(cell["again"]) for cell in cells if _trained_again(cell)]:
        return math.sqrt(fmean(several))
    alike = [cell for cell in cells if not cell["settings"].get("averaged")] or cells
    squares = [(cell["winner"]["test"] - cell["floor"]["test"]) ** 2 / 2 for cell in alike]
    return math.sqrt(sum(squares) / len(squares))


def _trained_again(cell: Cell) -> bool:
    """Tell whether a winner was trained again several times, with a finite test score each."""
    return None not in cell.get("again", [None])


class MethodRow(NamedTuple):
    """A method on a task.

    Attributes:
        wall: Seconds; None if other work shared the machine.
        timed: Number of cells on the same kind of machine as their baseline. Only their times are compared.
        speedup: The baseline's wall time over this method's, seed by seed; None if no times can be compared.
        speedup_without_start: The same without Ray's start-up, until the first trial began; None without Ray.
        to_baseline: Seconds until a full-size model reached the baseline's final validation score; None if other work
            shared the machine.
        speedup_to_baseline: The baseline's time to its own final score over this method's time to it.
        reached: Number of cells that reached that score.
        compared: Number of cells that have a baseline.
        gain: How much better the test score is than the baseline's, seed by seed.
        floors: Wall time over one full-size training of the winner; None if other work shared the machine.
    """

    cells: int
    wall: Spread | None
    timed: int
    speedup: Spread | None
    speedup_without_start: Spread | None
    to_baseline: Spread | None
    speedup_to_baseline: Spread | None
    reached: int
    compared: int
    test: Spread
    gain: Spread | None
    trials: int
    surrogate_epochs: Spread
    full_epochs: Spread
    floors: Spread | None


def row(cells: Sequence[Cell], baselines: Sequence[Cell]) -> MethodRow:
    """Sum up one method's cells of a task.

    Args:
        cells: One for each seed; at least one.
        baselines: The baseline's cells of the task, of any seeds.
    """
    pairs = paired(cells, baselines)
    times = [reached(cell, ended(base)) for cell, base in pairs]
    timed = [
        (cell, base, time)
        for (cell, base), time in zip(pairs, times)
        if is_timed(cell) and is_timed(base) and cell["environment"]["cpu"] == base["environment"]["cpu"]
    ]
    quiet = [cell for cell in cells if is_timed(cell)]
    sign = 1 if maximizes(cells[0]) else -1
    both = [epochs(cell) for cell in cells]

    def of(values: Sequence[float]) -> Spread | None:
        return spread(values) if values else None

    return MethodRow(
        cells=len(cells),
        wall=of([cell["wall"] for cell in quiet]),
        timed=len(timed),
        speedup=of([base["wall"] / cell["wall"] for cell, base, _ in timed]),
        speedup_without_start=of(
            [(base["wall"] - start_up(base)) / cell["wall"] for cell, base, _ in timed if base["method"] == BASELINE]
        ),
        to_baseline=of([time for (cell, _), time in zip(pairs, times) if is_timed(cell)]),
        speedup_to_baseline=of([reached(base, ended(base)) / time for _, base, time in timed]),
        reached=sum(math.isfinite(time) for time in times),
        compared=len(pairs),
        test=spread([cell["winner"]["test"] for cell in cells]),
        gain=of([sign * (cell["winner"]["test"] - base["winner"]["test"]) for cell, base in pairs]),
        trials=len({event[1] for event in cells[0]["events"]}),
        surrogate_epochs=spread([surrogates for surrogates, _ in both]),
        full_epochs=spread([full for _, full in both]),
        floors=of([cell["wall"] / cell["floor"]["seconds"] for cell in quiet]),
    )


class Overall(NamedTuple):
    """A method on several tasks, against the baseline, seed by seed.

    Attributes:
        reached: Number of runs that reached the baseline's final validation score.
        not_worse: Number of runs whose test score is worse by no more than the seed spread.
        again: Number of runs whose winner was trained again, as the baseline's was.
        again_not_worse: Number of these whose configuration then tests worse by no more than the seed spread.
        lost: Tasks on which the mean test score is worse by more than the seed spread.
        sweeps: Task -> median of the sweep's wall time over one full-size training of the winner, for tasks whose
            times count.
    """

    runs: int
    reached: int
    not_worse: int
    again: int
    again_not_worse: int
    lost: Sequence[str]
    sweeps: Mapping[str, float]


def baseline_of(methods: Mapping[str, Any]) -> str:
    """Return the name of Ray's ASHA or, if it was not run, of the same rule in one process."""
    return BASELINE if BASELINE in methods else "asha"


def overall(tasks: Mapping[str, Mapping[str, Sequence[Cell]]], method: str) -> Overall:
    """Sum up one method's cells of several tasks.

    Args:
        tasks: `tasks[task][method]` are the cells. Each task has the baseline's.
    """
    pairs = {task: paired(methods[method], methods[BASELINE]) for task, methods in tasks.items()}
    found = {task: compared(pairs[task], methods) for task, methods in tasks.items()}
    again = [gain for task, methods in tasks.items() for gain in compared_again(pairs[task], methods)]
    return Overall(
        runs=sum(len(gains) for gains, _ in found.values()),
        reached=sum(sum(times) for _, times in found.values()),
        not_worse=sum(gain >= -1 for gains, _ in found.values() for gain in gains),
        again=len(again),
        again_not_worse=sum(gain >= -1 for gain in again),
        lost=[task for task, (gains, _) in found.items() if sum(gains) < -len(gains)],
        sweeps={
            task: spread([cell["apart"]["sweep"] / cell["floor"]["seconds"] for cell in quiet]).median
            for task, methods in tasks.items()
            if (quiet := [cell for cell in methods[method] if is_timed(cell)])
        },
    )


def compared(
    pairs: Sequence[tuple[Cell, Cell]], methods: Mapping[str, Sequence[Cell]]
) -> tuple[list[float], list[bool]]:
    """Return, for each pair, by how many seed spreads the first tests better, and if it reached the second's score."""
    spread_of_seeds = _spread_of(methods)
    gains = [_better(cell, cell["winner"]["test"], base["winner"]["test"]) / spread_of_seeds for cell, base in pairs]
    return gains, [as_good(cell, base) for cell, base in pairs]


def compared_again(pairs: Sequence[tuple[Cell, Cell]], methods: Mapping[str, Sequence[Cell]]) -> list[float]:
    """Return, for each pair that was trained again, by how many seed spreads the first then tests better."""
    spread_of_seeds = _spread_of(methods)
    both = [(cell, base) for cell, base in pairs if _trained_again(cell) and _trained_again(base)]
    return [_better(cell, fmean(cell["again"]), fmean(base["again"])) / spread_of_seeds for cell, base in both]


def _spread_of(methods: Mapping[str, Sequence[Cell]]) -> float:
    return seed_spread([cell for cells in methods.values() for cell in cells])


def _better(cell: Cell, one: float, other: float) -> float:
    return (1 if maximizes(cell) else -1) * (one - other)


def split_of(cell: Cell) -> int:
    """Return the number of the split of its task's examples that a cell had."""
    return int(cell["settings"].get("split", 0))


def start_up(cell: Cell) -> float:
    """Return the seconds until Ray's first trial began; 0 for a method without Ray."""
    return float(cell["apart"].get("until the first trial began", 0.0))
