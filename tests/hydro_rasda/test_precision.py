"""bfloat16 and TF32: what computes in them, what does not, and how far scores lie from float32's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hydro_rasda import RunExists, TuneResult
from hydro_rasda.config import TuneConfig
from hydro_rasda.contracts import Group, GroupTask, Span, TargetOutcome, TargetTask
from hydro_rasda.data import Batch
from hydro_rasda.objective import Objective, supervised
from hydro_rasda.precision import as_given, in_precision, matrix_products
from hydro_rasda.problem import Problem, Trial, dry_run
from hydro_rasda.training.full_size import train_target
from hydro_rasda.training.fused import train_group

EPOCHS = 6


def convolutions(config: Any, width_ratio: float = 1.0) -> nn.Module:
    width = int(16 * width_ratio)
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(9 * width, 10),
    )


class Rows(nn.Module):
    """Reads an image row by row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.LSTM(8, width, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.layer(x.unflatten(1, (8, 8)))
        last: Tensor = self.head(states[:, -1])
        return last


def recurrent(config: Any, width_ratio: float = 1.0) -> nn.Module:
    return Rows(int(32 * width_ratio))


def computed_in(problem: Problem, precision: Any) -> Problem:
    problem = problem.with_settings(precision=precision)
    return replace(problem, objective=in_precision(as_given(problem.objective), precision))


def trials(*rates: float) -> dict[int, Trial]:
    config = {"optimizer": "adamw", "batch_size": 32, "schedule": "cosine"}
    return {n: Trial(n, {**config, "lr": lr}) for n, lr in enumerate(rates)}


def group(problem: Problem, tried: dict[int, Trial], *numbers: int) -> Any:
    task = GroupTask("group", (Group("kind", numbers or tuple(tried), True),), (), Span(0, problem.settings.max_t))
    outcome = train_group(problem, tried, task, load=lambda key: {})
    assert not outcome.failures, outcome.failures
    return outcome


def dtypes(state: Any) -> set[torch.dtype]:
    return {t.dtype for t in tree_leaves(state) if isinstance(t, Tensor) and t.is_floating_point()}


def full_size(problem: Problem) -> TargetOutcome:
    """One epoch."""
    (trial,) = trials(1e-2).values()
    outcome = train_target(problem, trial, TargetTask("key", 0, Span(0, 1), None, 0, 1), None)
    assert outcome.error is None, outcome.error
    return outcome


@pytest.fixture(params=["mlp", "convolutions", "recurrent"])
def task(request: pytest.FixtureRequest, problem: Problem) -> Problem:
    model_fn = {"mlp": problem.model_fn, "convolutions": convolutions, "recurrent": recurrent}[request.param]
    return replace(problem, model_fn=model_fn, settings=TuneConfig(surrogate=0.5, max_t=EPOCHS))


def test_scores_lie_near_those_of_float32(task: Problem) -> None:
    """Where the learning rate is high, training magnifies rounding; nothing that is kept is in bfloat16."""
    tried = trials(1e-3, 3e-3, 3e-2)
    full, half = (group(computed_in(task, precision), tried) for precision in ("fp32", "bf16"))
    for n, bound in enumerate((0.02, 0.02, 0.2)):
        (_, exact), (_, rounded) = full.history[n][-1], half.history[n][-1]
        assert 0 < abs(exact["val_loss"] - rounded["val_loss"]) < bound
        assert abs(exact["val_accuracy"] - rounded["val_accuracy"]) <= 0.05
    assert full.history[2][-1][1]["val_accuracy"] > 0.6
    assert torch.bfloat16 not in dtypes(half.checkpoint)


def test_a_member_that_diverges_harms_no_other(task: Problem) -> None:
    problem = computed_in(task, "bf16")
    beside = [group(problem, trials(lr, 1e-2, 3e-2)) for lr in (3e-3, 1e30)]
    assert not beside[1].history[0][-1][1]["train_loss"] < 100
    assert all(beside[0].history[n] == beside[1].history[n] for n in (1, 2))


def test_a_group_is_what_each_is_alone(task: Problem) -> None:
    """But for rounding: bfloat16 has 8 bits."""
    problem, tried = computed_in(task, "bf16"), trials(3e-3, 1e-2)
    together = group(problem, tried)
    for n in tried:
        (_, own), (_, shared) = group(problem, tried, n).history[n][-1], together.history[n][-1]
        assert own["val_loss"] == pytest.approx(shared["val_loss"], abs=0.02)


def test_full_size_models_compute_in_it_too(problem: Problem) -> None:
    seen: list[torch.dtype] = []

    def objective(model: nn.Module, batch: Batch) -> Any:
        metrics = supervised()(model, batch)
        seen.append(model(batch[0]).dtype)
        return metrics

    problem = computed_in(replace(problem, objective=objective), "bf16")
    outcome = full_size(problem)
    assert {*seen} == {torch.bfloat16}
    assert torch.bfloat16 not in dtypes(outcome.state)


@pytest.fixture
def torchs_own() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize(("precision", "used"), [("tf32", True), ("fp32", False), ("bf16", False)])
def test_tf32_is_allowed_while_models_train(problem: Problem, torchs_own: None, precision: str, used: bool) -> None:
    """On CUDA it then counts; that these switches are set can be seen anywhere."""
    seen: set[tuple[bool, bool]] = set()

    def objective(model: nn.Module, batch: Batch) -> Any:
        seen.add((torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32))
        return supervised()(model, batch)

    problem = computed_in(replace(problem, objective=objective), precision)
    full_size(problem)
    assert seen == {(used, used)}
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (False, False)


def test_torch_is_left_as_it_was_where_training_raises(torchs_own: None) -> None:
    with pytest.raises(RuntimeError), matrix_products("tf32"):
        raise RuntimeError
    assert not torch.backends.cuda.matmul.allow_tf32


def test_a_wrong_target_is_told_as_ever(problem: Problem) -> None:
    objective: Objective = supervised()
    wrong = replace(problem, model_fn=lambda config, width_ratio: nn.Linear(64, 5), objective=objective)
    with pytest.raises(ValueError, match="none of the output's 5 classes"):
        dry_run(computed_in(wrong, "bf16"), trials(1e-2).values())


def test_a_search_in_bfloat16(quick: Callable[..., TuneResult]) -> None:
    result = quick(precision="bf16", metric="val_accuracy", mode="max")
    assert result.best_metric > 0.8
    assert {p.dtype for p in result.best_model().parameters()} == {torch.float32}
    with pytest.raises(RunExists, match="precision"):
        quick(metric="val_accuracy", mode="max")


@pytest.mark.parametrize("precision", ["fp16", "float32", None, 16])
def test_other_precisions_are_refused(precision: Any) -> None:
    with pytest.raises(ValueError, match=r"`precision` is .*fp32.*tf32.*bf16.*float16"):
        TuneConfig(precision=precision)
