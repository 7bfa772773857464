"""The comparison with plain ASHA as a page and a figure, drawn from its cells alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.result_files import texts
from benchmarks.tasks.load import ON_GPU
from benchmarks.tasks.tabular import SPLITS
from benchmarks.vs_asha.figure import plot
from benchmarks.vs_asha.statistics import (
    BASELINE,
    Cell,
    MethodRow,
    Overall,
    baseline_of,
    is_timed,
    overall,
    row,
    seed_spread,
    split_of,
    spread,
    start_up,
)
from benchmarks.vs_asha.words import domains, how_often, machine, show, versions
from benchmarks.vs_asha.yardsticks import ByChance, by_chance, yardsticks

TASK_NAMES = {
    "digits": "MLP 64-256-256-10, digits",
    "residual": "residual CNN 32-64 with GroupNorm, digits",
    "warm_up": "CNN 32-64 with warm-up, digits, 16 trials",
    "breast_cancer": "MLP 30-256-256-2, breast cancer",
    "breast_cancer_splits": f"MLP 30-256-256-2, breast cancer, {SPLITS} splits",
    "diabetes": "MLP 10-256-256-1, diabetes, 32 trials",
    "diabetes_splits": f"MLP 10-256-256-1, diabetes, 32 trials, {SPLITS} splits",
    "recurrent": "LSTM, width 128, tiny shakespeare",
    "cifar10": "CNN 32-64-128 with BatchNorm, CIFAR-10",
    "shakespeare": "character transformer, 4 layers, width 128, tiny shakespeare",
    "turbulence": "convolutional autoencoder, 2-D turbulence",
    "cifar10_resnet18": "ResNet-18, all of CIFAR-10",
    "shakespeare_gpt": "character transformer, 6 layers, width 384, tiny shakespeare",
    "depthwise": "residual depthwise CNN, width 64, GroupNorm, CIFAR-10 at 16x16, 48 trials",
    "augmented": "CNN 32-64-128 with BatchNorm, augmented CIFAR-10 at 16x16, 48 trials",
    "label_noise": "CNN 32-64, digits with wrong labels, 48 trials",
    "denoising": "autoencoder, width 512, noisy digits, 48 trials",
    "gated_recurrent": "GRU, width 192, tiny shakespeare, 48 trials",
    "two_layers": "LSTM of two layers, width 96, tiny shakespeare, 48 trials",
    "wide_table": "MLP 40-1024-1024-4, drawn classes, 48 trials",
    "few_rows": "MLP 10-512-512-1, 100 rows, 48 trials",
    "spoken_digits": "residual depthwise CNN, width 64, GroupNorm, spoken digits, 48 trials",
    "wide_transformer": "character transformer, 4 layers, width 512, tiny shakespeare, 48 trials",
    "wide_lstm": "LSTM of two layers, width 768, tiny shakespeare, 48 trials",
    "wide_residual": "residual CNN 128-256-512 with GroupNorm, CIFAR-10 at 16x16, 48 trials",
}
METHOD_NAMES = {
    "ray_asha": "Ray Tune, ASHA",
    "asha": "ASHA, one after another",
    "fusion": "fusion alone",
    "surrogate": "surrogates alone",
    "both": "both",
    "tune": "both with RASDA: `tune`",
    "tune_two": "`tune(full_trainings=2)`",
    "tune_one": "`tune(full_trainings=1)`",
}


Cells = Mapping[str, Mapping[str, Sequence[Cell]]]
"""`cells[task][method]`, in the order of the tables."""


def read(folder: Path) -> Cells:
    """Read all cells of a folder."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    sorted_: dict[str, dict[str, list[Cell]]] = {}
    for task in TASK_NAMES:
        for method in METHOD_NAMES:
            cells = [cell for cell in found if (cell["task"], cell["method"]) == (task, method)]
            if cells:
                sorted_.setdefault(task, {})[method] = sorted(cells, key=lambda cell: cell["seed"])
    return sorted_


def write(folder: Path) -> None:
    """Write the page and the figure beside the folder of cells."""
    cells = read(folder)
    folder.with_suffix(".md").write_text(markdown(cells, figure=f"{folder.name}.png"))
    timed = {task: _timed(methods) for task, methods in cells.items()}
    if timed := {task: methods for task, methods in timed.items() if len(methods) > 1}:
        plot(timed, METHOD_NAMES, folder.with_suffix(".png"))


def markdown(cells: Cells, figure: str) -> str:
    """Return the page."""
    missing = [
        f"## {task}: {TASK_NAMES[task]}\n\n**Not run: no GPU.** To run: `python -m benchmarks.vs_asha --tasks {task}`."
        for task in not_run(cells)
    ]
    curves = [f"![Curves]({figure})"] if cells else []
    together = [_together(today)] if len(today := of_today(cells)) > 1 else []
    return (
        "\n\n".join([texts("vs_asha")["head"], *(_task(cells, task) for task in cells), *together, *missing, *curves])
        + "\n"
    )


