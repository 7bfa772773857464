"""What trains on one device of a cluster at the same time, and what it has of what it shares with others."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray import tune
from torch import Tensor, nn

from hydro_rasda import RayBackend, TuneResult
from hydro_rasda.backends.ray.bulletin import Bulletin
from hydro_rasda.backends.ray.devices import _Actor, share_on
from hydro_rasda.contracts import Event
from hydro_rasda.objective import supervised
from hydro_rasda.run.events import EpochsTrained
from hydro_rasda.training.device import Share
from tests.hydro_rasda.conftest import SPACE
from tests.hydro_rasda.models import Config

Quick = Callable[..., TuneResult]


def of_depth(config: Config, width_ratio: float = 1.0) -> nn.Module:
    """An MLP of 32 units at full width; those of different depths cannot be fused."""
    width = int(32 * width_ratio)
    layers = [part for _ in range(config["depth"]) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), *layers, nn.Linear(width, 10))


def met(folder: Path, stage: str, device: int | str = "*") -> int:
    return len(list(folder.glob(f"{stage}-{device}-*")))


def meeting(folder: Path) -> Callable[..., Mapping[str, Tensor]]:
    """An objective of which two processes of one device wait for each other: one by itself fails its trial."""

    def objective(model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        device = psutil.Process(os.getppid())
        if device.cmdline()[0].startswith("ray::"):
            first: Any = model
            stage = "target" if first[0].out_features == 32 else "surrogate"
            (folder / f"{stage}-{device.pid}-{os.getpid()}").touch()
            until = time.monotonic() + 1000
            while met(folder, stage, device.pid) < 2:
                assert time.monotonic() < until, "it trains alone"
                time.sleep(0.01)
        return supervised()(model, batch)

    return objective


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_what_cannot_be_fused_trains_beside_each_other_on_each_device(
    ray8: None, quick: Quick, tmp_path: Path, devices: int
) -> None:
    """On a cluster of one device, full-size trials too."""
    (folder := tmp_path / "met").mkdir()
    space = {"depth": tune.grid_search([1, 2, 3, 4]), "lr": SPACE["lr"], "batch_size": 64}
    result = quick(
        model_fn=of_depth,
        objective=meeting(folder),
        space=space,
        num_samples=1,
        max_t=2,
        backend=RayBackend(resources_per_worker={"CPU": 8 // devices}),
    )
    assert [record.error for record in result.trials if record.error] == []
    assert len({path.name.split("-")[1] for path in folder.glob("surrogate-*")}) == devices
    assert met(folder, "surrogate") >= 4
    assert met(folder, "target") >= 2 if devices == 1 else met(folder, "target") == 0


@pytest.mark.slow
def test_devices_of_a_node_share_its_memory(ray8: None, problem: Any) -> None:
    known, bulletin = ray.put(problem), Bulletin()
    for cpus, memory in ((4, None), (4, 3e8), (8, 3e8)):
        device = _Actor({"CPU": cpus} | ({"memory": memory} if memory else {}), known, bulletin.board, 0)
        share, free = ray.get(device._actor.__ray_call__.remote(lambda of: (of._device._share, of._device.free)))
        device.end()
        assert share == Share(8 // cpus, memory and memory * 8 // cpus)
        assert free == memory or memory is None
    bulletin.close()


class Warns:
    """An objective that warns in any process but the tuner's."""

    def __init__(self) -> None:
        self.tuner = os.getpid()

    def __call__(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        if os.getpid() != self.tuner:
            warnings.warn("the user's own", RuntimeWarning, stacklevel=1)
        return supervised()(model, batch)


@pytest.mark.slow
def test_epochs_and_warnings_are_told_while_a_device_trains(ray8: None, quick: Quick) -> None:
    events: list[Event] = []
    with pytest.warns(RuntimeWarning, match="the user's own"):
        result = quick(
            objective=Warns(), backend=RayBackend(resources_per_worker={"CPU": 4}), callbacks=[events.append]
        )
    told = sum(event.epochs for event in events if isinstance(event, EpochsTrained))
    assert 0 < told <= result.cost.surrogate_epochs + result.cost.target_epochs


def test_workers_of_a_gpu_share_its_memory() -> None:
    node = {"CPU": 16.0, "GPU": 4.0}
    for gpus, processes in ((1, 1), (2, 1), (0.5, 2), (0.1 + 0.2, 3), (0.6, 1)):
        assert share_on(node, {"CPU": 1, "GPU": gpus, "memory": 0}) == Share(processes)
    assert share_on({"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 0.5}) == Share(1)
