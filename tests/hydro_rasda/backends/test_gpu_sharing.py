"""Processes that share a GPU through a program of its daemon's name, files and commands; they train on the CPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from hydro_rasda import LocalBackend, RaceConfig, TuneResult
from hydro_rasda.backends import process_pool
from hydro_rasda.contracts import Span, full_size_task
from hydro_rasda.data import Shard
from hydro_rasda.packing import mps
from hydro_rasda.problem.objective import supervised
from hydro_rasda.problem.problem import Problem
from hydro_rasda.run.run_folder import Store
from hydro_rasda.run.state import Run
from tests.hydro_rasda.packing.test_mps import daemons, left, seen

__all__ = ["seen"]

Quick = Callable[..., TuneResult]
TWO = LocalBackend(["cpu", "cpu"])

pytestmark = pytest.mark.usefixtures("one_process")


def noting(file: Path) -> Callable[..., Mapping[str, Tensor]]:
    """An objective that notes through whose daemon its process computes."""
    here = os.getpid()

    def objective(model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        if os.getpid() != here:
            with file.open("a") as opened:
                opened.write(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "none") + "\n")
        return supervised()(model, batch)

    return objective


@pytest.mark.slow
def test_two_processes_of_a_gpu_share_its_daemon(
    quick: Quick, seen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_pool, "uuid_of", lambda where: "GPU-0")
    quick(objective=noting(tmp_path / "pipes"), backend=TWO, max_t=1, race=RaceConfig(top_k=1))
    (line,) = daemons(seen)
    assert line["gpu"] == "GPU-0"
    assert {*(tmp_path / "pipes").read_text().split()} == {line["pipe"]}
    assert not any(psutil.pid_exists(line[which]) for which in ("daemon", "server"))
    assert left(tmp_path) == []


@pytest.mark.slow  # that a CPU is no GPU is told below
def test_other_devices_need_none(quick: Quick, seen: Path, tmp_path: Path) -> None:
    quick(objective=noting(tmp_path / "pipes"), backend=TWO, max_t=1, race=RaceConfig(top_k=1))
    assert daemons(seen) == []
    assert {*(tmp_path / "pipes").read_text().split()} == {"none"}


def test_a_daemon_ends_with_a_tuner_that_is_killed(seen: Path) -> None:
    program = """
        import time
        import torch
        from hydro_rasda.backends import process_pool
        from hydro_rasda.packing.mps import Daemons
        process_pool.uuid_of = lambda where: "GPU-0"
        process_pool.environment_of_shared_gpu(Daemons("processes"), torch.device("cpu"))
        print("there", flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    tuner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert tuner.stdout is not None
    assert tuner.stdout.readline() == "there\n"
    tuner.send_signal(signal.SIGKILL)
    tuner.wait()
    tuner.stdout.close()
    (line,) = daemons(seen)
    while any(psutil.pid_exists(line[which]) for which in ("daemon", "server")):
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("devices", "seen_as"),
    [(["cuda:1"], ["cuda:1"]), (["cuda:1", "cuda:1"], ["cuda:0", "cuda:0"]), (["cpu", "cpu"], ["cpu", "cpu"])],
)
def test_only_processes_that_share_a_gpu_see_it_alone(
    devices: list[str], seen_as: list[str], problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of other devices need no daemon."""
    opened = list[Any]()
    alone = {"CUDA_VISIBLE_DEVICES": "GPU-0"}
    monkeypatch.setattr(process_pool, "_Process", lambda *arguments: opened.append(arguments[1:5]))
    monkeypatch.setattr(mps, "available", lambda: True)
    monkeypatch.setattr(mps.Daemons, "environment", lambda self, gpu: alone)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda where: SimpleNamespace(name="H100", uuid="0"))
    with closing(Store.open(tmp_path / "run", {}, "auto")) as store:
        pool = process_pool.LocalProcesses(Run(problem, store), [torch.device(name) for name in devices], 1e9)
        for device in range(len(devices)):
            pool._process(device)
    assert [str(where) for where, *_ in opened] == seen_as
    memory = None if "cuda:1" in devices else 1e9
    assert {(share.processes, share.memory) for _, _, share, _ in opened} == {(len(devices), memory)}
    assert [environment for *_, environment in opened] == [alone if name == "cuda:0" else {} for name in seen_as]


@pytest.mark.parametrize(
    ("devices", "through"),
    [
        (["cuda:0", "cuda:1"], "nccl"),
        (["cuda:1", "cuda:1"], "gloo"),
        (["cpu", "cpu"], "gloo"),
        (["cpu", "cuda:0"], "gloo"),
    ],
)
def test_ranks_communicate_by_nccl_only_if_each_has_its_own_gpu(
    devices: list[str], through: str, problem: Problem, tmp_path: Path
) -> None:
    with closing(Store.open(tmp_path / "run", {}, "auto")) as store:
        pool = process_pool.LocalProcesses(Run(problem, store), [torch.device(name) for name in devices])
        places = pool._places(full_size_task("key", 0, Span(0, 1), None, 0), 2)
    assert [(place.shard, place.through) for place in places] == [(Shard(rank, 2), through) for rank in range(2)]


@pytest.mark.parametrize(("name", "found"), [("NVIDIA H100", "GPU-7a"), ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None)])
def test_a_part_of_a_gpu_is_not_named_as_a_gpu(name: str, found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    told = SimpleNamespace(name=name, uuid="7a")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda where: told)
    assert process_pool.uuid_of(torch.device("cuda", 0)) == found
    assert process_pool.uuid_of(torch.device("cpu")) is None
