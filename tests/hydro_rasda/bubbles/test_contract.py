"""In bubbles, too, the contract of backends is kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hydro_rasda import LocalBackend, RaceConfig, SweepConfig, TuneResult, Worker, loguniform, tune
from hydro_rasda.bubbles import BubbleBackend
from hydro_rasda.testing import Check, backend_checks
from hydro_rasda.testing.backends import check_results
from tests.hydro_rasda.bubbles.conftest import waiting_hosts


@pytest.mark.slow
@pytest.mark.parametrize("check", backend_checks(), ids=lambda check: check.__name__)
def test_bubbles_keep_the_contract(check: Check, one_process: None, two_hosts: Path, tmp_path: Path) -> None:
    check(lambda: BubbleBackend(two_hosts), tmp_path / "run")


@pytest.mark.slow
def test_guests_that_nobody_stops_come_to_the_same_by_quanta(one_process: None, tmp_path: Path) -> None:
    with waiting_hosts(tmp_path / "bubbles", 1, preempt=False) as (guest,):
        check_results(lambda: BubbleBackend(tmp_path / "bubbles"), tmp_path / "run")
        assert 0 < guest.open <= guest.waited


def train(worker: Worker) -> None:
    model = worker.model()
    optimizer = worker.optimizer(model, torch.optim.SGD, lr=worker.config["rate"])
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer}
    for name, state in (worker.checkpoint or {}).items():
        parts[name].load_state_dict(state)
    while worker.iteration < worker.max_t:
        optimizer.zero_grad()
        loss = (model(torch.randn(16, 4)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        worker.report({"loss": loss.detach()}, {name: part.state_dict() for name, part in parts.items()})


def narrow_or_wide(config: Mapping[str, Any], width_ratio: float = 1.0) -> nn.Module:
    width = int(32 * width_ratio)
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))


def own_loop(folder: Path, backend: Any) -> TuneResult:
    space = {"rate": loguniform(1e-4, 1.0)}
    asked: dict[str, Any] = {"metric": "loss", "num_samples": 8, "max_t": 4, "progress": False}
    # Several trials go on to the second milestone.
    asked |= {"sweep": SweepConfig(reduction_factor=2), "race": RaceConfig(top_k=1)}
    return tune(narrow_or_wide, space, train=train, storage_path=folder, backend=backend, **asked)


@pytest.mark.slow
def test_a_loop_of_the_users_own_trains_in_bubbles(one_process: None, two_hosts: Path, tmp_path: Path) -> None:
    here = own_loop(tmp_path / "here", LocalBackend("cpu"))
    there = own_loop(tmp_path / "there", BubbleBackend(two_hosts))
    assert there.best_config == here.best_config
    assert [record.history for record in there.trials] == [record.history for record in here.trials]


@pytest.mark.slow
def test_guests_that_nobody_stops_refuse_it(one_process: None, tmp_path: Path) -> None:
    with (
        waiting_hosts(tmp_path / "bubbles", 1, preempt=False),
        pytest.raises(RuntimeError, match="`train` cannot train in bubbles with `preempt=False`, as on GPUs"),
    ):
        own_loop(tmp_path / "run", BubbleBackend(tmp_path / "bubbles"))
