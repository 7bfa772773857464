from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hydro_rasda import LocalBackend, TuneResult
from hydro_rasda.contracts import Devices, Span, full_size_task
from hydro_rasda.run.state import Run
from hydro_rasda.testing.tiny_runs import is_running, opened, targets
from tests.hydro_rasda.models import mlp

Quick = Callable[..., TuneResult]


class Counted:
    """A backend of one's own, which has the local one do the work."""

    device = torch.device("cpu")
    scheduler = "rasda"

    def __init__(self) -> None:
        self.told: list[str] = []

    @contextmanager
    def open(self, run: Run) -> Iterator[Devices]:
        self.told.append("opened")
        try:
            with LocalBackend(["cpu"]).open(run) as devices:
                yield devices
        finally:
            self.told.append("closed")


def test_a_backend_is_a_name_or_an_object(quick: Quick) -> None:
    mine = Counted()
    named, given, own = (
        quick(name="named"),
        quick(name="given", backend=LocalBackend()),
        quick(name="own", backend=mine),
    )
    assert named.best_metric == given.best_metric == own.best_metric
    assert named.trials == given.trials == own.trials
    assert mine.told == ["opened", "closed"]


@pytest.mark.skipif(sys.platform != "linux", reason="processes that have computed are forked on Linux alone")
def test_full_size_models_that_still_train_end_with_the_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two beside each other, one is done when an error ends the run."""
    seen, begun = tmp_path / "processes", list[int]()
    seen.mkdir()
    configs: list[dict[str, Any]] = [{"lr": 0.1}, {"lr": 0.1, "waits_in": str(seen), "tuner": os.getpid()}]

    def fail() -> None:
        with opened(LocalBackend("cpu"), tmp_path / "run", configs) as (run, devices):
            for task in targets(run, 1):
                (device,) = devices.idle(task)
                devices.start(device, task)
            assert [finished.task.number for finished in devices.finished()] == [0]
            while not [*seen.iterdir()]:
                time.sleep(0.01)
            begun.extend(int(file.name.split("@")[0]) for file in seen.iterdir())
            raise ArithmeticError

    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.raises(ArithmeticError) as kept:
        fail()
    assert kept.traceback, "the devices are not freed with their frames"
    assert not any(map(is_running, begun))


def test_two_tasks_of_one_trial_are_both_finished(one_process: None, tmp_path: Path) -> None:
    """The check of the transfer trains the best trial from two seeds, beside other trials."""
    tasks = [full_size_task(f"{i}", number, Span(0, 1), None, i) for i, number in enumerate((0, 1, 0))]
    done = list[str]()
    with opened(LocalBackend("cpu"), tmp_path / "run", [{"lr": 0.1}, {"lr": 0.2}]) as (_, devices):
        for task in tasks:
            devices.start(0, task)
        while devices.busy():
            done += [finished.task.key for finished in devices.finished()]
    assert done == ["0", "1", "2"]


def test_a_backend_is_closed_where_training_fails(one_process: None, quick: Quick) -> None:
    mine = Counted()

    def model_fn(config: dict[str, Any], width_ratio: float = 1.0) -> torch.nn.Module:
        if mine.told:
            raise KeyboardInterrupt
        return mlp(config, width_ratio)

    with pytest.raises(KeyboardInterrupt):
        quick(backend=mine, model_fn=model_fn)
    assert mine.told == ["opened", "closed"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"backend": Counted}, "`backend` is <class .*Counted'>, but must be .*an object"),
        ({"backend": 3}, "`backend` is 3, but must be one of"),
    ],
)
def test_what_belongs_to_no_backend_object(quick: Quick, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        quick(**arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="'cuda' is there")
@pytest.mark.parametrize("device", [0, 3.5, True, "gpu", "cpu:x", "cpu:1", "cuda:99", "mps", "meta", "xla"])
def test_what_is_no_device_is_refused(device: Any) -> None:
    with pytest.raises(ValueError, match=f"`device` is {device!r}, but must be the name of a device that is there"):
        LocalBackend([device])


def test_a_local_backend_has_a_device() -> None:
    with pytest.raises(ValueError, match=r"`device` is \[\], but must be None, or one device or more"):
        LocalBackend([])