def not_run(cells: Cells) -> list[str]:
    """Return the tasks that were not run because there was no GPU."""
    of_gpu = any(
        "gpu" in cell["environment"] for methods in cells.values() for each in methods.values() for cell in each
    )
    return [] if of_gpu else [task for task in ON_GPU if task not in cells]


_COLUMNS = (
    "method",
    "n",
    "wall s",
    "faster",
    "without start-up",
    "to Ray's score, s",
    "reached",
    "faster to it",
    "test",
    "against Ray's",
    "trials",
    "surrogate epochs",
    "full-size epochs",
    "floors",
)


def _task(cells: Cells, task: str) -> str:
    methods = cells[task]
    everything = [cell for of_method in methods.values() for cell in of_method]
    between_seeds = seed_spread(everything)
    some = everything[0]
    settings, rows = some["settings"], rows_of(cells, task)
    reduced = " (reduced)" if some["reduced"] else ""
    splits = ", split anew for each seed" if len({split_of(cell) for cell in everything}) > 1 else ""
    lines = [
        f"## {task}{reduced}: {TASK_NAMES[task]}",
        "",
        f"{settings['trials']} trials, max_t {settings['max_t']}, reduction factor {settings['reduction_factor']}. "
        f"{settings['examples']['train']:,} training, {settings['examples']['validation']:,} validation, "
        f"{settings['examples']['test']:,} test examples{splits}. Score: {some['score']}. "
        f"Space: {domains(settings['space'])}. "
        f"Seed spread {between_seeds:.3g}. {machine(everything)}. {versions(everything)}.",
        "",
        "| " + " | ".join(_COLUMNS) + " |",
        "|" + "---|" * len(_COLUMNS),
        *(_line(METHOD_NAMES[method], of_method, between_seeds) for method, of_method in rows.items()),
        "",
        verdict(cells, task) if not reduced else "Reduced: fewer examples, trials and epochs.",
    ]
    for more in (_older(methods, rows), _apart(methods)):
        lines += ["", more] if more else []
    return "\n".join(lines)


def _together(tasks: Cells) -> str:
    """Say how often `tune` is as good as Ray's ASHA, and how often ASHA itself is so with another seed."""
    rows: dict[str, Overall | ByChance] = {"`tune`": overall(tasks, "tune")}
    rows["Ray's ASHA, another seed"] = by_chance(tasks, "tune")
    lines = [
        "## All tasks with the present defaults",
        "",
        "The first row counts runs that are as good as that of Ray's ASHA with the same seed, and so with the same "
        "configurations. The second compares Ray's ASHA with itself under another seed: with other configurations, "
        "weights and orders of examples. There, all ordered pairs of seeds count that share a split of the examples. "
        "Each task counts as often as it has runs of `tune`.",
        "",
        "| method | reaches the validation score | test not worse by more than the seed spread "
        "| configuration trained again: test not worse |",
        "|---|---|---|---|",
        *(
            f"| {name} | {r.reached:.3g} of {r.runs} | {r.not_worse:.3g} of {r.runs} "
            f"| {r.again_not_worse:.3g} of {r.again} |"
            for name, r in rows.items()
        ),
        "",
        "Ray's ASHA with another seed, by task:",
        "",
        "| task | reaches the validation score | test not worse |",
        "|---|---|---|",
        *(f"| {task} | {one.reached:.0%} | {one.not_worse:.0%} |" for task, one in yardsticks(tasks).items()),
    ]
    return "\n".join(lines)


def rows_of(cells: Cells, task: str) -> dict[str, MethodRow]:
    """Return a row for each method of a task."""
    methods = cells[task]
    return {method: row(of_method, methods.get(baseline_of(methods), ())) for method, of_method in methods.items()}


def lost(row: MethodRow, between_seeds: float) -> bool:
    """Tell whether the test score is worse than the baseline's by more than the seed spread."""
    return row.gain is not None and row.gain.median < -between_seeds


def _line(name: str, row: MethodRow, between_seeds: float) -> str:
    loss = " **loss**" if lost(row, between_seeds) else ""
    columns = [
        name,
        row.cells,
        show(row.wall),
        show(row.speedup, "x"),
        show(row.speedup_without_start, "x"),
        show(row.to_baseline),
        how_often(row),
        show(row.speedup_to_baseline, "x"),
        show(row.test),
        show(row.gain) + loss,
        row.trials,
        show(row.surrogate_epochs),
        show(row.full_epochs),
        show(row.floors),
    ]
    return "| " + " | ".join(map(str, columns)) + " |"


