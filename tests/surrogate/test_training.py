""" """

from __future__ import annotations

from typing import Any

import mup
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from fusion.optim.optimizer_config import Hyperparameters
from surrogate import make_surrogate
from surrogate.training import evaluate, make_optimizer, make_plain_optimizer, record_training, train
from tests.surrogate.models import mlp, two_heads

X, Y = torch.randn(32, 64), torch.randint(10, (32,))
ORACLES = {"sgd": mup.MuSGD, "adam": mup.MuAdam, "adamw": mup.MuAdamW}


def objective(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("optimizer", ORACLES)
def test_trains_as_mups_optimizer_does(optimizer: str) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return make_surrogate(mlp, {}, 1 / 4)

    ours, theirs = build(), build()
    train(ours, {"optimizer": optimizer, "lr": 0.01, "weight_decay": 0.1}, [(X, Y)] * 4, objective)
    mup.set_base_shapes(theirs, mlp({}, 1.0), rescale_params=False, do_assert=False)
    oracle = ORACLES[optimizer](theirs.parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(4):
        oracle.zero_grad()
        objective(theirs, (X, Y)).backward()
        oracle.step()
    for own, other in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(own, other)


def test_settings_reach_the_optimizer() -> None:
    model = make_surrogate(mlp, {}, 1.0)
    sgd = make_optimizer(model, {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "dampening": 0.1})
    assert (sgd.defaults["momentum"], sgd.defaults["dampening"]) == (0.9, 0.1)
    assert make_optimizer(model, {"optimizer": "sgd", "lr": 1, "momentum": 0.9, "nesterov": True}).defaults["nesterov"]
    adam = make_optimizer(model, {"lr": 0.1, "beta1": 0.8, "eps": 1e-6})
    assert (adam.defaults["betas"], adam.defaults["eps"]) == ((0.8, 0.999), 1e-6)


def test_the_others_of_torch_have_their_settings_too() -> None:
    model = make_surrogate(mlp, {}, 1 / 4)
    rms = make_optimizer(model, {"optimizer": "rmsprop", "lr": 0.1, "alpha": 0.5, "momentum": 0.9, "beta1": 0.5})
    assert (rms.defaults["alpha"], rms.defaults["momentum"]) == (0.5, 0.9)
    asgd = make_optimizer(model, {"optimizer": "asgd", "lr": 0.1})
    assert [group["lr"] * group["lambd"] for group in asgd.param_groups] == pytest.approx([1e-5] * 8)


@pytest.mark.parametrize("optimizer", ORACLES)
def test_what_is_left_out_has_torchs_default(optimizer: str) -> None:
    """Which are also the defaults of fused training."""
    ours = make_optimizer(make_surrogate(mlp, {}, 1.0), {"optimizer": optimizer, "lr": 0.1})
    theirs = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[optimizer]([X], lr=0.1)
    fused = Hyperparameters.from_config({"optimizer": optimizer, "lr": 0.1})
    group = ours.param_groups[0]
    for key, value in theirs.defaults.items():
        assert group[key] == value, key
    assert group["weight_decay"] == fused.decay
    assert group.get("betas", (fused.beta1, fused.beta2)) == (fused.beta1, fused.beta2)
    assert (group.get("momentum", 0.0), group.get("eps", 1e-8)) == (fused.momentum, fused.eps)


def test_the_default_decay_is_multiplied_like_a_given_one() -> None:
    narrow = make_surrogate(mlp, {}, 1 / 4)
    left_out, given = (make_optimizer(narrow, {"lr": 0.1, **extra}) for extra in ({}, {"weight_decay": 0.01}))
    decays = [group["weight_decay"] for group in left_out.param_groups]
    assert decays == [group["weight_decay"] for group in given.param_groups]
    assert min(decays) < max(decays) == 0.01


@pytest.mark.parametrize(
    ("key", "value"),
    [("schedule", "cosine"), ("warmup", 0.1), ("warmup_epochs", 2), ("independent_weight_decay", True)],
)
def test_what_the_loop_does_not_follow_is_refused(key: str, value: Any) -> None:
    model = make_surrogate(mlp, {}, 1.0)
    with pytest.raises(ValueError, match=rf"`config` has {key}={value!r}, which this plain training loop does not"):
        train(model, {"lr": 0.1, key: value}, [(X, Y)], objective)
    make_plain_optimizer(
        model, {"lr": 0.1, "schedule": "constant", "warmup_epochs": 0.0, "independent_weight_decay": False}
    )


def test_gradients_are_clipped() -> None:
    model = make_surrogate(mlp, {}, 1.0)
    before = [p.detach().clone() for p in model.parameters()]
    train(model, {"optimizer": "sgd", "lr": 1.0, "grad_clip": 1e-3}, [(X, Y)], objective)
    moved = torch.cat([(p - old).flatten() for p, old in zip(model.parameters(), before)])
    assert moved.norm().item() == pytest.approx(1e-3, rel=1e-2)


def test_evaluate_is_the_mean_over_batches_in_evaluation_mode() -> None:
    model = make_surrogate(mlp, {}, 1.0)
    losses = [objective(model, (X[:16], Y[:16])).item(), objective(model, (X[16:], Y[16:])).item()]
    assert evaluate(model, [(X[:16], Y[:16]), (X[16:], Y[16:])], objective) == pytest.approx(sum(losses) / 2)
    assert not model.training


def test_a_configuration_without_a_rate() -> None:
    config: dict[str, Any] = {"momentum": 0.9}
    with pytest.raises(ValueError, match=r"`config` has no 'lr', only \['momentum'\]"):
        make_optimizer(make_surrogate(mlp, {}, 1.0), config)


def test_a_rate_that_is_no_number() -> None:
    with pytest.raises(ValueError, match=r"`config\['lr'\]` is '0.1', but must be a number"):
        make_optimizer(make_surrogate(mlp, {}, 1.0), {"lr": "0.1"})


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (lambda loss: {"loss": loss}, "`objective` returned a dict, but must return the loss, a scalar tensor"),
        (lambda loss: loss.item(), "`objective` returned a float"),
        (lambda loss: loss.repeat(3), r"`objective` returned a tensor of shape \(3,\)"),
        (lambda loss: loss.detach(), "but must be one whose loss depends on a parameter"),
    ],
)
def test_an_objective_that_returns_no_loss(returned: Any, told: str) -> None:
    model = make_surrogate(mlp, {}, 1.0)

    def other(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
        return returned(objective(model, batch))

    with pytest.raises(ValueError, match=told):
        train(model, {"lr": 0.1}, [(X, Y)], other)
    if "shape" in told:
        with pytest.raises(ValueError, match=told):
            evaluate(model, [(X, Y)], other)


def objective_recording(model: nn.Module, x: Tensor) -> Tensor:
    output = model(x)
    loss: Tensor = output["classes"].square().mean() + output["box"].square().mean()
    return loss


def test_sizes_and_changes_by_hand() -> None:
    torch.manual_seed(0)
    model, x = make_surrogate(two_heads, {}, 1.0), torch.randn(8, 64)
    before = model.get_submodule("box")(model.get_submodule("trunk")(x).relu()).detach()
    start = model.get_parameter("box.weight").detach().clone()
    recording = record_training(model, {"optimizer": "sgd", "lr": 0.1}, [x], objective_recording)
    moved = model.get_parameter("box.weight") - start
    assert recording.parameters["box.weight", 0] == pytest.approx(start.square().mean().sqrt().item())
    assert recording.parameters["box.weight", 1] == pytest.approx(moved.square().mean().sqrt().item())
    torch.manual_seed(0)
    model = make_surrogate(two_heads, {}, 1.0)
    found = record_training(model, {"optimizer": "sgd", "lr": 0.1}, [x, x], objective_recording).outputs
    after = model.get_submodule("box")(model.get_submodule("trunk")(x).relu()).detach()
    assert found["box", 0] == (before.abs().mean().item(), 0.0)
    assert found["box", 2][0] == pytest.approx(after.abs().mean().item())
    assert found["box", 2][1] == pytest.approx((after - before).abs().mean().item())


def test_a_dict_of_outputs_counts_as_one_row_and_hooks_are_gone() -> None:
    model, x = make_surrogate(two_heads, {}, 1.0), torch.randn(8, 64)
    found = record_training(model, {"lr": 0.1}, [x], objective_recording).outputs
    assert {name for name, _ in found} == {"", "trunk", "classes", "box"}
    output = model(x)
    assert not any(layer._forward_hooks for layer in model.modules())
    assert output["box"].requires_grad


def test_a_layer_whose_outputs_are_integers_is_left_out() -> None:
    model = make_surrogate(two_heads, {}, 1.0)
    model.add_module("labels", nn.Identity())

    def label_first(model: nn.Module, x: Tensor) -> Tensor:
        model.get_submodule("labels")(x.argmax(1))
        return objective_recording(model, x)

    found = record_training(model, {"lr": 0.1}, [torch.randn(8, 64)], label_first).outputs
    assert "trunk" in {name for name, _ in found}
    assert "labels" not in {name for name, _ in found}


def test_the_weight_that_a_parametrization_computes_is_no_output() -> None:
    model = make_surrogate(lambda _, ratio: nn.Sequential(weight_norm(nn.Linear(64, 10))), {}, 1.0)
    found = record_training(model, {"lr": 0.1}, [(X, Y)], objective).outputs
    assert {name for name, _ in found} == {"", "0"}
