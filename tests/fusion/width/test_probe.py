import ast
import collections
import copy
import gc
import itertools
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusion import plan_fusion
from fusion.streams import global_states
from fusion.width import probe
from fusion.width.memory import Peak

linux = pytest.mark.skipif(sys.platform != "linux", reason="the resident set is read from /proc")


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def trials(count: int) -> tuple[list[nn.Module], list[dict[str, float]]]:
    torch.manual_seed(0)
    modules: list[nn.Module] = [
        nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
        for _ in range(count)
    ]
    return modules, [{"lr": 1e-3 * (k + 1)} for k in range(count)]


BATCH = torch.randn(32, 8), torch.randint(0, 3, (32,))


def test_small_models_are_fused_and_nothing_is_changed() -> None:
    modules, configs = trials(16)
    before, generator = copy.deepcopy([m.state_dict() for m in modules]), torch.get_rng_state()
    plan = plan_fusion(modules, configs, loss, BATCH, memory=2**33, seconds=0.2)
    assert plan.width > 1
    assert plan.throughput[plan.width] > plan.throughput[1]
    assert set(plan.throughput) <= {1, 2, 4, 8, 16}
    assert plan.micro_batches == 1
    torch.testing.assert_close([m.state_dict() for m in modules], before, rtol=0, atol=0)
    assert all(p.grad is None for m in modules for p in m.parameters())
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.filterwarnings("ignore::fusion.FusionWarning")
def test_generators_of_python_and_numpy_stay_as_they_are() -> None:
    modules, configs = trials(2)
    before = global_states()

    def noisy(model: nn.Module, batch: Any) -> Tensor:
        return loss(model, batch) * (random.random() + np.random.rand())

    assert "Python's or NumPy's" in plan_fusion(modules, configs, noisy, BATCH, seconds=0.05).obstacle
    assert global_states() == before


def test_the_widest_group_is_bounded() -> None:
    modules, configs = trials(8)
    assert max(plan_fusion(modules, configs, loss, BATCH, max_width=3, seconds=0.05).throughput) == 3
    assert plan_fusion(modules[:1], configs[:1], loss, BATCH, seconds=0.05).width == 1


@pytest.mark.parametrize(
    ("seconds_of_steps", "rounds"),
    [([1.0, 1.0], [5, 5, 5]), ([1.0, 0.1, 1.0, 9.0], [50, 50, 50])],  # all rounds of a width agree, or do not
)
def test_a_width_is_measured_until_it_is_clear_how_it_compares(
    monkeypatch: pytest.MonkeyPatch, seconds_of_steps: list[float], rounds: list[int]
) -> None:
    alone_and_fused = itertools.cycle(seconds_of_steps)
    timed: list[Any] = []

    def seconds(step: Any, device: torch.device) -> float:
        timed.append(step)
        return next(alone_and_fused)

    monkeypatch.setattr(probe, "_seconds", seconds)
    monkeypatch.setattr(probe, "_warm_up", lambda step, device, graph: None)
    plan_fusion(*trials(8), loss, BATCH, memory=2**33, seconds=60.0)
    fused = [step for step in timed if step is not timed[0]]
    assert list(collections.Counter(fused).values()) == rounds


def test_a_trial_alone_is_what_groups_are_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    step = probe._Trials.step

    def noted(self: Any, width: int, parts: int = 1) -> Any:
        asked.append(width)
        return step(self, width, parts)

    monkeypatch.setattr(probe._Trials, "step", noted)
    assert 1 in plan_fusion(*trials(4), loss, BATCH, memory=2**33, seconds=0.05).throughput
    assert asked[0] == 1


class Compiled:
    """Stands for a step that is compiled on a machine with a compiler, and with none is not."""

    recorded = True

    def __init__(self, learn: Callable[[Any], None], *others: Any, compiled: bool) -> None:
        self.learn = learn

    def __call__(self, batch: Any) -> None:
        self.learn(batch)


def test_a_compiled_step_is_compared_with_the_same_step_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(step: Any, device: torch.device) -> float:
        step()
        return 0.5 if isinstance(step.func, Compiled) else 2.0

    monkeypatch.setattr(probe, "GraphedStep", Compiled)
    monkeypatch.setattr(probe, "_seconds", seconds)
    found = probe.compiled_speedup(*trials(3), loss, BATCH)
    assert (found.speedup, found.seconds) == (4.0, 2.0)
    monkeypatch.setattr(Compiled, "recorded", False)
    assert probe.compiled_speedup(*trials(3), loss, BATCH).speedup == 1.0


