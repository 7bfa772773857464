"""bfloat16, float16 and TF32: what computes in them, what does not, and how far scores lie from float32's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hydro_rasda import RunExists, SweepConfig, TuneResult
from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import Group, Outcome, Span, Task, full_size_task
from hydro_rasda.data import Batch, Shard, Share
from hydro_rasda.dry_run.dry_run import dry_run
from hydro_rasda.problem.objective import Objective, supervised
from hydro_rasda.problem.precision import Autocast, as_given, in_precision, matrix_products
from hydro_rasda.problem.problem import Problem
from hydro_rasda.settings.config import TuneConfig
from hydro_rasda.training.full_size import full_size_learner, train_full_size_trial
from hydro_rasda.training.group_training import train_group
from tests.hydro_rasda.ranks import on_ranks
from tests.recorder import DEVICE

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_process")]

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


def test_half_precision_results_become_float32() -> None:
    """The mean of a matrix product has its format; a number of another format stays as it is."""
    counted = torch.tensor(4)
    objective = Autocast(lambda model, batch: {"loss": model(batch).mean(), "count": counted})
    metrics = objective(nn.Linear(3, 2).to(DEVICE), torch.ones(4, 3, device=DEVICE))
    assert metrics["loss"].dtype == torch.float32
    assert metrics["count"] is counted


def recurrent(config: Any, width_ratio: float = 1.0) -> nn.Module:
    return Rows(int(32 * width_ratio))


def computed_in(problem: Problem, precision: Any) -> Problem:
    problem = problem.with_settings(precision=precision)
    return replace(problem, objective=in_precision(as_given(problem.objective), precision))


def trials(*rates: float) -> dict[int, Trial]:
    config = {"optimizer": "adamw", "batch_size": 32, "schedule": "cosine"}
    return {n: Trial(n, {**config, "lr": lr}) for n, lr in enumerate(rates)}


def group(problem: Problem, tried: dict[int, Trial], *numbers: int) -> Any:
    task = Task("group", (Group("kind", numbers or tuple(tried), True),), (), Span(0, problem.settings.max_t))
    outcome = train_group(problem, tried, task, load=lambda key: {})
    assert not outcome.failures, outcome.failures
    return outcome


HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
in_half = pytest.mark.parametrize("half", HALF)


def check_kernels(task: Problem, half: str) -> None:
    if task.model_fn is not recurrent or DEVICE.type != "cpu":
        return
    if half == "fp16":
        pytest.skip("torch has no LSTM in float16 for most CPUs")
    try:
        with torch.autocast("cpu", HALF[half]):
            nn.LSTM(4, 4)(torch.ones(1, 1, 4))
    except RuntimeError as error:
        pytest.skip(f"torch has no LSTM in {HALF[half]} for this CPU: {error}")


def dtypes(state: Any) -> set[torch.dtype]:
    return {t.dtype for t in tree_leaves(state) if isinstance(t, Tensor) and t.is_floating_point()}


def full_size(problem: Problem) -> Outcome:
    """One epoch."""
    (trial,) = trials(1e-2).values()
    outcome = train_full_size_trial(problem, trial, full_size_task("key", 0, Span(0, 1), None, 0, 1), None)
    assert outcome.error is None, outcome.error
    return outcome


@pytest.fixture
def problem(problem: Problem) -> Problem:
    return problem.on(DEVICE)


TASKS = ("mlp", "convolutions", "recurrent")
each_in_half = pytest.mark.parametrize(
    ("task", "half"),
    [
        # Most CPUs have no convolutions in float16: there, these take as long as all others.
        pytest.param(task, half, marks=[pytest.mark.slow] * ((task, half) == ("convolutions", "fp16")))
        for task in TASKS
        for half in HALF
    ],
    indirect=["task"],
)


@pytest.fixture
def task(request: pytest.FixtureRequest, problem: Problem) -> Problem:
    model_fn = {"mlp": problem.model_fn, "convolutions": convolutions, "recurrent": recurrent}[request.param]
    return replace(problem, model_fn=model_fn, settings=TuneConfig(sweep=SweepConfig(surrogate=0.5), max_t=EPOCHS))


@each_in_half
def test_scores_lie_near_those_of_float32(task: Problem, half: str) -> None:
    """Where the learning rate is high, training magnifies rounding; nothing that is kept is in half precision."""
    check_kernels(task, half)
    tried = trials(1e-3, 3e-3, 3e-2)
    full, rough = (group(computed_in(task, precision), tried) for precision in ("fp32", half))
    for n, bound in enumerate((0.02, 0.02, 0.2)):
        (_, exact), (_, rounded) = full.history[n][-1], rough.history[n][-1]
        assert 0 < abs(exact["val_loss"] - rounded["val_loss"]) < bound
        assert abs(exact["val_accuracy"] - rounded["val_accuracy"]) <= (0.05 if DEVICE.type == "cpu" else 0.07)
    assert full.history[2][-1][1]["val_accuracy"] > 0.6
    assert HALF[half] not in dtypes(rough.checkpoint)


@each_in_half
def test_a_member_that_diverges_harms_no_other(task: Problem, half: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # else two equal trainings differ on a GPU
    check_kernels(task, half)
    problem = computed_in(task, half)
    beside = [group(problem, trials(lr, 1e-2, 3e-2)) for lr in (3e-3, 1e30)]
    assert not beside[1].history[0][-1][1]["train_loss"] < 100
    assert all(beside[0].history[n] == beside[1].history[n] for n in (1, 2))


@each_in_half
def test_a_group_is_what_each_is_alone(task: Problem, half: str) -> None:
    """But for rounding: bfloat16 has 8 bits."""
    check_kernels(task, half)
    problem, tried = computed_in(task, half), trials(3e-3, 1e-2)
    together = group(problem, tried)
    for n in tried:
        (_, own), (_, shared) = group(problem, tried, n).history[n][-1], together.history[n][-1]
        assert own["val_loss"] == pytest.approx(shared["val_loss"], abs=0.02 if DEVICE.type == "cpu" else 0.05)


@in_half
def test_full_size_models_compute_in_it_too(problem: Problem, half: str) -> None:
    seen: list[torch.dtype] = []

    def objective(model: nn.Module, batch: Batch) -> Any:
        metrics = supervised()(model, batch)
        seen.append(model(batch[0]).dtype)
        return metrics

    problem = computed_in(replace(problem, objective=objective), half)
    outcome = full_size(problem)
    assert {*seen} == {HALF[half]}
    assert HALF[half] not in dtypes(outcome.state)


def overflowing(model: nn.Module, batch: Batch) -> Any:
    """About every other step."""
    metrics = supervised()(model, batch)
    return {**metrics, "loss": metrics["loss"] * torch.where(batch[0].sum() > 32 * 19.5, 1e36, 1.0)}


def test_training_in_float16_goes_on_where_it_was(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the loss scales, which steps that overflow halve and others double: in groups and at full size."""
    monkeypatch.setattr("fusion.optim.loss_scale.INTERVAL", 2)
    problem, tried = computed_in(replace(problem, objective=overflowing), "fp16"), trials(1e-2, 3e-3)
    members, spans = Group("kind", (0, 1), True), (Span(0, 1), Span(1, 4))
    first = train_group(problem, tried, Task("first", (members,), (), spans[0]), load=lambda key: {})
    parts = {"parts": copy.deepcopy(first.checkpoint)}
    second = train_group(problem, tried, Task("second", (members,), ("first",), spans[1]), lambda key: parts)
    whole = group(problem, tried)
    assert first.history[1] + second.history[1] == whole.history[1]
    scales = [of.checkpoint[0]["state"]["loss_scale"]["scale"] for of in (first, second, whole)]
    assert torch.equal(scales[1], scales[2])
    assert not torch.equal(scales[0], scales[1])

    def at_full_size(span: Span, state: Any) -> Outcome:
        outcome = train_full_size_trial(problem, tried[0], full_size_task("key", 0, span, None, 0, 1), state)
        assert outcome.error is None, outcome.error
        return outcome

    once = at_full_size(Span(0, 4), None)
    begun = at_full_size(spans[0], None)
    ended = at_full_size(spans[1], copy.deepcopy(begun.state))
    assert begun.epochs + ended.epochs == once.epochs
    assert torch.equal(once.state["loss_scale"]["scale"], ended.state["loss_scale"]["scale"])


