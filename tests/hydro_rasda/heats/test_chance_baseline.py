from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hydro_rasda import TuneResult, choice, loguniform
from hydro_rasda.data import make_batches
from hydro_rasda.heats.chance_baseline import Chance, chance_of
from hydro_rasda.problem.objective import LossFn, supervised
from hydro_rasda.problem.problem import Problem
from tests.hydro_rasda.models import mlp, regressor

pytestmark = pytest.mark.usefixtures("one_process")

Quick = Callable[..., TuneResult]
Pair = tuple[Tensor, Tensor]
G = torch.Generator().manual_seed(0)


def of(
    problem: Problem, train: Tensor, val: Tensor, metric: str, loss_fn: LossFn = F.cross_entropy, classes: bool = True
) -> Chance | None:
    data = [make_batches((torch.zeros(len(t), 2), t), "data", problem.device, 0) for t in (train, val)]
    changed = replace(problem, train_data=data[0], val_data=data[1], objective=supervised(loss_fn))
    return chance_of(changed.with_settings(metric=metric), 7, classes)


def test_of_classes_it_is_the_entropy_and_the_most_frequent_one(problem: Problem) -> None:
    labels = torch.tensor([0] * 600 + [1] * 300 + [2] * 100)
    loss, accuracy = of(problem, labels, labels, "val_loss"), of(problem, labels, labels, "val_accuracy")
    assert loss is not None
    assert accuracy is not None
    assert loss.score == pytest.approx(-sum(p * math.log(p) for p in (0.6, 0.3, 0.1)), rel=1e-3)
    assert loss.margin == pytest.approx(loss.score / 100)
    assert accuracy.score == pytest.approx(0.6)
    assert accuracy.margin == pytest.approx(2 * math.sqrt(0.6 * 0.4 / 1000))


def test_it_is_measured_where_the_metric_is(problem: Problem) -> None:
    train, val = torch.tensor([0] * 90 + [1] * 10), torch.tensor([0] * 10 + [1] * 30)
    scores = [c.score for metric in ("train_accuracy", "val_accuracy") if (c := of(problem, train, val, metric))]
    assert scores == pytest.approx([0.9, 0.25])


def test_of_numbers_it_is_their_variance(problem: Problem) -> None:
    target = torch.randn(500, 2, generator=G) + torch.tensor([3.0, -1.0])
    chance = of(problem, target, target, "val_loss", F.mse_loss)
    assert chance is not None
    assert chance.score == pytest.approx(target.var(0, correction=0).mean().item(), rel=1e-5)


def test_of_logits_it_is_the_entropy_too(problem: Problem) -> None:
    bits = (torch.rand(400, 1, generator=G) < 0.2).float()
    p = bits.mean().item()
    soft = torch.cat([bits, 1 - bits], 1)
    entropy = -p * math.log(p) - (1 - p) * math.log(1 - p)

    def of_logarithms(output: Tensor, target: Tensor) -> Tensor:
        """The loss is not finite for the probability itself, whose exponential is above 1."""
        return -(target * output + (1 - target) * torch.log1p(-output.exp())).mean()

    losses = (bits, F.binary_cross_entropy_with_logits), (soft, F.cross_entropy), (bits, of_logarithms)
    for target, loss_fn in losses:
        chance = of(problem, target, target, "val_loss", loss_fn)
        assert chance is not None
        assert chance.score == pytest.approx(entropy, rel=1e-5)


def test_dense_targets_with_some_left_out(problem: Problem) -> None:
    target = torch.randint(0, 3, (20, 4, 5), generator=G)
    target[:, 0] = -100
    chance = of(problem, target, target, "val_loss")
    assert chance is not None
    assert 1.0 < chance.score < math.log(3)