def verdict(cells: Cells, task: str) -> str:
    """Say how much faster `tune` is, its cost, and whether its model is as good."""
    own = rows_of(cells, task).get("tune")
    if own is None or own.gain is None:
        return "No pair of `tune` and ASHA yet."
    rival = "Ray's ASHA" if BASELINE in cells[task] else "ASHA in one process"
    between_seeds = seed_spread([cell for of_method in cells[task].values() for cell in of_method])
    quality = (
        "Its test score is worse by more than the seed spread"
        if lost(own, between_seeds)
        else "Its test score is not worse by more than the seed spread"
    )
    if own.speedup is None or own.floors is None:
        return f"There are no times of `tune` and {rival} on one kind of machine, without other work. {quality}."
    return (
        f"`tune` is {own.speedup.median:.1f} times as fast as {rival}. It costs {own.floors.median:.1f} trainings of "
        f"its winner. {quality}."
    )


OLDER: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "which kept the last epoch's weights and, with RASDA, one finalist of four": lambda asked: "keep" not in asked,
    "which swept to the end of a training, looked at finalists after a quarter, and let them train 2.5 times": (
        lambda asked: "keep" in asked and "full_trainings" not in asked
    ),
    "by which of each epoch the better of its own and the averaged weights counted": (
        lambda asked: "full_trainings" in asked and not asked.get("averaged")
    ),
    "which looked at finalists after a ninth, and chose by the best epochs of averaged weights": (
        lambda asked: bool(asked.get("averaged")) and "first_look" not in asked
    ),
    "which handed back averaged weights also where the last step's own validated better": (
        lambda asked: asked.get("averaged") is True and "first_look" in asked
    ),
    "which compared trials without their averages": lambda asked: asked.get("averaged") == "unless worse in the end",
    "which compared trials by the mean of both weights' scores in the end": (
        lambda asked: asked.get("averaged") == "in comparisons, too"
    ),
}
"""Older defaults of `tune`, in words -> a function that tells whether a cell's settings are these."""


def _older(methods: Mapping[str, Sequence[Cell]], rows: Mapping[str, MethodRow]) -> str:
    """Say which rows were measured with older defaults of `tune`, or on another day."""
    own = [method for method in ("fusion", "surrogate", "both", "tune") if method in methods]
    told = []
    for what, holds in OLDER.items():
        if older := [METHOD_NAMES[m] for m in own if any(holds(cell["settings"]) for cell in methods[m])]:
            told.append(f"Measured with older defaults, {what}: {'; '.join(older)}.")
    methods = _timed(methods)
    if len(methods) < 2:
        return " ".join(told)
    bases = methods.get(baseline_of(methods), ())
    if other := [METHOD_NAMES[method] for method in methods if _on_another_day(methods[method], bases)]:
        told.append(f"Run on other days than ASHA here: {'; '.join(other)}.")
        told.append("The machine may have been faster or slower then, so that times do not compare.")
    for method, of_method in rows.items():
        if of_method.timed < of_method.compared:
            share = f"{of_method.timed} of {of_method.compared} runs"
            told.append(f"{share} of {METHOD_NAMES[method]} were on the same kind of machine as ASHA, and alone.")
    return " ".join(told)


def of_today(cells: Cells) -> Cells:
    """Return the tasks that have cells of both today's defaults of `tune` and Ray's ASHA, without reduced tasks."""
    return {
        task: methods
        for task, methods in cells.items()
        if (own := methods.get("tune"))
        and methods.get(BASELINE)
        and is_of_today(own)
        and not any(cell["reduced"] for cell in own)
    }


def is_of_today(cells: Sequence[Cell]) -> bool:
    """Tell whether all of these cells of `tune` were run with today's defaults."""
    return not any(holds(cell["settings"]) for cell in cells for holds in OLDER.values())


def _timed(methods: Mapping[str, Sequence[Cell]]) -> dict[str, Sequence[Cell]]:
    """Return the methods that ran without other work beside them in all of their cells."""
    return {method: cells for method, cells in methods.items() if all(map(is_timed, cells))}


def _on_another_day(cells: Sequence[Cell], baselines: Sequence[Cell]) -> bool:
    days = {cell["seed"]: cell["environment"]["date"][:10] for cell in baselines}
    return any(cell["environment"]["date"][:10] != days.get(cell["seed"]) for cell in cells)


def _apart(methods: Mapping[str, Sequence[Cell]]) -> str:
    """Say how long parts of the wall time are: the start of Ray, and the parts of `tune`."""
    parts = []
    timed = {method: [cell for cell in of_method if is_timed(cell)] for method, of_method in methods.items()}
    if cells := timed.get(BASELINE):
        start = spread([start_up(cell) for cell in cells])
        parts.append(f"Ray's start-up, until the first trial began: {show(start)} s.")
    if cells := timed.get("tune"):
        seconds = {name: spread([cell["apart"][name] for cell in cells]) for name in cells[0]["apart"]}
        parts.append("Within `tune`: " + ", ".join(f"{name} {show(value)} s" for name, value in seconds.items()) + ".")
    return " ".join(parts)
