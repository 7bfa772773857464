"""Runs whose sweep is over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydro_rasda.problem import Problem
from hydro_rasda.run.run_folder import Store
from hydro_rasda.run.state import Run
from hydro_rasda.trial import Trial
from tests.hydro_rasda.scripted import run_of


def open_run(path: Path, problem: Problem, configs: list[dict[str, Any]], **settings: Any) -> Run:
    """A run of these finalists, as the next process would open it."""
    store = Store.open(path, {}, "auto")
    trials = {number: Trial(number, config) for number, config in enumerate(configs)}
    return run_of(problem.with_settings(**settings), store, trials)
