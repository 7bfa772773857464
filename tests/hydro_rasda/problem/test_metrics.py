from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from sklearn.metrics import f1_score, roc_auc_score
from torch import Tensor, nn
from torch.nn import functional as F

from hydro_rasda import TuneResult
from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import Group, Span, Task
from hydro_rasda.data import Shard
from hydro_rasda.problem.metrics import Collected, of_members
from hydro_rasda.problem.objective import as_objective
from hydro_rasda.problem.problem import Problem
from hydro_rasda.training.full_size import full_size_learner
from hydro_rasda.training.group_training import train_group
from hydro_rasda.training.loop import train_epochs
from tests.hydro_rasda.ranks import on_ranks

pytestmark = pytest.mark.usefixtures("one_process")


def scores(outputs: Tensor, targets: Tensor) -> dict[str, Any]:
    """What no mean over batches gives."""
    auc = roc_auc_score(targets, outputs.softmax(-1), multi_class="ovr")
    return {"auc": auc, "f1": f1_score(targets, outputs.argmax(-1), average="macro")}


@pytest.fixture
def scored(problem: Problem) -> Problem:
    objective = as_objective(None, F.cross_entropy, collected=True)
    return replace(problem, objective=objective, metrics=scores, whole_names=("auc", "f1"))


def test_each_member_of_a_group_has_its_own(scored: Problem, digits: Any) -> None:
    """In parts of batches, too, of which the last is smaller than the others."""
    seen: list[tuple[Tensor, Tensor]] = []

    def noting(outputs: Tensor, targets: Tensor) -> dict[str, Any]:
        seen.append((outputs, targets))
        return scores(outputs, targets)

    config = {"lr": 0.1, "optimizer": "sgd", "batch_size": 11, "accumulate": 3}
    trials = {n: Trial(n, {**config, "lr": 0.1 / (n + 1)}) for n in range(3)}
    task = Task("to-1/0", (Group("kind", (0, 1, 2), fused=True),), (), Span(0, 1))
    outcome = train_group(replace(scored, metrics=noting), trials, task, lambda key: {})
    assert not outcome.failures
    _, (_, y) = digits
    for (outputs, targets), history in zip(seen, outcome.history.values(), strict=True):
        ((_, found),) = history
        assert torch.equal(targets, y)
        assert found["val_loss"] == pytest.approx(F.cross_entropy(outputs, y).item(), rel=1e-5)
        assert (found["val_auc"], found["val_f1"]) == tuple(scores(outputs, y).values())


def on_rank(rank: int, world: int, problem: Problem) -> list[dict[str, list[float]]]:
    trial = Trial(0, {"lr": 0.05, "optimizer": "sgd", "batch_size": 11})
    learner = full_size_learner(problem, trial, Shard(rank, world))
    return [metrics for _, metrics in train_epochs(learner, problem, Span(0, 2), 11, [0])]


def in_order(outputs: Tensor, targets: Tensor) -> dict[str, float]:
    """Changes with the order of the examples."""
    place = torch.arange(len(targets)) / len(targets)
    return {"auc": float((targets * place).sum()), "f1": float((outputs.argmax(-1) * place).sum())}


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_see_all_examples_in_their_order(scored: Problem, world: int) -> None:
    """160 examples in batches of 44: the last has 28."""
    ordered = replace(scored, metrics=in_order)
    (alone,) = on_ranks(1, on_rank, ordered)
    for found in on_ranks(world, on_rank, ordered):
        for a, b in zip(alone, found, strict=True):
            assert a["val_auc"] == b["val_auc"]
            assert a["val_f1"] == pytest.approx(b["val_f1"], rel=0.02)


def test_a_member_that_diverged_has_none() -> None:
    collected = Collected()
    outputs = torch.tensor([[0.1, 0.9], [math.nan, math.nan]])
    collected.take({"loss": torch.zeros(2), "outputs": outputs, "targets": torch.tensor([[0, 1], [0, 1]])}, 2)
    found = of_members(lambda o, t: {"auc": roc_auc_score(t, o)}, collected, [0.5, math.nan], ["auc"])
    assert found["auc"][0] == 1.0
    assert math.isnan(found["auc"][1])


def test_trials_are_compared_by_it(quick: Callable[..., TuneResult], digits: Any) -> None:
    result = quick(metrics=scores, metric="val_auc", mode="max")
    assert result.best_metric == max(record.metric for record in result.trials if record.epochs)
    assert 0.5 < result.best_metric <= 1
    assert result.evaluate(digits[1])["auc"] == pytest.approx(result.best_metric)


def test_an_objective_says_what_it_is_of(quick: Callable[..., TuneResult]) -> None:
    def objective(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        output = model(batch[0])
        losses = F.cross_entropy(output, batch[1], reduction="none")
        return {"loss": losses.mean(), "outputs": losses, "targets": batch[1]}

    def worst(outputs: Tensor, targets: Tensor) -> dict[str, float]:
        return {"worst class": max(float(outputs[targets == c].mean()) for c in range(10))}

    result = quick(objective=objective, metrics=worst, metric="val_worst class", num_samples=3)
    assert all("val_worst class" in line for record in result.trials for line in record.history)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"metrics": lambda outputs: {}}, "`metrics` is .*, but must be None, or a function"),
        ({"metrics": lambda outputs, targets: 1.0}, "`metrics` fails on the whole .* must return a dict of numbers"),
        ({"metrics": lambda outputs, targets: {"loss": 1.0}}, r"`metrics` is \['loss'\], but must be a function whose"),
        ({"metrics": lambda outputs, targets: outputs + targets}, r"`metrics` fails on the whole validation set, \[\("),
        ({"metrics": scores, "metric": "val_ap"}, "`metric` is 'val_ap', but must be one of .*'val_auc'"),
        (
            {"metrics": scores, "objective": lambda model, batch: {"loss": model(batch[0]).mean()}},
            "must return 'outputs' and 'targets', too",
        ),
        (
            {
                "metrics": scores,
                "objective": lambda model, batch: {"loss": model(batch[0]).mean(), "outputs": {}, "targets": batch[1]},
            },
            "`objective` returned 'outputs' as a dict, but must return a tensor, since",
        ),
    ],
)
def test_bad_input_is_refused_before_any_work(
    quick: Callable[..., TuneResult], arguments: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        quick(**arguments)
