"""Several models of a trial, fused, against each of them trained by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from sklearn.model_selection import KFold
from torch import Tensor, nn
from torch.utils.data import Dataset

from hydro_rasda import RaceConfig, SweepConfig
from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import Group, Outcome, Span, Task, full_size_task
from hydro_rasda.data import make_batches, make_folds
from hydro_rasda.problem.objective import as_objective
from hydro_rasda.problem.problem import Problem
from hydro_rasda.settings.config import TuneConfig
from hydro_rasda.training.full_size import states_apart, train_full_size_trial
from hydro_rasda.training.fused_learner import FusedLearner
from hydro_rasda.training.group_training import LiveGroup, states_of, train_group
from tests.hydro_rasda.models import Config, mlp

pytestmark = pytest.mark.usefixtures("one_process")

Pair = tuple[Tensor, Tensor]
CPU = torch.device("cpu")
OBJECTIVE = as_objective(None, nn.functional.cross_entropy, False)

TRIALS = {
    number: Trial(number, {**config, "batch_size": 32})
    for number, config in enumerate(
        [
            {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "schedule": "cosine", "dropout": 0.2},
            {"optimizer": "adamw", "lr": 1e-2, "weight_decay": 0.1, "grad_clip": 0.5, "dropout": 0.1},
            {"optimizer": "sgd", "lr": 0.05, "momentum": 0.8, "dropout": 0.3},
        ]
    )
}


def wide(config: Config, width_ratio: float = 1.0) -> nn.Module:
    """An MLP in float64."""
    return mlp(config, width_ratio).double()


@pytest.fixture
def hundred(digits: tuple[Pair, Pair]) -> Pair:
    """100 examples in float64."""
    (x, y), _ = digits
    return x[:100].double(), y[:100]


def folded(data: Any, splitter: Any, seed: int = 0, **settings: Any) -> Problem:
    """The problem of a search over folds."""
    folds = make_folds(splitter, data, make_batches(data, "train_data", CPU, seed), seed)
    train_data, val_data = folds.data(0, seed)
    asked = TuneConfig(**{"sweep": SweepConfig(surrogate=0.5), "max_t": 4, "folds": len(folds), **settings})
    return Problem(
        wide, as_objective(None, nn.functional.cross_entropy, False), train_data, val_data, asked, CPU, folds=folds
    )


def repeated(digits: tuple[Pair, Pair], **settings: Any) -> Problem:
    """The problem of a search with three seeds."""
    train, val = ((x.double(), y) for x, y in digits)
    asked = TuneConfig(**{"sweep": SweepConfig(surrogate=0.5, repeats=3), "max_t": 4, **settings})
    batches = make_batches(train, "train_data", CPU, 0), make_batches(val, "val_data", CPU, 0)
    return Problem(wide, OBJECTIVE, *batches, asked, CPU)


def task(members: Sequence[int], start: int, stop: int, sources: tuple[str, ...] = (), fused: bool = True) -> Task:
    return Task(f"to-{stop}", (Group("kind", tuple(members), fused=fused),), sources, Span(start, stop))


def alone(problem: Problem, number: int, stop: int) -> tuple[list[float], Mapping[str, Tensor]]:
    """A single model of a trial, as a run of one model trains it: its scores, and its weights."""
    outcome = train_group(problem, TRIALS, task([number], 0, stop), lambda key: {})
    assert not outcome.failures
    (state,) = states_of(problem, TRIALS, number, "a group", lambda key: {"parts": outcome.checkpoint})
    return [metrics["val_loss"] for _, metrics in outcome.history[number]], state["model"]


def compare(problem: Problem, fused: bool = True) -> None:
    """Train all trials with all of their models to epoch 2, then two of them to epoch 3, and each model by itself."""
    problem = problem.with_settings(full_trainings=3.0 * problem.settings.models("sweep"))
    first = train_group(problem, TRIALS, task([0, 1, 2], 0, 2, fused=fused), lambda key: {})
    assert not first.failures
    going_on = task([2, 0], 2, 3, ("to-2",), fused)
    done = train_group(problem, TRIALS, going_on, lambda key: {"parts": first.checkpoint})
    assert not done.failures
    # In the process that trained them last, and as copies of each other, too.
    live = LiveGroup()
    train_group(problem, TRIALS, task([0, 1, 2], 0, 2, fused=fused), lambda key: {}, live=live)
    assert train_group(problem, TRIALS, going_on, _none_is_loaded, live=live).history == done.history
    train_group(problem, TRIALS, task([0, 1, 2], 0, 2, fused=fused), lambda key: {}, live=live)
    copied = replace(going_on, copies={2: 0})
    changed = TRIALS | {2: Trial(2, {**TRIALS[0].config, "lr": 0.07, "dropout": 0.3})}
    rebuilt = train_group(problem, changed, copied, lambda key: {"parts": first.checkpoint})
    assert train_group(problem, changed, copied, _none_is_loaded, live=live).history == rebuilt.history
    for number in (0, 2):
        scores = [metrics for _, metrics in first.history[number] + done.history[number]]
        states = states_of(problem, TRIALS, number, "", lambda key: {"parts": done.checkpoint})
        own = [alone(of_model, number, 3) for of_model in problem.each("sweep")]
        assert len(own) == len(states) == problem.settings.models("sweep")
        for epoch, metrics in enumerate(scores):
            of_models = [curve[epoch] for curve, _ in own]
            assert metrics["val_loss"] == pytest.approx(fmean(of_models), rel=1e-10)
            assert metrics["val_loss_std"] == pytest.approx(stdev(of_models), rel=1e-8)
        for state, (_, weights) in zip(states, own, strict=True):
            torch.testing.assert_close(dict(state["model"]), dict(weights), rtol=1e-9, atol=1e-12)


def _none_is_loaded(key: str) -> Mapping[str, Any]:
    raise AssertionError(key)


@pytest.mark.parametrize("fused", [True, False])
def test_fused_folds_equal_separate_trainings(hundred: Pair, fused: bool) -> None:
    compare(folded(hundred, KFold(3)), fused)  # training sets of 66 and 67 examples


def test_folds_are_validated_in_the_precision_in_which_they_train(
    hundred: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[bool] = set()
    evaluate = FusedLearner.evaluate_apart

    def noting(learner: FusedLearner, batches: Any) -> Any:
        seen.add(torch.backends.cuda.matmul.allow_tf32)
        return evaluate(learner, batches)

    monkeypatch.setattr(FusedLearner, "evaluate_apart", noting)
    problem = folded(hundred, KFold(3), precision="tf32")
    assert not train_group(problem, TRIALS, task([0, 1, 2], 0, 1), lambda key: {}).failures
    assert seen == {True}


def test_fused_seeds_equal_separate_trainings(digits: tuple[Pair, Pair]) -> None:
    compare(repeated(digits))


def test_seeds_of_each_fold_equal_separate_trainings(hundred: Pair) -> None:
    compare(folded(hundred, KFold(2), sweep=SweepConfig(surrogate=0.5, repeats=2)))


class Ragged(Dataset[Any]):
    """Examples whose length differs from batch to batch, as texts that are filled up do."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair

    def __len__(self) -> int:
        return len(self._pair[1])

    def __getitems__(self, rows: list[int]) -> list[Any]:
        x, y = self._pair
        width = 64 - rows[0] % 2
        return [(nn.functional.pad(x[row, :width], (0, 64 - width)), y[row], torch.zeros(width)) for row in rows]

    def __getitem__(self, row: int) -> Any:
        return self.__getitems__([row])[0]


