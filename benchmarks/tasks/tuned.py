"""A task searched by `tune`: the arguments that all live benchmarks have in common."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.tasks.task import Task, objective
from hydro_rasda import TuneResult, tune


def tuned(task: Task, folder: str | Path, space: Mapping[str, Any] | None = None, **settings: Any) -> TuneResult:
    """Search by the validation score, without progress.

    Args:
        folder: The run is its folder "run".
        settings: Further arguments of `tune`, and others than the task's `num_samples` and `max_t`.
    """
    given = {"num_samples": task.num_samples, "max_t": task.max_t, **settings}
    return tune(
        task.model_fn,
        task.space() if space is None else space,
        train_data=task.train,
        val_data=task.held,
        objective=objective(task.kind),
        metric="val_score",
        mode=task.mode,
        storage_path=folder,
        name="run",
        progress=False,
        **given,
    )
