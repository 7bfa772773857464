from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from surrogate import make_surrogate
from surrogate.recording import record_training
from tests.surrogate.models import two_heads


def objective(model: nn.Module, x: Tensor) -> Tensor:
    output = model(x)
    loss: Tensor = output["classes"].square().mean() + output["box"].square().mean()
    return loss


def test_sizes_and_changes_by_hand() -> None:
    torch.manual_seed(0)
    model, x = make_surrogate(two_heads, {}, 1.0), torch.randn(8, 64)
    before = model.get_submodule("box")(model.get_submodule("trunk")(x).relu()).detach()
    start = model.get_parameter("box.weight").detach().clone()
    recording = record_training(model, {"optimizer": "sgd", "lr": 0.1}, [x], objective)
    moved = model.get_parameter("box.weight") - start
    assert recording.parameters["box.weight", 0] == pytest.approx(start.square().mean().sqrt().item())
    assert recording.parameters["box.weight", 1] == pytest.approx(moved.square().mean().sqrt().item())
    torch.manual_seed(0)
    model = make_surrogate(two_heads, {}, 1.0)
    found = record_training(model, {"optimizer": "sgd", "lr": 0.1}, [x, x], objective).outputs
    after = model.get_submodule("box")(model.get_submodule("trunk")(x).relu()).detach()
    assert found["box", 0] == (before.abs().mean().item(), 0.0)
    assert found["box", 2][0] == pytest.approx(after.abs().mean().item())
    assert found["box", 2][1] == pytest.approx((after - before).abs().mean().item())


def test_a_dict_of_outputs_counts_as_one_row_and_hooks_are_gone() -> None:
    model, x = make_surrogate(two_heads, {}, 1.0), torch.randn(8, 64)
    found = record_training(model, {"lr": 0.1}, [x], objective).outputs
    assert {name for name, _ in found} == {"", "trunk", "classes", "box"}
    output = model(x)
    assert not any(layer._forward_hooks for layer in model.modules())
    assert output["box"].requires_grad
