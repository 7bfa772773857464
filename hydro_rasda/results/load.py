"""Opening a finished, interrupted or running run from its folder alone, without data or model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hydro_rasda.problem.problem import Problem
from hydro_rasda.records.record_from_journal import read_record, settings_of
from hydro_rasda.results.result import TuneResult
from hydro_rasda.run.pickling import Gone
from hydro_rasda.run.run_json import read_asked


def load(path: str | Path) -> TuneResult:
    """Open a run of `tune`: its result, or what it has found so far if it still runs or was interrupted.

    The folder is only read, and nothing in it can run code. JSON has no form for some values of a configuration, such
    as functions, classes and members of an Enum: the result has their names. Secrets are "(hidden)". If a model
    function reads a name or "(hidden)" in place of such a value, it raises an error that says how to pass the value.

    Args:
        path: The run's folder, `storage_path/name`, of any backend.

    Returns:
        The result that `tune` returned, without data and functions: `best_model(model_fn=...)` gives the trained model,
        on the CPU. `TuneResult.finished` says whether the run came to its end. Before, `best_config` is the best so
        far, and trials that may train on are "undecided".

    Raises:
        ValueError: if the folder holds no run.
    """
    record = read_record(path)
    nothing: Any = None
    problem = Problem(
        model_fn=Gone("model_fn"),
        objective=Gone("objective"),
        train_data=nothing,
        val_data=nothing,
        settings=settings_of(read_asked(record.path)),
        device=torch.device("cpu"),
        copied=True,  # unknown here; if it were False, a model function that keeps its module would return one for all
    )
    return TuneResult(**vars(record), _problem=problem)