def test_batches_of_other_shapes_train_one_after_another(hundred: Pair) -> None:
    problem = folded(Ragged(hundred), KFold(2, shuffle=True, random_state=0))

    def objective(model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(model(batch[0]), batch[1])}

    problem = replace(problem, objective=as_objective(objective, nn.functional.cross_entropy, False))
    shapes = [{batch[2].shape[1] for batch in own.train_data.epoch(16, 0)} for own in problem.each("sweep")]
    assert len({*shapes[0], *shapes[1]}) == 2
    compare(problem)


def test_parts_of_batches_are_those_of_each_model(hundred: Pair) -> None:
    problem = folded(hundred, KFold(3))
    found = []
    for parts in (1, 2):
        trials = {0: Trial(0, {**TRIALS[0].config, "dropout": 0.0, "accumulate": parts})}
        outcome = train_group(problem, trials, task([0], 0, 2), lambda key: {})
        found.append([metrics["val_loss"] for _, metrics in outcome.history[0]])
    assert found[0] == pytest.approx(found[1], rel=1e-10)


def test_whole_metrics_are_those_of_each_fold(hundred: Pair) -> None:
    problem = folded(hundred, KFold(3))

    def metrics(outputs: Tensor, targets: Tensor) -> Mapping[str, float]:
        return {"examples": float(len(outputs)), "hits": float((outputs.argmax(1) == targets).sum())}

    objective = as_objective(None, nn.functional.cross_entropy, True)
    problem = replace(problem, metrics=metrics, whole_names=("examples", "hits"), objective=objective)
    outcome = train_group(problem, TRIALS, task([0, 1, 2], 0, 1), lambda key: {})
    assert not outcome.failures
    for number in TRIALS:
        ((_, found),) = outcome.history[number]
        assert found["val_examples"] == pytest.approx(100 / 3)
        hits = [
            train_group(own, TRIALS, task([number], 0, 1), lambda key: {}).history[number][0][1]["val_hits"]
            for own in problem.each("sweep")
        ]
        assert found["val_hits"] == pytest.approx(fmean(hits))


