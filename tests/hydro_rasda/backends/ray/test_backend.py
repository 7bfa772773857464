"""What trains on one device of a cluster at the same time, and what it has of what it shares with others."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
import torch
from ray import tune
from torch import Tensor, nn

from hydro_rasda import AllTrialsFailed, RaceConfig, RayBackend, SweepConfig, TuneResult, Worker, load
from hydro_rasda import tune as tune_search
from hydro_rasda.backends.pool import DeviceDied
from hydro_rasda.backends.ray.actor_messages import Bulletin
from hydro_rasda.backends.ray.backend import RayDevices, _Actor, _ActorAnswer, _start_ray, share_on, worker_resources
from hydro_rasda.contracts import Event
from hydro_rasda.problem.objective import supervised
from hydro_rasda.run.events import EpochsTrained
from hydro_rasda.training.device import DeviceShare
from tests.hydro_rasda.conftest import SPACE
from tests.hydro_rasda.models import Config, mlp
from tests.hydro_rasda.training import test_user_loop_sweeps
from tests.hydro_rasda.training.test_user_loop import at_full_size, train

Quick = Callable[..., TuneResult]


def on_devices(count: int) -> dict[str, Any]:
    """Arguments of `tune`: the 8 CPUs of the tests' Ray as so many devices."""
    return {"backend": RayBackend(resources_per_worker={"CPU": 8 // count})}


def journal(path: Path) -> list[dict[str, Any]]:
    file = path / "journal.jsonl"
    raw = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in raw if line.endswith(b"\n")]


def units(path: Path) -> list[str]:
    return [line["key"] for line in journal(path) if line["event"] == "unit"]


@pytest.mark.slow
def test_one_device_gives_the_answer_of_the_local_backend(quick: Quick) -> None:
    """On a Ray that the call starts and stops itself."""
    assert not ray.is_initialized()
    local, there = quick(name="local"), quick(name="ray", backend="ray")
    assert not ray.is_initialized()
    assert there.best_config == local.best_config
    assert there.best_metric == local.best_metric
    assert [dataclasses.astuple(a)[1:] for a in there.trials] == [dataclasses.astuple(a)[1:] for a in local.trials]
    x = torch.rand(8, 64)
    assert torch.equal(there.best_model()(x), local.best_model()(x))


def test_no_cluster_at_the_address(quick: Quick) -> None:
    with pytest.raises(ConnectionError, match=r"`address` is '127\.0\.0\.1:1', but no Ray cluster answers there"):
        quick(backend=RayBackend(address="127.0.0.1:1"))
    assert not ray.is_initialized()


def test_an_address_of_ray_client_is_refused() -> None:
    told = r"`address` is 'ray://head:10001', but must be the address of a head, .*: Ray Client is not supported"
    with pytest.raises(ValueError, match=told):
        RayBackend("ray://head:10001")


def test_an_address_of_ipv6_is_asked_without_its_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def refuse(address: tuple[str, int], timeout: float) -> None:
        asked.append(address)
        raise OSError("refused")

    monkeypatch.setattr("socket.create_connection", refuse)
    with pytest.raises(
        ConnectionError, match=r"`address` is '\[::1\]:6379', but no Ray cluster answers there: refused"
    ):
        _start_ray("[::1]:6379")
    assert asked == [("::1", 6379)]


def test_a_process_that_ray_ends_to_free_memory_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's, and the one that passes messages on."""

    def get(future: object) -> None:
        raise ray.exceptions.OutOfMemoryError("memory is full")

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(DeviceDied, match="memory is full"):
        _ActorAnswer("an answer").result()
    bulletin: Any = SimpleNamespace(coming="old", board=SimpleNamespace(read=SimpleNamespace(remote=lambda: "new")))
    assert (Bulletin.read(bulletin), bulletin.coming) == ([], "new")


def test_devices_that_never_came_do_not_count() -> None:
    slots = SimpleNamespace(count=lambda: 4)
    pool: Any = SimpleNamespace(_devices=dict.fromkeys(range(4)), _count=4, _late={1, 2}, _slots=slots)
    assert RayDevices._capacity(pool) == 2
    pool._late.clear()
    assert RayDevices._capacity(pool) == 4


@pytest.mark.slow
def test_a_local_run_goes_on_with_more_time_and_more_samples(quick: Quick) -> None:
    """A cluster is a backend like another: it takes over where the run stands, and so does this machine after it."""
    settings = {
        "space": SPACE | {"batch_size": 32},
        "max_t": 2,
        "race": RaceConfig(top_k=1),
        "sweep": SweepConfig(fusion=1),
    }
    hasty = quick(time_budget_s=1e-3, num_samples=3, **settings)
    there = quick(num_samples=3, backend="ray", **settings)
    assert [record.sweep_epochs > 0 for record in there.trials] == [True] * 3
    assert [line for a, b in zip(hasty.trials, there.trials) for line in a.history if line not in b.history] == []
    grown = quick(num_samples=5, backend="ray", **settings)
    whole = quick(num_samples=5, name="whole", **settings)
    assert (grown.best_config, grown.best_metric) == (whole.best_config, whole.best_metric)
    again = quick(num_samples=5, **settings)
    assert (again.best_metric, again.cost.race_epochs) == (grown.best_metric, grown.cost.race_epochs)
    assert not ray.is_initialized()


@pytest.mark.slow
def test_the_front_of_several_metrics_is_that_of_the_local_backend(ray8: None, quick: Quick) -> None:
    sweep = SweepConfig(constraints={"params": (None, 1e5)})
    asked: dict[str, Any] = {"metric": ["val_loss", "macs"], "race": {"top_k": 3}, "sweep": sweep}
    local, there = quick(**asked, name="local"), quick(**asked, **on_devices(1))
    assert [trial.trial for trial in there.pareto] == [trial.trial for trial in local.pareto]
    assert [(a.status, a.costs) for a in there.trials] == [(a.status, a.costs) for a in local.trials]


@pytest.mark.slow
def test_a_function_of_the_users_trains_in_every_heat_as_on_this_machine(tmp_path: Path) -> None:
    asked = test_user_loop_sweeps.ASKED | {"train": test_user_loop_sweeps.train, "storage_path": tmp_path}
    local, there = (tune_search(**asked | {"name": backend, "backend": backend}) for backend in ("local", "ray"))
    assert there.best_config == local.best_config
    assert there.best_metric == local.best_metric
    assert [dataclasses.astuple(a)[1:] for a in there.trials] == [dataclasses.astuple(a)[1:] for a in local.trials]


@pytest.mark.slow
def test_a_function_of_the_users_trains_the_finalists(ray8: None, quick: Quick, digits: Any) -> None:
    """On workers that double, and whose gradients are averaged."""
    result = quick(**at_full_size(train), **on_devices(2))
    assert result.finished
    assert result.evaluate(digits[1])["loss"] == pytest.approx(result.best_metric, rel=1e-5)
    lines = [line for record in result.trials for line in record.history if line["heat"] == "race"]
    assert {line["workers"] for line in lines} == {1, 2}


@pytest.mark.slow
def test_finalists_that_failed_are_tried_again_with_mended_code(ray8: None, quick: Quick) -> None:
    def broken(worker: Worker) -> None:
        raise NameError("name 'optimiser' is not defined")

    with pytest.raises(AllTrialsFailed, match="name 'optimiser' is not defined"):
        quick(**at_full_size(broken), **on_devices(2))
    result = quick(**at_full_size(train), resume="changed", **on_devices(2))
    assert result.finished
    assert len([record for record in result.trials if record.epochs]) >= 2
    assert result.best_metric < 2.3


@pytest.mark.slow
def test_a_score_that_is_good_enough_ends_the_full_size_stage(ray8: None, quick: Quick) -> None:
    settings: dict[str, Any] = {"max_t": 8, "race": RaceConfig(grace_period=2)}
    result = quick(stop_at=2.3, **settings, **on_devices(2))
    assert result.finished
    assert load(result.path).finished
    assert result.best_metric <= 2.3
    assert max(record.epochs for record in result.trials) < 8
    assert quick(**settings, **on_devices(2)).finished


@pytest.mark.slow
def test_several_devices_end_in_workers_that_double(ray8: None, quick: Quick) -> None:
    settings: dict[str, Any] = {
        "num_samples": 24,
        "max_t": 9,
        "sweep": {"reduction_factor": 3},
        "race": RaceConfig(keep="last", grace_period=3),
    }
    result = quick(**on_devices(4), **settings)
    assert result.cost.sweep_epochs >= 24 + 2 * 8
    best = min((record for record in result.trials if record.status == "finished"), key=lambda record: record.metric)
    full = [line for line in best.history if line["heat"] == "race"]
    assert [line["epoch"] for line in full] == list(range(1, 10))
    workers = [line["workers"] for line in full]
    assert workers == [1, 1, 1, 2, 2, 2, 4, 4, 4]
    assert [line["global_batch_size"] for line in full] == [w * best.config["batch_size"] for w in workers]
    assert result.best_metric == best.metric
    assert isinstance(result.best_model(), nn.Module)
    again = quick(**on_devices(4), **settings)
    assert again.best_metric == result.best_metric
    assert again.cost.race_epochs == result.cost.race_epochs


@pytest.mark.slow
def test_a_finished_runs_winner_whose_weights_are_gone_or_damaged_trains_again(
    ray8: None, quick: Quick, tmp_path: Path
) -> None:
    """The others stay as they are, and stopped; on as many workers as before, it comes to the same."""
    settings: dict[str, Any] = {
        "num_samples": 6,
        "max_t": 4,
        "sweep": SweepConfig(fusion=1),
        "race": RaceConfig(max_workers=1),
    }
    whole = quick(**on_devices(2), **settings)
    weights = whole.best_model().state_dict()
    for gone in (True, False):
        (checkpoint,) = (tmp_path / "run" / "checkpoints").glob(f"race.trial-{whole.best_trial}.*")
        checkpoint.unlink() if gone else checkpoint.write_bytes(b"?" * 1000)
        again = quick(**on_devices(2), **settings)
        assert (again.best_trial, again.best_metric, again.finished) == (whole.best_trial, whole.best_metric, True)
        assert [trial.epochs for trial in again.trials] == [trial.epochs for trial in whole.trials]
        for name, value in again.best_model().state_dict().items():
            assert torch.equal(value, weights[name])


class _Deadly:
    """The small MLP's objective, which ends its process where a marker is missing, or whenever it meets a trial."""

    def __init__(self, marker: Path | None) -> None:
        self.marker, self.objective = marker, supervised()

    def __call__(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        if self.marker is not None and ray.is_initialized() and not _is_driver() and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.objective(model, batch)


@pytest.mark.slow
def test_finalists_go_on_from_a_sweep_at_full_width(ray8: None, quick: Quick) -> None:
    result = quick(**on_devices(2), race=RaceConfig(keep="last", grace_period=4), sweep=SweepConfig(surrogate=1))
    finalists = [record for record in result.trials if record.epochs]
    assert [record.epochs for record in finalists] == [4, 4]
    for record in finalists:
        told = [(line["heat"], line["epoch"]) for line in record.history]
        swept = record.sweep_epochs
        assert told == [("sweep" if t <= swept else "race", t) for t in range(1, 5)]
        assert swept > 0
    assert result.cost.race_epochs == sum(4 - record.sweep_epochs for record in finalists)


def _is_driver() -> bool:
    return bool(ray.get_runtime_context().worker.mode == 0)


@pytest.mark.slow
def test_a_device_whose_process_dies_gets_a_new_one(ray8: None, quick: Quick, tmp_path: Path) -> None:
    marker = tmp_path / "died once"
    result = quick(**on_devices(2), objective=_Deadly(marker), sweep=SweepConfig(fusion=3))
    assert marker.exists()
    assert [record.sweep_epochs > 0 for record in result.trials] == [True] * 9


class Deadly(nn.Module):
    """An MLP that ends the process that trains it, if that is not the first one."""

    def __init__(self, body: nn.Module, deadly: float, driver: int) -> None:
        super().__init__()
        self.body, self.deadly, self.driver = body, deadly, driver

    def forward(self, x: Tensor) -> Tensor:
        if self.deadly and os.getpid() != self.driver:
            os.kill(os.getpid(), signal.SIGKILL)
        y: Tensor = self.body(x)
        return y


@pytest.mark.slow
def test_a_trial_that_kills_its_process_fails_alone(ray8: None, quick: Quick) -> None:
    """Also where that leaves no device for a while."""
    driver = os.getpid()

    def model_fn(config: Config, width_ratio: float = 1.0) -> nn.Module:
        return Deadly(mlp(config, width_ratio), config["deadly"], driver)

    space = {"lr": SPACE["lr"], "deadly": ray.tune.grid_search([0.0, 1.0]), "batch_size": 64}
    result = quick(
        **on_devices(1),
        model_fn=model_fn,
        space=space,
        num_samples=2,
        race=RaceConfig(top_k=1),
        sweep=SweepConfig(fusion=1),
    )
    failed = {record.trial: record.error or "" for record in result.trials if record.status == "failed"}
    assert sorted(failed) == [record.trial for record in result.trials if record.config["deadly"]]
    assert all("died" in error for error in failed.values())


def _training(driver: int) -> list[psutil.Process]:
    """Processes of the devices that a driver has started; others of Ray's may live on for minutes."""
    found = []
    for process in psutil.Process(driver).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "".join(process.cmdline()).startswith("ray::_TrainerActor"):
                found.append(process)
    return found


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_killed_at_any_point_it_goes_on(tmp_path: Path) -> None:
    """In the sweep, and among the full-size trials; no epoch is recorded twice, and no process trains on."""
    command = [sys.executable, "-m", "tests.hydro_rasda.resumable", str(tmp_path), "run", "2"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    reached = []
    for point in ("sweep/to-1/from-0/group", "sweep/to-2/from-", "race/trial"):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ) as run:
            while not any(key.startswith(point) for key in units(tmp_path / "run")):
                assert run.poll() is None, run.stdout and run.stdout.read()
                time.sleep(0.01)
            training = _training(run.pid)
            assert training
            run.kill()
        until = time.monotonic() + 600
        while (left := [process for process in training if _lives(process)]) and time.monotonic() < until:
            time.sleep(0.1)
        assert not left
        reached.append(len(units(tmp_path / "run")))
    assert reached == sorted(reached)
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    assert re.search(r"^best [\d.]+$", done.stdout, re.MULTILINE)
    keys = units(tmp_path / "run")
    assert len(keys) == len(set(keys))
    epochs = [(e["heat"], e["trial"], e["epoch"]) for e in journal(tmp_path / "run") if e["event"] == "metrics"]
    assert len(epochs) == len(set(epochs))
    last = max(epoch for heat, _, epoch in epochs if heat == "race")
    assert last == 6


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            {"backend": RayBackend(resources_per_worker={"CPU": 1, "GPU": 1})},
            "`resources_per_worker` is .*'GPU': 1.*, but must be what one of",
        ),
        ({"backend": RayBackend(resources_per_worker={"CPU": 9})}, "`resources_per_worker` is .*9"),
        ({"race": RaceConfig(workers=3)}, "`race.workers` is 3, but must be <= 2"),
        (
            {"backend": RayBackend(address="auto")},
            "`address` is 'auto', but must be None: this process is connected to Ray already",
        ),
    ],
)
def test_what_the_cluster_does_not_have(ray2: None, quick: Quick, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        quick(**{"backend": RayBackend(resources_per_worker={"CPU": 1}), **arguments})


def test_a_device_is_what_was_asked_for_or_what_the_nodes_have() -> None:
    nodes = [{"CPU": 8.0}, {"CPU": 8.0}, {"CPU": 2.0}]
    assert worker_resources(nodes, None) == {"CPU": 8}
    assert worker_resources(nodes, {"CPU": 2}) == {"CPU": 2}
    assert worker_resources([*nodes, {"CPU": 8.0, "GPU": 4.0}], None) == {"CPU": 1, "GPU": 1}
    assert worker_resources([{"CPU": 8.0, "GPU": 1.0}], None) == {"CPU": 1, "GPU": 1}
    assert worker_resources([{"CPU": 0.0}, {"CPU": 4.0}], None) == {"CPU": 4}


def of_depth(config: Config, width_ratio: float = 1.0) -> nn.Module:
    """An MLP of 32 units at full width; those of different depths cannot be fused."""
    width = int(32 * width_ratio)
    layers = [part for _ in range(config["depth"]) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), *layers, nn.Linear(width, 10))


