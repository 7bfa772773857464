from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusion import fuse
from hydro_rasda.problem.objective import as_objective, check_metrics, checked, give_config, steering, supervised

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
LINEAR = nn.Linear(4, 3)


def test_classification() -> None:
    target = torch.tensor([0, 1, 2, 0, 1, 2])
    metrics = supervised()(LINEAR, (X, target))
    torch.testing.assert_close(metrics["loss"], F.cross_entropy(LINEAR(X), target))
    right = sum(int(row.argmax()) == label for row, label in zip(LINEAR(X), target.tolist()))
    assert metrics["accuracy"].item() == pytest.approx(right / 6)
    assert set(metrics) == {"loss", "accuracy", "weight/loss", "weight/accuracy"}


def test_classes_are_the_second_dimension() -> None:
    logits = torch.randn(2, 5, 3, 3, generator=torch.Generator().manual_seed(0))
    target = logits.argmax(1)
    assert supervised()(nn.Identity(), (logits, target))["accuracy"].item() == 1.0


SEQUENCE = torch.randn(6, 5, 7, generator=torch.Generator().manual_seed(0))


def flattened(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of classes that are the last dimension, as language models have them."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def test_classes_are_the_last_dimension_where_the_target_says_so() -> None:
    target = SEQUENCE.argmax(-1)
    target[0, 0] = (target[0, 0] + 1) % 7
    for loss_fn in (flattened, lambda output, target: F.cross_entropy(output.movedim(-1, 1), target)):
        metrics = supervised(loss_fn)(nn.Identity(), (SEQUENCE, target))
        torch.testing.assert_close(metrics["loss"], F.cross_entropy(SEQUENCE.movedim(-1, 1), target))
        assert metrics["accuracy"].item() == pytest.approx(29 / 30)


def test_fused_models_have_the_accuracy_of_each_alone() -> None:
    models, target = [nn.Linear(7, 7) for _ in range(3)], SEQUENCE.argmax(-1)
    accuracy_K = fuse(models).map(supervised(flattened), (SEQUENCE, target))["accuracy"]
    alone = [supervised(flattened)(model, (SEQUENCE, target))["accuracy"] for model in models]
    torch.testing.assert_close(accuracy_K, torch.stack(alone))


def test_where_both_could_be_the_classes_torchs_losses_have_them_second_and_others_last() -> None:
    square = torch.randn(6, 5, 5, generator=torch.Generator().manual_seed(0))
    of_torch = (F.cross_entropy, nn.CrossEntropyLoss(), partial(F.cross_entropy, label_smoothing=0.1))
    for dim, losses in ((1, of_torch), (-1, (flattened, partial(flattened)))):
        for loss_fn in losses:
            metrics = supervised(loss_fn)(nn.Identity(), (square, square.argmax(dim)))
            assert metrics["accuracy"].item() == 1.0


@pytest.mark.parametrize("target", [(6, 4), (6,), (6, 1), (5, 7), (30,)])
def test_where_the_target_has_another_shape_there_is_no_accuracy(target: tuple[int, ...]) -> None:
    """A target of one column would be broadcast."""
    metrics = supervised(lambda output, target: output.mean())(nn.Identity(), (SEQUENCE, torch.ones(target).long()))
    assert set(metrics) == {"loss"}


def test_regression() -> None:
    target = torch.zeros(6, 3)
    metrics = supervised(F.mse_loss)(LINEAR, (X, target))
    torch.testing.assert_close(metrics["loss"], LINEAR(X).square().mean())
    torch.testing.assert_close(metrics["mae"], LINEAR(X).abs().mean())
    assert set(metrics) == {"loss", "mae"}


def test_integer_targets_of_the_outputs_shape_have_no_accuracy() -> None:
    def count_loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    assert set(supervised(count_loss)(LINEAR, (X, torch.zeros(6, 3, dtype=torch.int64)))) == {"loss"}


def test_a_target_that_would_be_broadcast_is_refused() -> None:
    with pytest.raises(ValueError, match=r"target of shape \(6,\) for a model output of shape \(6, 3\)"):
        supervised(F.mse_loss)(LINEAR, (X, torch.zeros(6)))
    with pytest.raises(ValueError, match=r"target of shape \(6,\) for a model output of shape \(6, 1\)"):
        supervised(F.mse_loss)(nn.Linear(4, 1), (X, torch.zeros(6)))


def broadcasting(output: Tensor, target: Tensor) -> Tensor:
    """[N, 1] against [N] is [N, N]."""
    return (output - target).square().mean()


def quantiles(output: Tensor, target: Tensor) -> Tensor:
    """Pinball losses of two quantiles, [N, 2], of one target, [N]."""
    error = target[:, None] - output
    return torch.maximum(error * torch.tensor([0.1, 0.9]), error * torch.tensor([-0.9, -0.1])).mean()


def test_a_loss_of_ones_own_may_bring_output_and_target_together() -> None:
    model, target = nn.Linear(4, 1), torch.linspace(-1, 1, 6)
    metrics = checked(supervised(lambda output, target: F.mse_loss(output.squeeze(-1), target)))(model, (X, target))
    torch.testing.assert_close(metrics["mae"], (model(X).squeeze(-1) - target).abs().mean())
    assert set(checked(supervised(quantiles))(nn.Linear(4, 2), (X, target))) == {"loss"}
    unread = checked(supervised(lambda output, target: output.square().mean()))
    assert set(unread(nn.Linear(4, 2), (X, target))) == {"loss"}


def test_a_loss_of_ones_own_that_broadcasts_them_is_refused_in_a_dry_run() -> None:
    nn.init.zeros_((model := nn.Linear(4, 1)).weight)  # all outputs are alike
    with pytest.raises(ValueError, match=r"of shape \(6, 1\).* or `loss_fn` must bring them together"):
        checked(supervised(broadcasting))(model, (X, torch.linspace(-1, 1, 6)))


def test_so_is_one_that_broadcasts_whole_numbers() -> None:
    ages, model = torch.arange(6), nn.Linear(4, 1)
    with pytest.raises(ValueError, match=r"of shape \(6, 1\): a target must have the output's shape"):
        checked(supervised(broadcasting))(model, (X, ages))
    assert "loss" in checked(supervised(lambda o, t: broadcasting(o.squeeze(-1), t)))(model, (X, ages))
    by_class = supervised(lambda output, target: -output.log_softmax(1).gather(1, target[:, None]).mean())
    assert "loss" in checked(by_class)(LINEAR, (X, ages % 3))


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(0, keepdim=True)


def against_all(output: Tensor, target: Tensor) -> Tensor:
    return (output - target.to(output.dtype).reshape(-1, 1)).square().mean()


def test_one_row_for_all_targets_is_refused_in_a_dry_run() -> None:
    mean = nn.Sequential(LINEAR, Mean())
    with pytest.raises(ValueError, match=r"an output of shape \(1, 3\) for 6 targets \(6,\), but must return a row"):
        checked(supervised(against_all))(mean, (X, torch.arange(6)))
    assert "loss" in checked(supervised(against_all))(mean, (X[:1], torch.arange(1)))
    leading = nn.Sequential(LINEAR, nn.Unflatten(0, (1, -1)))  # [1, N, C], as the state of an LSTM's only layer
    assert "loss" in checked(supervised(lambda o, t: F.cross_entropy(o[0], t)))(leading, (X, torch.arange(6) % 3))


@pytest.mark.parametrize(
    ("loss_fn", "returned"),
    [
        (partial(F.cross_entropy, reduction="none"), r"a tensor of shape \(6,\)"),
        (lambda output, target: F.cross_entropy(output, target).item(), "a float"),
    ],
)
def test_a_loss_that_is_no_scalar_tensor_is_refused_in_a_dry_run(loss_fn: Any, returned: str) -> None:
    with pytest.raises(ValueError, match=f"`loss_fn` returned {returned}, but must return a scalar tensor"):
        checked(supervised(loss_fn))(LINEAR, (X, torch.zeros(6, dtype=torch.int64)))


@pytest.mark.parametrize("target", [torch.arange(6) % 3, torch.tensor([-100, 0, -100, 1, 2, -100])])
def test_a_sum_over_the_batch_is_refused_in_a_dry_run(target: Tensor) -> None:
    """It would be larger for trials of a larger batch size."""
    with pytest.raises(ValueError, match=r"returned twice the loss .* as a sum does, but must return the mean loss"):
        checked(supervised(nn.CrossEntropyLoss(reduction="sum")))(LINEAR, (X, target))
    assert "loss" in checked(supervised(nn.CrossEntropyLoss()))(LINEAR, (X, target))
    own = checked(supervised(lambda output, target: (output - target).square().sum(1).mean()))
    assert "loss" in own(LINEAR, (X, torch.randn(6, 3)))


def test_a_target_without_rows_is_no_sum() -> None:
    scaled = checked(supervised(lambda output, target: target * output.square().mean()))
    assert "loss" in scaled(LINEAR, (X, torch.tensor(2.0)))


SOFT = torch.eye(3)[[0, 1, 2, 0, 1, 2]] * 0.9 + 0.1 / 3


@pytest.mark.parametrize(
    ("outputs", "target", "fault"),
    [
        (1, torch.randn(6, 1), r"an output of shape \(6, 1\) has one class.* give loss_fn=F.mse_loss for regression"),
        (1, torch.tensor([0, 1, 0, 1, 0, 1]), r"an output of shape \(6, 1\) has one class.* two outputs"),
        (1, torch.tensor([[0], [1], [0], [1], [0], [1]]), "has one class"),
        (3, SOFT - 0.2, "the rows of the floating-point target are no probabilities; give loss_fn=F.mse_loss"),
        (3, SOFT * 2, "no probabilities"),
        (3, torch.full((6, 3), torch.nan), "no probabilities"),
        (3, torch.tensor([0, 1, 2, 3, 1, 2]), "a target is 3, none of the output's 3 classes, from 0 to 2"),
        (3, torch.tensor([0, 1, 2, -1, 1, 2]), "a target is -1, none of"),
        (3, torch.tensor([0, 1, 2, 156, 1, 2], dtype=torch.uint8), "a target is 156, none of"),
    ],
)
def test_the_default_loss_where_it_measures_nothing(outputs: int, target: Tensor, fault: str) -> None:
    model = nn.Linear(4, outputs)
    with pytest.raises(ValueError, match=rf"^`loss_fn` is cross_entropy \(the default\), but .*{fault}"):
        checked(supervised())(model, (X, target))


def test_so_does_its_module_and_no_accuracy_is_told_of_one_class() -> None:
    model, target = nn.Linear(4, 1), torch.tensor([0, 1, 0, 1, 0, 1])
    with pytest.raises(ValueError, match=r"^`loss_fn` is cross_entropy, but an output of shape \(6, 1\) has one class"):
        checked(supervised(nn.CrossEntropyLoss()))(model, (X, target))
    ignoring = checked(supervised(nn.CrossEntropyLoss(ignore_index=9)))
    assert "loss" in ignoring(LINEAR, (X, target.masked_fill(target == 1, 9)))
    binary = checked(supervised(lambda o, t: F.binary_cross_entropy_with_logits(o.squeeze(1), t.float())))
    assert set(binary(model, (X, target))) == {"loss"}
    two_classes = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    assert supervised()(nn.Identity(), (two_classes, torch.tensor([0, 1])))["accuracy"] == 0.5


def test_an_output_without_classes_is_refused() -> None:
    flat = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    for target in (torch.zeros(6), torch.zeros(6, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"an output of shape \(6,\) has one class"):
            checked(supervised())(flat, (X, target))


@pytest.mark.parametrize("target", [SOFT, SOFT.half().float(), torch.tensor([0, 1, 2, -100, 1, 2])])
def test_soft_labels_and_left_out_ones_are_classes(target: Tensor) -> None:
    metrics = checked(supervised())(LINEAR, (X, target))
    torch.testing.assert_close(metrics, supervised()(LINEAR, (X, target)))


def test_another_loss_knows_itself_what_it_takes() -> None:
    assert checked(supervised(F.mse_loss))(nn.Linear(4, 1), (X, torch.randn(6, 1)))["loss"] > 0


@pytest.mark.parametrize("batch", [X, (X,), (X, X, X), {"x": X}, (X, [1, 2])])
def test_batches_are_pairs(batch: Any) -> None:
    with pytest.raises(ValueError, match=r"`loss_fn` needs \(inputs, target\)"):
        supervised()(LINEAR, batch)


class Returns(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": x}


def test_a_model_that_returns_no_tensor() -> None:
    with pytest.raises(ValueError, match="the model returns a dict, but `loss_fn` needs a tensor"):
        supervised()(Returns(), (X, torch.zeros(6, dtype=torch.int64)))


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (torch.tensor(1.0), "`objective` returned a Tensor, but must return a dict of tensors"),
        ({3: torch.tensor(1.0)}, "`objective` returned a dict with the key 3, but must name each value by a text"),
        ({"": torch.tensor(1.0)}, "`objective` returned a dict with the key '', but must name"),
        ({"loss": 1.0}, "`objective` returned 'loss' as a float, but must return a dict of tensors"),
        ({"loss": torch.tensor(1.0), "note": "fine"}, "returned 'note' as a str, but must return a dict"),
        ({}, 'must return a "loss"'),
        ({"nll": torch.tensor(1.0)}, r"returned \['nll'\], but must return a \"loss\""),
        ({"nll": torch.tensor(1.0), "weight/loss": torch.tensor(3)}, r"returned \['nll'\], but must"),
        ({"loss": torch.ones(3)}, r"returned 'loss' of shape \(3,\), but must return scalars"),
        ({"loss": torch.tensor(1.0), "hits": torch.ones(2)}, r"returned 'hits' of shape \(2,\)"),
        ({"loss": torch.tensor(1)}, r'"loss" of torch.int64, but must return a float'),
    ],
)
def test_metrics_by_hand_are_checked(metrics: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_metrics(metrics)


def test_a_loss_and_an_objective_are_told_the_configuration() -> None:
    config = {"lr": 0.1, "gamma": 2.0, "net": {"depth": 3}, "optimizer": "sgd", "momentum": 0.9}
    model = nn.Linear(4, 3)
    give_config(model, steering(config))
    told: list[dict[str, Any]] = []

    def loss_fn(output: Tensor, target: Tensor, config: Any) -> Tensor:
        told.append(dict(config))
        return output.mean()

    def objective(model: nn.Module, batch: Any, config: Any) -> dict[str, Tensor]:
        return {"loss": loss_fn(model(batch[0]), batch[1], config)}

    batch = (X, torch.zeros(6, dtype=torch.int64))
    as_objective(None, loss_fn)(model, batch)
    as_objective(objective, loss_fn)(model, batch)
    assert told == [{"gamma": 2.0, "net": {"depth": 3}}] * 2
    with pytest.raises(KeyError, match=r"'lr': an objective's `config` has the keys \['gamma', 'net'\]"):
        as_objective(lambda model, batch, config: config["lr"], loss_fn)(model, batch)


@pytest.mark.parametrize(
    ("metrics", "match"),
    [
        ({"weight": torch.tensor(-1)}, "returned a 'weight' of -1, but must return a number >= 0"),
        ({"weight/loss": torch.tensor(float("nan"))}, "returned a 'weight/loss' of nan"),
        ({"weight/f1": torch.tensor(1)}, "returned 'weight/f1', but no 'f1', of which that is the weight"),
        ({"weight": torch.ones(2)}, r"returned 'weight' of shape \(2,\), but must return scalars"),
    ],
)
def test_weights_are_numbers_beside_their_means(metrics: dict[str, Tensor], match: str) -> None:
    check_metrics(
        {
            "loss": torch.tensor(1.0),
            "hits": torch.tensor(3),
            "weight": torch.tensor(0),
            "weight/hits": torch.tensor(2.0),
        }
    )
    with pytest.raises(ValueError, match=match):
        check_metrics({"loss": torch.tensor(1.0), **metrics})
