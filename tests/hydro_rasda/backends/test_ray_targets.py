"""The full-size stage on a real Ray of 8 logical CPUs, with a model that trains in milliseconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hydro_rasda import loguniform
from hydro_rasda.backends.ray_targets import FullSize
from hydro_rasda.problem import Problem, Trial
from hydro_rasda.run import Run
from tests.hydro_rasda.backends import feeding

SPACE = {"lr": loguniform(1e-3, 1.0)}
LRS = [0.5 / 2**i for i in range(8)]

Open = Callable[..., Run]


@pytest.fixture
def open_run(problem: Problem, tmp_path: Path) -> Iterator[Open]:
    """Opens a run of linear models in one folder; closed at the end."""
    opened: list[Run] = []

    def call(configs: list[dict[str, Any]], **settings: Any) -> Run:
        run = feeding.open_run(tmp_path / "run", feeding.of_linear(problem), configs, **settings)
        opened.append(run)
        return run

    yield call
    for run in opened:
        run.store.close()


def stage(run: Run, scheduler: Any = "rasda") -> FullSize:
    return FullSize(run, {"CPU": 1}, scheduler, space=SPACE, train=feeding.train)


def epochs(run: Run) -> dict[int, list[int]]:
    return {number: [line["epoch"] for line in lines] for (_, number), lines in run.metrics.items()}


def trained(run: Run, number: int) -> torch.nn.Module:
    """The model of a trial's last checkpoint."""
    model = run.problem.target(Trial(number, run.trials[number].config))
    model.load_state_dict(run.store.load(run.checkpoints[number])["model"])
    return model


def wait_for(what: Callable[[], bool], stage: FullSize) -> None:
    until = time.monotonic() + 90
    while not what():
        assert time.monotonic() < until
        stage.poll()
        time.sleep(0.05)


@pytest.mark.slow
def test_late_offers_get_their_turn(ray8: None, open_run: Open) -> None:
    run = open_run([{"lr": lr} for lr in LRS[::-1]], max_t=4)
    full = stage(run)
    full.offer([0, 1])
    wait_for(lambda: len(run.checkpoints) == 2, full)
    full.offer([7, 1, 6])
    full.finish()
    assert set(epochs(run)) == {0, 1, 6, 7}
    assert all(seen == list(range(1, len(seen) + 1)) for seen in epochs(run).values())
    assert epochs(run)[7] == [1, 2, 3, 4]
    assert [line["workers"] for line in run.metrics["target", 7]] == [1, 2, 4, 4]
    x, y = next(run.problem.val_data.in_order(160))
    loss = torch.nn.functional.cross_entropy(trained(run, 7)(x), y).item()
    assert loss == pytest.approx(run.score("target", 7), abs=1e-6)
