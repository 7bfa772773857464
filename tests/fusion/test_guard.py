import ast
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusion import FusedModel, FusedOptimizer, OutOfMemoryGuard, fuse, fused_optimizer

ABSURD = 2**60  # bytes: more than any address space


def models(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 3)) for _ in range(count)]


def group(count: int) -> tuple[FusedModel, FusedOptimizer]:
    fused = fuse(models(count))
    return fused, fused_optimizer(fused, [{"lr": 0.01 * (k + 1)} for k in range(count)])


class Training:
    """A step that runs out of memory, by torch's own error, wherever it is told to."""

    def __init__(self, widest: int, *, at: str) -> None:
        self.widest, self.at, self.widths = widest, at, list[int]()
        self.batch = torch.randn(6, 4), torch.randint(0, 3, (6,))

    def __call__(self, fused: FusedModel, optimizer: FusedOptimizer) -> Tensor:
        self.widths.append(fused.K)
        optimizer.zero_grad()
        loss_K: Tensor = fused.map(self.loss, self.batch)
        self.maybe_exhaust(fused, "forward")
        loss_K.sum().backward()
        self.maybe_exhaust(fused, "backward")
        optimizer.step()
        self.maybe_exhaust(fused, "update")
        return loss_K.detach()

    @staticmethod
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def maybe_exhaust(self, fused: FusedModel, at: str) -> None:
        if at == self.at and self.widest < fused.K:
            torch.empty(ABSURD, dtype=torch.uint8)


def run(guard: OutOfMemoryGuard, training: Training, steps: int) -> Tensor:
    return torch.stack([torch.cat(guard.step(training)) for _ in range(steps)])


def members(guard: OutOfMemoryGuard) -> list[nn.Module]:
    return [g.fused.unfuse(k) for g in guard.groups for k in range(g.fused.K)]


@pytest.mark.parametrize("at", ["forward", "backward", "update"])
def test_the_step_is_repeated_by_halves_from_unharmed_state(at: str) -> None:
    guard, training = OutOfMemoryGuard(*group(5)), Training(2, at=at)
    losses = run(guard, training, 3)
    assert [g.fused.K for g in guard.groups] == [2, 1, 2]
    assert training.widths == [5, 2, 3, 1, 2, 2, 1, 2, 2, 1, 2]
    assert_trained_like_one_group(guard, training.batch, losses)


@pytest.mark.parametrize("at", ["forward", "backward"])
def test_memory_that_runs_out_later_costs_nothing_either(at: str) -> None:
    guard, training = OutOfMemoryGuard(*group(5)), Training(5, at=at)
    losses = [run(guard, training, 2)]
    training.widest = 3
    losses.append(run(guard, training, 2))
    assert [g.fused.K for g in guard.groups] == [2, 3]
    assert_trained_like_one_group(guard, training.batch, torch.cat(losses))


def assert_trained_like_one_group(guard: OutOfMemoryGuard, batch: Any, losses: Tensor) -> None:
    fused, optimizer = group(losses.shape[1])
    training = Training(fused.K, at="never")
    training.batch = batch
    torch.testing.assert_close(losses, torch.stack([training(fused, optimizer) for _ in losses]))
    for k, member in enumerate(members(guard)):
        torch.testing.assert_close(member.state_dict(), fused.unfuse(k).state_dict())


def test_random_numbers_of_a_failed_step_are_drawn_again() -> None:
    drawn: list[float] = []

    def step(fused: FusedModel, optimizer: FusedOptimizer) -> None:
        drawn.append(torch.rand(()).item())
        if fused.K > 1:
            torch.empty(ABSURD, dtype=torch.uint8)

    OutOfMemoryGuard(*group(2)).step(step)
    assert drawn[0] == drawn[1] != drawn[2]


def test_one_member_that_does_not_fit_raises_the_error() -> None:
    with pytest.raises(RuntimeError, match="memory"):
        OutOfMemoryGuard(*group(4)).step(Training(0, at="forward"))


def test_an_error_within_a_later_update_cannot_be_undone() -> None:
    guard, training = OutOfMemoryGuard(*group(2)), Training(2, at="update")
    run(guard, training, 1)
    training.widest = 1
    with pytest.raises(RuntimeError, match="memory"):
        guard.step(training)


def test_other_errors_pass() -> None:
    def broken(fused: FusedModel, optimizer: FusedOptimizer) -> Tensor:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        OutOfMemoryGuard(*group(2)).step(broken)


LIMITED = """
import resource, torch
from torch import nn
from fusion import OutOfMemoryGuard, fuse, fused_optimizer

torch.set_num_threads(1)
torch.manual_seed(0)  # a member that begins with a low loss may step past it
fused = fuse([nn.Sequential(nn.Linear(64, 4096), nn.Tanh(), nn.Linear(4096, 1)) for _ in range(16)])
guard = OutOfMemoryGuard(fused, fused_optimizer(fused, [{"lr": 1e-3}] * 16))
x = torch.randn(2000, 64)

def step(fused, optimizer):
    optimizer.zero_grad()
    loss_K = fused.map(lambda model, x: model(x).square().mean(), x)
    loss_K.sum().backward()
    optimizer.step()
    return loss_K.detach()

pages = int(open("/proc/self/statm").read().split()[0])
address_space = pages * resource.getpagesize() + 900 * 2**20  # 16 members need 2 GB of activations
resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
first, second = torch.cat(guard.step(step)), torch.cat(guard.step(step))
assert bool((second < first).all())
print([group.fused.K for group in guard.groups])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS binds on Linux")
def test_a_real_limit_of_the_address_space() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    widths = ast.literal_eval(done.stdout)
    assert sum(widths) == 16
    assert len(widths) > 1