def two_ranks(rank: int, world: int, problem: Problem) -> Any:
    """The first example of each batch, which the first rank has, is of too large a loss in the second step."""

    def objective(model: nn.Module, batch: Batch) -> Any:
        return {"loss": supervised()(model, batch[:2])["loss"] * batch[2].max()}

    problem = computed_in(replace(problem, objective=objective), "fp16")
    (trial,) = trials(1e-2).values()
    learner = full_size_learner(problem, trial, Shard(rank, world))
    x, y = next(problem.train_data.epoch(32, 0))
    taken = []
    for step in range(4):
        boost = torch.ones(16)
        boost[0] = 1e38 if (rank, step) == (1, 1) else 1.0
        before = copy.deepcopy(learner.model.state_dict())
        learner.step(Share((x[rank::world], y[rank::world], boost), 16, 1.0), 0.0, 1)
        taken.append(any(not torch.equal(t, before[name]) for name, t in learner.model.state_dict().items()))
    return taken, learner.state()


def test_all_ranks_leave_out_a_step_that_overflows_on_one(problem: Problem) -> None:
    (taken, state), (others, other) = on_ranks(2, two_ranks, problem.on(torch.device("cpu")))
    assert taken == others == [True, False, True, True]
    assert all(torch.equal(value, other["model"][name]) for name, value in state["model"].items())
    assert state["loss_scale"]["scale"] == other["loss_scale"]["scale"] == 2.0**15


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


@in_half
def test_a_search_in_half_precision(quick: Callable[..., TuneResult], half: str) -> None:
    result = quick(precision=half, metric="val_accuracy", mode="max")
    assert result.best_metric > 0.8
    assert {p.dtype for p in result.best_model().parameters()} == {torch.float32}
    with pytest.raises(RunExists, match="precision"):
        quick(metric="val_accuracy", mode="max")


@pytest.mark.parametrize("precision", ["half", "float32", None, 16])
def test_other_precisions_are_refused(precision: Any) -> None:
    with pytest.raises(ValueError, match=r"`precision` is .*fp32.*tf32.*bf16.*fp16"):
        TuneConfig(precision=precision)
