"""A run opened from its folder alone, be it over, interrupted or still going on: neither data nor model are needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hydro_rasda.problem import Problem
from hydro_rasda.results.reading import read_record, settings_of
from hydro_rasda.results.result import TuneResult
from hydro_rasda.run.portable import Gone
from hydro_rasda.run.spec import read_asked


def load(path: str | Path) -> TuneResult:
    """Open a run of `tune`: its result, or what it has found so far, where it goes on or was interrupted.

    The folder is only read, and nothing in it can run code. Values of a configuration that JSON has no form for, such
    as functions and classes, are there as their names; secrets, such as `hf_token`, are "(hidden)".

    Args:
        path: The run's folder: `storage_path/name`, on whichever backend it was made.

    Returns:
        What `tune` returned, without data and functions: `best_model(model_fn=...)` gives the trained model, on the
        CPU. `TuneResult.finished` says whether the run came to its end; before, `best_config` is the best so far, and
        trials that may train on are "undecided".

    Raises:
        ValueError: where the folder holds no run.
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
        copied=True,  # not known; a model function that returns what it keeps would give each trial the same module
    )
    return TuneResult(**vars(record), _problem=problem)
