"""Normalization, folded: statistics and affine parameters are those of each member."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from fusion import dry_run, fuse
from fusion.evaluate.rules import folded
from fusion.streams import Streams
from tests.fusion.evaluate.rules.folding import K, assert_folds, member, tensor
from tests.fusion.training import Both


@pytest.mark.parametrize("x", [None, 0, 1])
@pytest.mark.parametrize(("training", "momentum"), [(True, 0.3), (False, 0.3), (True, 1)])
def test_batch_norm(training: bool, momentum: float, x: int | None) -> None:
    def op(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor) -> Any:
        mean, var = mean.detach().clone(), var.detach().abs()
        return F.batch_norm(x, mean, var, weight, bias, training, momentum), mean, var

    inputs = tensor(x, 6, 4, 5, 5), member(4), member(4), member(4), member(4)
    assert_folds(op, *inputs, dims=(x, 0, 0, 0, 0))


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 5)])
def test_batch_norm_without_affine_and_statistics(shape: tuple[int, ...]) -> None:
    assert_folds(lambda x: F.batch_norm(x, None, None, training=True), member(*shape), dims=(0,))


def test_batch_norm_of_a_module_updates_its_buffers() -> None:
    modules = [nn.BatchNorm2d(4) for _ in range(K)]
    params, buffers = torch.func.stack_module_state(modules)
    x = torch.randn(6, 4, 5, 5)

    def op(params: Any, buffers: Any) -> Any:
        return torch.func.functional_call(modules[0], (params, buffers), (x,))

    with folded(Streams(K, range(K))):
        torch.func.vmap(op)(params, buffers)
    modules[1](x)
    assert buffers["num_batches_tracked"].tolist() == [1] * K
    torch.testing.assert_close(buffers["running_mean"][2], modules[1].running_mean)
    torch.testing.assert_close(buffers["running_var"][0], modules[1].running_var)


@pytest.mark.parametrize("x", [None, 0, 1])
def test_group_norm(x: int | None) -> None:
    inputs = tensor(x, 6, 4, 5, 5), member(4), member(4)
    assert_folds(lambda x, w, b: F.group_norm(x, 2, w, b), *inputs, dims=(x, 0, 0))
    assert_folds(lambda x: F.group_norm(x, 2), member(6, 4, 5), dims=(0,))


def spectral() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 3)).double()


def weighted() -> nn.Module:
    first = parametrizations.weight_norm(nn.Conv1d(1, 3, 2), dim=1)
    last = parametrizations.weight_norm(nn.Linear(9, 3), dim=None)  # type: ignore[arg-type]
    return nn.Sequential(nn.Unflatten(1, (1, 4)), first, nn.Flatten(), last).double()


@pytest.mark.parametrize("build", [spectral, weighted])
def test_parametrized_weights_train_as_each_member_alone(build: Callable[[], nn.Module]) -> None:
    """Two steps: the first leaves vectors in buffers of the spectral norm, from which the second goes on."""
    torch.manual_seed(0)
    modules = [build() for _ in range(3)]
    x = torch.randn(5, 4, dtype=torch.float64)
    both = Both(fuse(modules), modules, [{"lr": 0.1}] * 3, lambda model, x: model(x).square().sum())
    assert dry_run(both.fused, both.objective, x) is None
    for _ in range(2):
        both.step(x)
    both.assert_equal()
