"""Whole searches, jobs and ranks on a GPU: what no test on a CPU can show."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fusion import fuse, fused_optimizer, plan_fusion
from fusion.evaluate.backoff import back_off
from fusion.graph import GraphWarning
from fusion.width.memory import available_memory, peak_memory
from hydro_rasda import LocalBackend, RaceConfig, RayBackend, TuneResult, load
from hydro_rasda.bubbles import BubbleBackend
from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import Span, full_size_task
from hydro_rasda.data import ALONE
from hydro_rasda.packing import Task, nvml, pack
from hydro_rasda.packing.mps import CONTROL
from hydro_rasda.problem.problem import Problem
from hydro_rasda.testing import Check, backend_checks
from hydro_rasda.training.full_size import RankPlace, train_target_on_ranks
from tests.hydro_rasda.backends.test_gpu_sharing import noting
from tests.hydro_rasda.bubbles.conftest import waiting_hosts
from tests.hydro_rasda.models import mlp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and `make test-gpu`"),
]

Quick = Callable[..., TuneResult]
GPU = torch.device("cuda", 0)
MIB = 2**20


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def test_memory_is_what_tensors_take() -> None:
    torch.empty(1, device=GPU)
    before = available_memory(GPU)
    with peak_memory(GPU) as peak:
        kept = torch.empty(64 * MIB, dtype=torch.uint8, device=GPU)
        torch.empty(256 * MIB, dtype=torch.uint8, device=GPU)
    after = available_memory(GPU)
    assert kept.nbytes == 64 * MIB
    assert 320 * MIB <= peak.bytes < 400 * MIB
    assert before is not None
    assert after is not None
    assert before - after >= 60 * MIB


def test_what_does_not_fit_the_gpu_is_halved_until_it_does() -> None:
    _, total = torch.cuda.mem_get_info(GPU)
    held = torch.cuda.memory_allocated(GPU)
    room = int(0.02 * total)

    def hold(numbers: list[int]) -> int:
        return torch.empty(len(numbers) * room // 3, dtype=torch.uint8, device=GPU).nbytes

    torch.cuda.set_per_process_memory_fraction(0.02, GPU)
    try:
        parts = back_off(hold, [0, 1, 2, 3], lambda n: len(n) > 1, lambda n: [n[: len(n) // 2], n[len(n) // 2 :]])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, GPU)
    assert parts == [2 * room // 3] * 2
    assert torch.cuda.memory_allocated(GPU) == held


@pytest.mark.parametrize("graph", [False, True])
def test_the_width_of_a_group_is_what_memory_allows(graph: bool) -> None:
    """The forecast of the widest group holds: it trains within it."""
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)).to(GPU) for _ in range(64)]
    configs = [{"optimizer": "adamw", "lr": 1e-3}] * 64
    batch = torch.randn(4096, 64, device=GPU), torch.randint(10, (4096,), device=GPU)
    memory = 1000 * MIB
    with warnings.catch_warnings():
        warnings.simplefilter("error", GraphWarning)
        plan = plan_fusion(modules, configs, loss, batch, memory=memory, seconds=0.3, graph=graph)
    assert plan.obstacle == ""
    assert 8 <= plan.width < 64
    with peak_memory(GPU) as peak:
        fused = fuse(modules[: plan.width])
        update = fused_optimizer(fused, configs[: plan.width])
        for _ in range(3):
            update.zero_grad()
            fused.map(loss, batch).sum().backward()
            update.step()
    assert peak.bytes <= memory


def test_a_fused_model_moves_with_its_optimizer() -> None:
    ends = []
    for moves in (False, True):
        torch.manual_seed(0)
        fused = fuse([nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 3)) for _ in range(2)])
        update = fused_optimizer(fused, [{"optimizer": "adamw", "lr": 0.1}] * 2)
        for step in range(4):
            if moves and step == 2:
                fused.to(GPU)
            device = next(fused.parameters()).device
            update.zero_grad()
            fused.map(loss, (torch.ones(5, 8, device=device), torch.arange(5, device=device) % 3)).sum().backward()
            update.step()
        ends.append({name: p.detach().cpu() for name, p in fused.stacked.items()})
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-3, atol=1e-4)


def test_a_search_trains_on_the_gpu_by_recorded_steps(quick: Quick) -> None:
    """And chooses as it does without them, and as it does on the CPU."""
    placed: set[str] = set()

    def objective(model: nn.Module, batch: Any) -> Any:
        placed.add(batch[0].device.type)
        return {"loss": loss(model, batch)}

    own = {"objective": objective, "metric": "val_loss", "mode": "min"}
    found = [quick(name=name, backend=LocalBackend(graph=graph), **own) for name, graph in (("a", True), ("b", False))]
    assert placed == {"cuda"}
    cpu = quick(name="c", backend=LocalBackend("cpu"), **own)
    assert found[0].best_config == found[1].best_config == cpu.best_config
    assert found[0].best_metric == pytest.approx(found[1].best_metric, rel=1e-3)
    assert found[0].best_metric == pytest.approx(cpu.best_metric, rel=2e-2)
    model = load(found[0].path).best_model(model_fn=mlp)
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_a_result_is_opened_where_there_is_no_gpu(quick: Quick) -> None:
    packed = pickle.dumps(quick(max_t=1))
    opens = "import pickle, sys; print(pickle.load(sys.stdin.buffer).best_model())"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", opens], input=packed, env=environment, check=True)


def test_examples_may_lie_on_the_gpu(quick: Quick, digits: tuple[Any, Any]) -> None:
    """Processes that load ahead could not use them."""
    train, val = (TensorDataset(*(t.cuda() for t in pair)) for pair in digits)
    assert quick(train_data=train, val_data=val, max_t=1).best_metric < 2.5


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
def test_a_search_in_each_precision(quick: Quick, precision: str) -> None:
    result = quick(precision=precision, metric="val_accuracy", mode="max")
    assert result.best_metric > 0.8


@pytest.mark.parametrize("race", [RaceConfig(top_k=2), RaceConfig(top_k=2, max_workers=2)], ids=["alone", "together"])
def test_two_processes_share_a_gpu(quick: Quick, race: RaceConfig, tmp_path: Path) -> None:
    """Through NVIDIA's service, where its daemon is installed."""
    result = quick(objective=noting(tmp_path / "pipes"), backend=LocalBackend(["cuda:0", "cuda:0"]), race=race)
    assert result.best_metric < 2.0
    pipes = {*(tmp_path / "pipes").read_text().split()}
    assert len(pipes) == 1
    assert (pipes == {"none"}) == (shutil.which(CONTROL) is None)


