"""A compiled step does what the step does, up to rounding; what cannot be compiled trains as it is written."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fusion import GraphedStep
from fusion.graph import GraphWarning
from fusion.optim import native
from tests.fusion.graph.test_step import EPOCHS, Net, Training, same


def net(k: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))


def plain(k: int) -> nn.Module:
    """Without what makes a gradient nothing but rounding."""
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 4))


def trained(make: Callable[[int], nn.Module] = net, compiled: bool = True, K: int = 3) -> tuple[Training, list[Tensor]]:
    """Three epochs with schedules, clipping, three optimizers and a smaller last batch."""
    training = Training(make, K)
    training.step = GraphedStep(training.plain, training.fused, training.optimizer, compiled=compiled)
    found = [value for epoch in range(EPOCHS) for value in training.epoch(epoch, training.step)]
    return training, [*found, *training.state()]


Compiled = Callable[..., Sequence[Tensor]]


def as_if_compiled(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Compiled:
    """Runs the operators that would be compiled."""
    return graph


def test_what_is_compiled_are_the_operators_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run one by one they give the same to the last bit; the step itself is called no more."""
    monkeypatch.setattr(torch._inductor, "compile", as_if_compiled)
    training, ours = trained()
    assert training.step.recorded
    assert same(ours, trained(compiled=False)[1])


def test_large_members_are_updated_at_once_where_the_step_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they would not be otherwise; and no more, where it cannot be compiled."""
    monkeypatch.setattr(native, "LEAST_PER_PARAMETER", 0)
    monkeypatch.setattr(torch._inductor, "compile", as_if_compiled)
    training, ours = trained(plain)
    assert training.step.recorded
    for compiled, as_written in zip(ours, trained(plain, compiled=False)[1], strict=True):
        torch.testing.assert_close(compiled, as_written, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(torch._inductor, "compile", fail)
    with pytest.warns(GraphWarning, match="no C.. compiler"):
        assert trained(plain)[0].fused.updated_in_turn


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler `g++`, which compiled steps need")
def test_compiled_steps_equal_the_step_up_to_rounding_and_each_other_exactly() -> None:
    training, ours = trained(plain)
    assert training.step.recorded
    for compiled, as_written in zip(ours, trained(plain, compiled=False)[1], strict=True):
        torch.testing.assert_close(compiled, as_written, rtol=1e-3, atol=1e-4)
    assert same(ours, trained(plain)[1])


def fail(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Compiled:
    raise RuntimeError("no C++ compiler")


def compute_otherwise(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Compiled:
    def run(*memory: Tensor) -> Sequence[Tensor]:
        made: Sequence[Tensor] = graph(*memory)
        for tensor in memory:
            tensor.add_(tensor.is_floating_point())
        return made

    return run


@pytest.mark.parametrize(
    ("make", "compiler", "reason"),
    [
        (net, fail, "no C.. compiler"),
        (net, compute_otherwise, "compiled code returns something else"),
        (lambda k: Net(0.2), as_if_compiled, "draws random numbers, and compiled code would draw others"),
    ],
)
def test_what_cannot_be_compiled_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[int], nn.Module], compiler: Any, reason: str
) -> None:
    """Weights, moments and statistics are what they were before it was tried."""
    monkeypatch.setattr(torch._inductor, "compile", compiler)
    with pytest.warns(GraphWarning, match=reason):
        training, ours = trained(make)
    assert not training.step.recorded
    assert same(ours, trained(make, compiled=False)[1])
