from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from surrogate.operators import run_for_operators
from tests.surrogate.models import ZOO

IMAGES = torch.randn(2, 4, 8, 8)


def operators(module: nn.Module, batch: Tensor = IMAGES) -> str:
    return run_for_operators(module, batch)[1]


@pytest.mark.parametrize("name", ZOO)
def test_models_that_differ_in_weights_alone_compute_the_same(name: str) -> None:
    model_fn, config, batch = ZOO[name]
    first, second = (run_for_operators(model_fn(config, 1 / 4), batch) for _ in range(2))
    assert first == second
    assert first[1] != operators(model_fn(config, 1 / 2), batch)


class Branch(nn.Module):
    def __init__(self, skip: float) -> None:
        super().__init__()
        self.skip = skip
        self.layer = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out + x if self.skip > 0.5 else out


SUBTLE: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "stride": (lambda: nn.Conv2d(4, 4, 3, 1, 1), lambda: nn.Conv2d(4, 4, 3, 2, 1)),
    "groups of a norm": (lambda: nn.GroupNorm(2, 4), lambda: nn.GroupNorm(4, 4)),
    "a flag": (lambda: nn.AvgPool2d(3, padding=1), lambda: nn.AvgPool2d(3, padding=1, count_include_pad=False)),
    "a branch that a float takes": (lambda: Branch(0.1), lambda: Branch(0.9)),
    "an activation": (nn.ReLU, nn.GELU),
    "a type": (nn.ReLU, lambda: nn.Sequential(nn.ReLU(), nn.ReLU())),
}


@pytest.mark.parametrize("name", SUBTLE)
def test_subtle_differences_count(name: str) -> None:
    first, second = (make() for make in SUBTLE[name])
    assert operators(first) != operators(second)


def test_floats_that_choose_no_branch_do_not() -> None:
    assert operators(nn.Dropout(0.1)) == operators(nn.Dropout(0.2))
    assert operators(Branch(0.1)) == operators(Branch(0.2))


def test_the_module_and_the_global_generator_stay_as_they_are() -> None:
    model = nn.Sequential(nn.BatchNorm2d(4), nn.Dropout(0.5))
    before = torch.get_rng_state()
    shapes, _ = run_for_operators(model, IMAGES)
    assert shapes == {"output": (2, 4, 8, 8)}
    assert torch.equal(model.get_buffer("0.running_mean"), torch.zeros(4))
    assert torch.equal(torch.get_rng_state(), before)
