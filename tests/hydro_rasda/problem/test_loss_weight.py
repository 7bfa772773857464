"""Means over batches, against the loss over the whole set in one batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusion import fuse
from hydro_rasda import RaceConfig, SweepConfig, TuneResult, loguniform, tune
from hydro_rasda.problem.metrics import summed
from hydro_rasda.problem.objective import Objective, as_objective, checked, supervised

pytestmark = pytest.mark.usefixtures("one_process")

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(72, 6, generator=GENERATOR)
CLASSES = torch.randint(0, 5, (72,), generator=GENERATOR)
CLASS_WEIGHT = torch.tensor([0.0, 1.0, 2.0, 0.5, 3.0])
TOKENS = torch.randn(72, 7, 5, generator=GENERATOR)
TOKEN_CLASSES = torch.randint(0, 5, (72, 7), generator=GENERATOR)

SOME = CLASSES.masked_fill(torch.rand(72, generator=GENERATOR) < 40 / 72, -100)
SOME[:16] = -100  # a whole batch

SOME_TOKENS = TOKEN_CLASSES.masked_fill(torch.rand(72, 7, generator=GENERATOR) < 0.7, -100)
SOME_TOKENS[16:32] = -100


def of_tokens(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def log_likelihood(output: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss(output.log_softmax(-1), target, CLASS_WEIGHT)


def twice(output: Tensor, target: Tensor) -> Tensor:
    """Two means over the same targets."""
    return F.cross_entropy(output, target) + 0.5 * F.cross_entropy(2 * output, target, label_smoothing=0.1)


LOSSES: dict[str, tuple[Callable[..., Tensor], Tensor, Tensor, Tensor]] = {
    "default": (F.cross_entropy, X, SOME, SOME != -100),
    "nothing ignored": (F.cross_entropy, X, CLASSES, CLASSES >= 0),
    "another index": (partial(F.cross_entropy, ignore_index=2), X, CLASSES, CLASSES != 2),
    "module": (nn.CrossEntropyLoss(CLASS_WEIGHT, ignore_index=1, label_smoothing=0.2), X, CLASSES, CLASSES != 1),
    "class weights": (nn.CrossEntropyLoss(CLASS_WEIGHT), X, SOME, SOME != -100),
    "nll": (log_likelihood, X, SOME, SOME != -100),
    "tokens": (of_tokens, TOKENS, SOME_TOKENS, SOME_TOKENS != -100),
    "two means": (twice, X, SOME, SOME != -100),
}


def model_for(x: Tensor, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(x.shape[-1], 5)


def over_batches(objective: Objective, model: Any, x: Tensor, y: Tensor, size: int) -> dict[str, Tensor]:
    batches = [(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)]
    return summed((objective(model, batch), len(batch[0])) for batch in batches).means()


@pytest.mark.parametrize("size", [16, 7, 72])
@pytest.mark.parametrize("case", LOSSES)
def test_means_are_those_of_the_whole_set_in_one_batch(case: str, size: int) -> None:
    loss_fn, x, y, counted = LOSSES[case]
    models = [model_for(x, seed) for seed in range(3)]
    each = [over_batches(supervised(loss_fn), model, x, y, size) for model in models]
    fused = fuse(models)
    of_fused = over_batches(lambda model, batch: fused.map(supervised(loss_fn), batch), None, x, y, size)
    for k, model in enumerate(models):
        output = model(x)
        expected = {
            "loss": loss_fn(output, y),
            "accuracy": (output.argmax(-1) == y)[counted].double().mean(),
        }
        for found in (each[k], {name: of_K[k] for name, of_K in of_fused.items()}):
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert found[name].item() == pytest.approx(value.item(), rel=1e-5), name


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loss_fn", [F.cross_entropy, nn.CrossEntropyLoss(CLASS_WEIGHT, label_smoothing=0.1)])
@pytest.mark.parametrize("target", [-100, 0])
def test_a_batch_without_a_target_that_counts_has_no_gradient(loss_fn: Any, target: int, fused: bool) -> None:
    if target == 0 and loss_fn is F.cross_entropy:
        loss_fn = partial(F.cross_entropy, ignore_index=0)
    batch, models = (X, torch.full((72,), target)), [model_for(X, seed) for seed in range(2)]
    group = fuse(models)
    metrics = group.map(supervised(loss_fn), batch) if fused else supervised(loss_fn)(models[0], batch)
    assert not metrics["weight/loss"].any()
    assert not metrics["loss"].any()
    metrics["loss"].sum().backward()
    for parameter in (group if fused else models[0]).parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


@pytest.mark.parametrize("weight", [None, torch.ones(2, dtype=torch.float16)])
def test_the_sum_over_many_targets_may_be_beyond_float16(weight: Tensor | None) -> None:
    output = torch.tensor([[0.0, 100.0]], dtype=torch.float16).repeat(1000, 1).requires_grad_()
    loss = supervised(nn.CrossEntropyLoss(weight))(nn.Identity(), (output, torch.zeros(1000).long()))["loss"]
    loss.backward()
    assert loss.item() == 100
    assert output.grad is not None
    assert output.grad[0].tolist() == pytest.approx([-0.001, 0.001], rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_loss_of_other_types_is_torchs_own(dtype: torch.dtype) -> None:
    output = torch.randn(4, 3, dtype=dtype, generator=GENERATOR)
    batch = (output, torch.tensor([0, 1, 2, 0]))
    torch.testing.assert_close(supervised()(nn.Identity(), batch)["loss"], F.cross_entropy(*batch))


@pytest.mark.parametrize("weight", [None, torch.linspace(0.1, 1, 200)])
def test_classes_of_uint8_are_those_of_int64(weight: Tensor | None) -> None:
    """Class 156 is no ignored one, and none of them is a mask."""
    output, classes = torch.randn(4, 200, generator=GENERATOR), torch.tensor([156, 1, 156, 7])
    objective = supervised(partial(F.cross_entropy, weight=weight))
    metrics = objective(nn.Identity(), (output, classes.to(torch.uint8)))
    torch.testing.assert_close(metrics, objective(nn.Identity(), (output, classes)))
    torch.testing.assert_close(metrics["loss"], F.cross_entropy(output, classes, weight))


def test_probabilities_count_by_rows() -> None:
    """Batches of another number of tokens count for more."""
    probabilities = torch.rand(8, 5, 3, generator=GENERATOR).softmax(1)
    metrics = supervised()(nn.Identity(), (torch.randn(8, 5, 3, generator=GENERATOR), probabilities))
    assert metrics["weight/loss"].item() == 24


def two_heads(output: Tensor, target: Tensor) -> Tensor:
    """Means over different targets: by none of them does the sum count."""
    return F.cross_entropy(output, target) + F.cross_entropy(output, target.roll(1, 0))


def own_mean(model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
    counted = batch[1] != -100
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return {"loss": losses.sum() / counted.sum().clamp(min=1), "largest": losses.max()}


def with_weight(model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
    return {**own_mean(model, batch), "weight": (batch[1] != -100).sum()}


def test_an_objective_says_what_nobody_can_ask() -> None:
    model = model_for(X)
    found = over_batches(as_objective(with_weight, F.cross_entropy), model, X, SOME, 16)
    assert found["loss"].item() == pytest.approx(F.cross_entropy(model(X), SOME).item(), rel=1e-5)
    for objective in (supervised(two_heads), as_objective(own_mean, F.cross_entropy)):
        objective(model, (X, SOME))  # the dry run alone warns, not each batch
        with pytest.warns(UserWarning, match="the loss does not tell how many of them it averages"):
            checked(objective)(model, (X, SOME))
    checked(as_objective(with_weight, F.cross_entropy))(model, (X, SOME))
    checked(supervised(two_heads))(model, (X, CLASSES))


def torchs_mean(model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
    """An objective that need not say anything; its other metric is over examples."""
    output = model(batch[0])
    return {"loss": F.cross_entropy(output, batch[1]), "size": output.square().mean()}


def test_an_objective_that_returns_torchs_mean_is_weighed_by_it() -> None:
    model = model_for(X)
    found = over_batches(as_objective(torchs_mean, F.cross_entropy), model, X, SOME, 16)
    assert found["loss"].item() == pytest.approx(F.cross_entropy(model(X), SOME).item(), rel=1e-5)
    assert found["size"].item() == pytest.approx(model(X).square().mean().item(), rel=1e-5)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize("loss_fn", [F.cross_entropy, nn.CrossEntropyLoss(CLASS_WEIGHT)])
def test_a_run_scores_what_the_model_scores(loss_fn: Any, size: int, accumulate: int, tmp_path: Path) -> None:
    """With whole batches that do not count, in training and validation; the sweep is fused."""

    def run(name: str, **changes: Any) -> TuneResult:
        return tune(
            lambda config: model_for(X, 1),
            {"lr": loguniform(0.01, 0.1), "batch_size": size, **changes},
            train_data=(X, SOME),
            val_data=(X, SOME),
            loss_fn=loss_fn,
            num_samples=3,
            max_t=2,
            sweep=SweepConfig(fusion=3, surrogate=1),
            race=RaceConfig(keep="last"),
            storage_path=tmp_path,
            name=name,
            progress=False,
        )

    result = run("run", accumulate=accumulate)
    with torch.no_grad():
        expected = loss_fn(result.best_model()(X), SOME).item()
    assert result.best_metric == pytest.approx(expected, rel=1e-5)
    for batch_size in (None, 5, 72):
        assert result.evaluate((X, SOME), batch_size)["loss"] == pytest.approx(expected, rel=1e-5)
    if accumulate > 1:
        whole = run("whole")
        for trial, other in zip(result.trials, whole.trials, strict=True):
            for line, of_whole in zip(trial.history, other.history, strict=True):
                assert line["train_loss"] == pytest.approx(of_whole["train_loss"], rel=1e-4)