def met(folder: Path, heat: str, device: int | str = "*") -> int:
    return len(list(folder.glob(f"{heat}-{device}-*")))


def meeting(folder: Path) -> Callable[..., Mapping[str, Tensor]]:
    """An objective of which two processes of one device wait for each other: one by itself fails its trial."""

    def objective(model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        device = psutil.Process(os.getppid())
        if device.cmdline()[0].startswith("ray::"):
            first: Any = model
            heat = "race" if first[0].out_features == 32 else "sweep"
            (folder / f"{heat}-{device.pid}-{os.getpid()}").touch()
            until = time.monotonic() + 1000
            while met(folder, heat, device.pid) < 2:
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
    assert len({path.name.split("-")[1] for path in folder.glob("sweep-*")}) == devices
    assert met(folder, "sweep") >= 4
    assert met(folder, "race") >= 2 if devices == 1 else met(folder, "race") == 0


@pytest.mark.slow
def test_devices_of_a_node_share_its_memory(ray8: None, problem: Any) -> None:
    known, bulletin = ray.put(problem), Bulletin()
    for cpus, memory in ((4, None), (4, 3e8), (8, 3e8)):
        device = _Actor({"CPU": cpus} | ({"memory": memory} if memory else {}), known, bulletin.board, 0)
        share, free = ray.get(device._actor.__ray_call__.remote(lambda of: (of._device._share, of._device.free)))
        device.end()
        assert share == DeviceShare(8 // cpus, memory and memory * 8 // cpus)
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
    assert 0 < told <= result.cost.sweep_epochs + result.cost.race_epochs


def test_workers_of_a_gpu_share_its_memory() -> None:
    node = {"CPU": 16.0, "GPU": 4.0}
    for gpus, processes in ((1, 1), (2, 1), (0.5, 2), (0.1 + 0.2, 3), (0.6, 1)):
        assert share_on(node, {"CPU": 1, "GPU": gpus, "memory": 0}) == DeviceShare(processes)
    assert share_on({"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 0.5}) == DeviceShare(1)