@pytest.mark.parametrize("check", backend_checks(), ids=lambda check: check.__name__)
def test_a_gpu_keeps_the_contract(check: Check, tmp_path: Path) -> None:
    check(lambda: LocalBackend("cuda:0"), tmp_path / "run")


def test_a_guest_trains_in_the_bubbles_of_a_gpu(quick: Quick, tmp_path: Path) -> None:
    with waiting_hosts(tmp_path / "bubbles", 1, preempt=False, device="cuda:0") as (guest,):
        result = quick(backend=BubbleBackend(tmp_path / "bubbles"))
        assert 0 < guest.open <= guest.waited
    assert result.best_metric < 2.0


def test_a_rank_trains_through_nccl(problem: Problem) -> None:
    trial = Trial(0, {"optimizer": "adamw", "lr": 0.01, "batch_size": 48})
    place, task = RankPlace(ALONE, 1.0, "nccl"), full_size_task("key", 0, Span(0, 2), None, 0)
    histories = []
    for own in (problem.on(GPU), problem):
        through = place if own.device.type == "cuda" else RankPlace(ALONE, 1.0, "gloo")
        outcome = train_target_on_ranks(own, trial, task, None, through, lambda: None, lambda: False, lambda *_: None)
        assert outcome.error is None, outcome.error
        histories.append([metrics["val_loss"] for _, metrics in outcome.epochs])
    assert histories[0] == pytest.approx(histories[1], rel=1e-3)


JOB = """
import time, torch
held = torch.ones(512, 2**18, device="cuda")
until = time.time() + {seconds}
a = torch.randn(2048, 2048, device="cuda")
while time.time() < until:
    (a @ a).sum().item()
print(held.sum().item())
"""


def test_jobs_of_a_gpu_are_measured_and_packed(tmp_path: Path) -> None:
    result = pack([Task([sys.executable, "-c", JOB.format(seconds=8)])] * 3, storage_path=tmp_path, verbose=False)
    assert not result.failed
    assert {job.device for job in result.jobs} == {"gpu-0"}
    assert all(job.memory > 512 * MIB for job in result.jobs)


def test_the_driver_tells_what_a_process_holds() -> None:
    (gpu,) = nvml.gpus()
    block = torch.ones(256 * MIB, dtype=torch.uint8, device=GPU)
    until = time.monotonic() + 5
    while time.monotonic() < until and nvml.share_of(gpu.uuid, [os.getpid()]) is None:
        torch.mm(torch.ones(4096, 4096, device=GPU), torch.ones(4096, 4096, device=GPU))
    held = nvml.memory_of(gpu.uuid, [os.getpid()])  # None in a container, where `pack` goes by what all hold
    assert (nvml.used_memory(gpu.uuid) if held is None else held) > block.nbytes
    assert nvml.share_of(gpu.uuid, [os.getpid()]) is not None


@pytest.mark.parametrize("part", [0.5, 1])
def test_a_search_on_a_cluster_with_a_gpu(quick: Quick, part: float) -> None:
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        result = quick(backend=RayBackend(resources_per_worker={"CPU": 1, "GPU": part}))
    finally:
        ray.shutdown()
    assert result.best_metric < 2.0
