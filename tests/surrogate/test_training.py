from __future__ import annotations

from typing import Any

import mup
import pytest
import torch
from torch import Tensor, nn

from surrogate import make_surrogate
from surrogate.training import evaluate, make_optimizer, train
from tests.surrogate.models import mlp

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
    sgd = make_optimizer(model, {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True})
    assert (sgd.defaults["momentum"], sgd.defaults["nesterov"]) == (0.9, True)
    adam = make_optimizer(model, {"lr": 0.1, "beta1": 0.8, "eps": 1e-6})
    assert (adam.defaults["betas"], adam.defaults["eps"]) == ((0.8, 0.999), 1e-6)


def test_evaluate_is_the_mean_over_batches_in_evaluation_mode() -> None:
    model = make_surrogate(mlp, {}, 1.0)
    losses = [objective(model, (X[:16], Y[:16])).item(), objective(model, (X[16:], Y[16:])).item()]
    assert evaluate(model, [(X[:16], Y[:16]), (X[16:], Y[16:])], objective) == pytest.approx(sum(losses) / 2)
    assert not model.training


def test_a_configuration_without_a_rate() -> None:
    config: dict[str, Any] = {"momentum": 0.9}
    with pytest.raises(ValueError, match=r"config has no 'lr', only \['momentum'\]"):
        make_optimizer(make_surrogate(mlp, {}, 1.0), config)