def full_size(problem: Problem, number: int, span: Span, state: Any = None, **more: Any) -> Outcome:
    asked = full_size_task("a task", number, span, None, problem.settings.seed, **more)
    outcome = train_full_size_trial(problem, TRIALS[number], asked, state)
    assert outcome.error is None, outcome.error
    return outcome


def test_a_finalist_on_its_folds_is_a_training_on_each(hundred: Pair) -> None:
    problem = folded(hundred, KFold(3))
    first = full_size(problem, 0, Span(0, 2))
    done = full_size(problem, 0, Span(2, 4), first.state)
    own = [full_size(of_model, 0, Span(0, 4)) for of_model in problem.each("race")]
    for epoch, (_, metrics) in enumerate(first.epochs + done.epochs):
        assert metrics["val_loss"] == pytest.approx(fmean(of.epochs[epoch][1]["val_loss"] for of in own), rel=1e-12)
    for state, of in zip(states_apart(done.state, 3), own, strict=True):
        torch.testing.assert_close(state["model"], of.state["model"], rtol=0, atol=0)
    # All are kept at the same epoch, that of the best mean.
    assert len({state["best"]["epoch"] for state in states_apart(done.state, 3)} | {done.state["best"]["epoch"]}) == 1


def test_the_deviation_over_folds_is_that_of_the_weights_that_count(hundred: Pair) -> None:
    """Averages over half of a short training lag, and count in no fold."""
    own, both = (
        full_size(folded(hundred, KFold(3), race=RaceConfig(ema=ema)), 1, Span(0, 4)).epochs[-1][1] for ema in (0, 0.5)
    )
    assert both["val_loss_averaged"] > both["val_loss"]
    assert both.items() >= own.items()
    assert "val_loss_std" in own


def test_the_winner_is_trained_once_more_as_a_run_on_all_examples_trains_it(hundred: Pair) -> None:
    problem = folded(hundred, KFold(3), race=RaceConfig(ema=0))
    refit = full_size(problem, 0, Span(0, 3), refit=True).state
    whole = make_batches(hundred, "train_data", CPU, 0)
    plain = replace(problem, train_data=whole, val_data=whole, folds=None).with_settings(folds=0)
    trained = full_size(plain, 0, Span(0, 3)).state
    assert refit is not None
    assert trained is not None
    torch.testing.assert_close(refit["best"]["model"], trained["model"], rtol=0, atol=0)


def test_a_winner_that_diverges_on_all_examples_is_not_handed_back(hundred: Pair) -> None:
    problem, wild = folded(hundred, KFold(3)), Trial(0, {"optimizer": "sgd", "lr": 1e200, "batch_size": 32})
    outcome = train_full_size_trial(problem, wild, full_size_task("a task", 0, Span(0, 3), None, 0, refit=True), None)
    assert not outcome.checkpoint
    assert outcome.error is not None
    assert "FloatingPointError: the training loss of epoch 1 is not finite" in outcome.error


def test_what_stops_a_finalist_leaves_all_of_its_models_at_one_epoch(hundred: Pair) -> None:
    problem = folded(hundred, KFold(2))
    asked = iter([False, True])
    outcome = train_full_size_trial(
        problem, TRIALS[0], full_size_task("a task", 0, Span(0, 4), None, 0), None, lambda: next(asked)
    )
    assert [epoch for epoch, _ in outcome.epochs] == [1, 2]
    steps = [
        {int(of["step"]) for of in s["optimizer"]["state"].values() if "step" in of} for s in outcome.state["models"]
    ]
    assert steps[0] == steps[1]
