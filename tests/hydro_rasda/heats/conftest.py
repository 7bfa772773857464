"""Runs that are opened once more, as the next process would open them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hydro_rasda.problem.problem import Problem
from hydro_rasda.run.state import Run
from tests.hydro_rasda.scripted import open_run

Opens = Callable[..., Run]


@pytest.fixture
def opens(problem: Problem, tmp_path: Path) -> Iterator[Opens]:
    """Opens a run of some trials; the run that was opened before is closed first."""
    opened: list[Run] = []

    def call(number: int, of: Problem = problem, name: str = "run", **settings: Any) -> Run:
        for run in opened:
            run.store.close()
        opened.append(open_run(tmp_path / name, of, number, **settings))
        return opened[-1]

    yield call
    for run in opened:
        run.store.close()
