"""A run opened from its folder alone, be it over, interrupted or still going on: neither data nor model are needed."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from hydro_rasda.config import RASDAConfig, TuneConfig
from hydro_rasda.problem import Problem, Trial
from hydro_rasda.run.portable import Gone
from hydro_rasda.run.result import TuneResult, sum_up
from hydro_rasda.run.state import FINALISTS, Run, decision_key
from hydro_rasda.run.store import Store, read_asked
from hydro_rasda.run.targets import decided_targets, run_ended, settle_configs, take_in_targets, tried_targets
from hydro_rasda.run.transfer import recalled_transfer
from hydro_rasda.schedulers.sweep_rule import Drop, GoOn, move_of

_SWEEP_DECISION = re.compile(r"surrogate/(begin|to-\d+/kept)/of-.*")


def load(path: str | Path) -> TuneResult:
    """Open a run of `tune`: its result, or what it has found so far, where it goes on or was interrupted.

    The folder is only read, and nothing in it can run code. Values of a configuration that JSON has no form for, such
    as functions and classes, are there as their names.

    Args:
        path: The run's folder: `storage_path/name`, on whichever backend it was made.

    Returns:
        What `tune` returned, without data and functions: `best_model(model_fn=...)` gives the trained model, on the
        CPU. `TuneResult.finished` says whether the run came to its end; before, `best_config` is the best so far, and
        trials that may train on are "undecided".

    Raises:
        ValueError: where the folder holds no run.
    """
    folder = Path(path).expanduser().absolute()
    asked = read_asked(folder)
    run = Run(_problem(asked), Store.read(folder))
    dropped = _take_in_sweep(run)
    run.transfer = recalled_transfer(run)
    take_in_targets(run)
    settle_configs(run)
    finalists = run.store.units()[key].value if run.store.done(key := decision_key(FINALISTS, run.trials)) else []
    return sum_up(run, tried_targets(run, finalists), _undecided(run, dropped, finalists))


def _problem(asked: dict[str, Any]) -> Problem:
    """What was tuned, as far as `run.json` tells."""
    # `lr_rule` may be a function, and no result calls it.
    rasda = RASDAConfig(**{**asked["rasda"], "lr_rule": "auto"})
    names = {field.name for field in fields(TuneConfig)}
    known = {name: value for name, value in asked.items() if name in names} | {"rasda": rasda}
    nothing: Any = None
    return Problem(
        model_fn=Gone("model_fn"),
        objective=Gone("objective"),
        train_data=nothing,
        val_data=nothing,
        settings=TuneConfig(**known),
        device=torch.device("cpu"),
        copied=True,  # not known; a model function that returns what it keeps would give each trial the same module
    )


def _take_in_sweep(run: Run) -> set[int]:
    """Take in the trials and what was trained of them in the sweep; returns those that it dropped."""
    dropped: set[int] = set()
    for key, unit in run.store.units().items():
        if not key.startswith("surrogate/"):
            continue
        run.recall(key)
        configured = [line for line in unit.lines if line["event"] == "trial"]
        run.trials |= {line["trial"]: Trial(line["trial"], line["config"]) for line in configured}
        if _SWEEP_DECISION.fullmatch(key):
            before = dict(run.trials)
            for number, *plain in unit.value:
                move = move_of(plain)
                dropped = dropped | {number} if isinstance(move, Drop) else dropped - {number}
                if isinstance(move, GoOn) and move.copy_of is not None:
                    run.trials[number] = Trial(number, {**before[move.copy_of].config, **move.changes})
    return dropped


def _undecided(run: Run, dropped: Collection[int], finalists: Collection[int]) -> set[int] | None:
    """Trials that may train on; None where the run is over."""
    if run_ended(run):
        return None
    decided = decided_targets(run)
    begun = {number for stage, number in run.metrics if stage == "target"}
    swept = set(finalists) or run.trials.keys() - dropped
    return {number for number in begun if decided.get(number, True)} | (swept - begun)