def test_time_of_other_processes_does_not_count_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    def clock() -> float:
        return sum(waited)

    monkeypatch.setattr("time.perf_counter", clock)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert probe._seconds(lambda: waited.append(9.0), torch.device("cpu")) == 9.0
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert probe._seconds(lambda: waited.append(9.0), torch.device("cpu")) < 9.0


def test_no_garbage_is_looked_for_among_all_that_a_process_holds() -> None:
    set_aside: list[int] = []

    def collects(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            set_aside.append(gc.get_freeze_count())

    gc.disable()
    gc.callbacks.append(collects)
    try:
        plan_fusion(*trials(4), loss, BATCH, seconds=0.01)
    finally:
        gc.callbacks.remove(collects)
        gc.enable()
    assert set_aside
    assert all(set_aside)


WIDE = torch.randn(2048, 64), torch.randint(0, 3, (2048,))


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 4096), nn.Tanh(), nn.Linear(4096, 3))


def test_a_batch_that_does_not_fit_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """As little as possible, where a step takes three activations of its part of the batch, and 5 MiB of state."""
    rows = list[int]()

    def objective(model: nn.Module, batch: Any) -> Tensor:
        rows.append(len(batch[0]))
        return loss(model, batch)

    @contextmanager
    def activations(device: torch.device) -> Iterator[Peak]:
        peak = Peak()
        rows.clear()
        yield peak
        peak.bytes = 5 * 2**20 + 3 * 4 * 4096 * max(rows)

    monkeypatch.setattr(probe, "peak_memory", activations)
    plan = plan_fusion([wide()], [{"lr": 1e-3}], objective, WIDE, memory=40 * 2**20, seconds=0.1)
    assert plan.width == plan.limit == 1
    assert plan.micro_batches == 4
    assert plan.bytes_per_trial == (5 + 24) * 2**20


SPLIT = """
from fusion import plan_fusion
from fusion.streams import global_states
from tests.fusion.width.test_probe import WIDE, loss, wide

plans = [plan_fusion([wide()], [{"lr": 1e-3}], loss, WIDE, memory=40 * 2**20, seconds=0.1) for _ in range(5)]
plan = sorted(plans, key=lambda plan: plan.micro_batches)[2]
print(plan.micro_batches, plan.bytes_per_trial)
"""


@pytest.mark.slow
@linux
def test_a_batch_is_split_by_what_its_step_is_measured_to_take() -> None:
    """The median of five plans, in a process of its own: pages that the system took back count as new ones."""
    done = subprocess.run([sys.executable, "-c", SPLIT], capture_output=True, text=True, check=True)
    micro_batches, bytes_per_trial = map(int, done.stdout.split())
    assert micro_batches in (4, 8, 16)  # the heap may hold more than a step has at a time
    assert bytes_per_trial <= 40 * 2**20


def test_one_sample_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="memory is 1 bytes, but one trial takes"):
        plan_fusion([wide()], [{"lr": 1e-3}], loss, (WIDE[0][:2], WIDE[1][:2]), memory=1)


PREDICT = """
import sys, torch
from fusion import fuse, fused_optimizer, plan_fusion
from fusion.width.memory import peak_memory
from tests.fusion.width.test_probe import WIDE, loss, wide

torch.set_num_threads(1)
modules, configs = [wide() for _ in range(12)], [{"lr": 1e-3}] * 12
if sys.argv[1] == "predict":
    plan = plan_fusion(modules, configs, loss, WIDE, max_width=4, seconds=0.01)
    print(plan.fixed_bytes + 12 * plan.bytes_per_trial)
else:
    with peak_memory(torch.device("cpu")) as peak:
        fused = fuse(modules)
        optimizer = fused_optimizer(fused, configs)
        for _ in range(3):
            optimizer.zero_grad()
            fused.map(loss, WIDE).sum().backward()
            optimizer.step()
    print(peak.bytes)
"""


@pytest.mark.slow
@linux
def test_memory_of_a_wider_group_is_predicted_within_10_percent() -> None:
    def run(mode: str) -> int:
        command = [sys.executable, "-c", PREDICT, mode]
        return int(ast.literal_eval(subprocess.run(command, capture_output=True, text=True, check=True).stdout))

    assert run("predict") == pytest.approx(run("measure"), rel=0.1)


def test_a_module_without_parameters_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="has no stacked parameter that needs gradients"):
        plan_fusion([nn.ReLU(), nn.ReLU()], [{"lr": 0.1}] * 2, loss, BATCH)


def test_as_many_configurations_as_modules() -> None:
    modules, configs = trials(2)
    with pytest.raises(ValueError, match=r"`len\(configs\)` is 1, but must be 2"):
        plan_fusion(modules, configs[:1], loss, BATCH)