@pytest.mark.parametrize("target", [torch.tensor([3, 10**15]), torch.tensor([True, False])])
def test_numbers_that_are_no_classes_are_not_counted(problem: Problem, target: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert of(problem, target, target, "val_loss", F.mse_loss, classes=False) is None


def test_where_it_is_not_known(problem: Problem) -> None:
    labels = torch.arange(12) % 3
    assert of(problem, labels, labels, "val_loss", classes=False) is None
    assert of(problem, labels, labels, "val_mae") is None
    assert of(problem, labels % 2, labels, "val_loss") is None  # the frequency of the third is unknown
    assert of(problem, labels, labels, "val_loss", lambda output, target: output[:, 7].mean()) is None


def test_an_error_of_the_loss_is_said(problem: Problem) -> None:
    """Not where another constant is what the loss takes: the log-odds are no probabilities."""
    labels = torch.arange(12) % 3

    def fails(output: Tensor, target: Tensor) -> Tensor:
        raise RuntimeError("no more handles")

    with pytest.warns(UserWarning, match=r"failed with RuntimeError: no more handles\. So trials may be stopped by"):
        assert of(problem, labels, labels, "val_loss", fails) is None
    bits = (torch.arange(10) % 5 == 0).float()
    chance = of(problem, bits, bits, "val_loss", F.binary_cross_entropy)
    assert chance is not None
    assert chance.score == pytest.approx(-0.2 * math.log(0.2) - 0.8 * math.log(0.8), rel=1e-5)


def test_an_error_of_the_data_is_said(problem: Problem) -> None:
    def lost(batch_size: int) -> Any:
        raise OSError("the disk is gone")

    data = make_batches(lost, "train_data", problem.device, 0)
    changed = replace(problem, train_data=data, objective=supervised()).with_settings(metric="val_loss")
    with pytest.warns(UserWarning, match="failed with OSError: the disk is gone"):
        assert chance_of(changed, 7, True) is None


def test_sequences_may_differ_in_length(problem: Problem) -> None:
    def loader(batch_size: int) -> Any:
        return [(torch.zeros(2, 3), torch.zeros(2, length, dtype=torch.long)) for length in (4, 5)]

    data = make_batches(loader, "data", problem.device, 0)
    changed = replace(problem, train_data=data, val_data=data, objective=supervised())
    assert chance_of(changed.with_settings(metric="val_loss"), 2, True) is not None


def test_a_class_that_only_the_validation_has(problem: Problem) -> None:
    chance = of(problem, torch.tensor([0, 2] * 20), torch.tensor([0, 1, 2]), "val_loss")
    assert chance is not None
    assert chance.score == pytest.approx((math.log(43) - math.log(1) + 2 * (math.log(43) - math.log(21))) / 3)


@pytest.mark.parametrize(
    ("scores", "mode", "beaten"),
    [([2.2], "min", False), ([2.17], "min", True), ([9.0], "min", False), ([2.4], "max", False), ([2.5], "max", True)],
)
def test_a_score_beats_it_by_more_than_the_margin(scores: list[float], mode: Any, beaten: bool) -> None:
    assert Chance(2.3, 0.12).beaten(scores, mode) is beaten


SLOW = {"lr": loguniform(1e-9, 1e-8), "optimizer": "sgd"}
FAST = {"lr": choice([0.003, 0.01]), "optimizer": "adamw", "batch_size": 16}


@pytest.mark.parametrize("metric", ["val_loss", "val_accuracy"])
def test_tune_warns_where_nobody_has_learned(quick: Quick, capsys: pytest.CaptureFixture[str], metric: str) -> None:
    arguments: dict[str, Any] = {"num_samples": 4, "max_t": 2, "metric": metric}
    arguments["mode"] = "min" if metric == "val_loss" else "max"
    with pytest.warns(
        UserWarning, match=rf"no trial's {metric} differs from chance at the first rung \(epoch 1\)"
    ) as told:
        result = quick(space={**SLOW, "lr": choice([1e-9])}, model_fn=constant, progress=True, **arguments)
    assert len([w for w in told if "chance" in str(w.message)]) == 1
    said = f"no trial's {metric} differs from chance"
    assert sum(said in message.text for message in result.messages) == 1
    assert said not in capsys.readouterr().out  # the warning shows it
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quick(space=FAST, name="learns", **arguments)
        quick(name="run", space={**SLOW, "lr": choice([1e-9])}, model_fn=constant, **arguments)  # decided before


def test_a_single_epoch_of_a_single_trial_is_told_what_helps(quick: Quick) -> None:
    arguments: dict[str, Any] = {"space": {**SLOW, "lr": choice([1e-9])}, "model_fn": constant}
    with pytest.warns(UserWarning, match=r"a constant prediction has [0-9.]*\. Raise `max_t`, or look at the range"):
        assert ", 1 trial: 1 " in repr(quick(num_samples=1, max_t=1, **arguments))


def constant(config: dict[str, Any], width_ratio: float = 1.0) -> torch.nn.Module:
    """Begins with what says nothing of any class."""
    model = mlp(config, width_ratio)
    with torch.no_grad():
        for p in list(model.parameters())[-2:]:
            p.zero_()
    return model


def test_regression_and_objectives_by_hand(quick: Quick, digits: tuple[Pair, Pair]) -> None:
    (x, y), (x_val, y_val) = digits
    data: dict[str, Any] = {"train_data": (x, y[:, None] / 9.0), "val_data": (x_val, y_val[:, None] / 9.0)}
    data |= {"model_fn": regressor, "num_samples": 4, "max_t": 2, "space": SLOW}

    def squared(model: torch.nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"loss": F.mse_loss(model(batch[0]), batch[1])}

    with pytest.warns(UserWarning, match="no trial's val_loss differs from chance"):
        quick(loss_fn=F.mse_loss, **data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quick(objective=squared, name="by hand", **data)
