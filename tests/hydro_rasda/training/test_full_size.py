from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion.optim.schedule_free import ScheduleFreeSGD
from hydro_rasda import RaceConfig
from hydro_rasda.common.seeds import derive_seed
from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import History, Outcome, Span, full_size_task
from hydro_rasda.data import ALONE, make_batches
from hydro_rasda.problem.metrics import summed
from hydro_rasda.problem.problem import Problem
from hydro_rasda.schedulers import rank
from hydro_rasda.settings.config import Keep, Mode
from hydro_rasda.training.folds_and_repeats import shares_of
from hydro_rasda.training.full_size import RankPlace, train_full_size_trial, train_target_on_ranks
from hydro_rasda.training.single_learner import SingleLearner
from tests.fusion.optim.test_fused import Counting
from tests.hydro_rasda.models import Config

Pair = tuple[Tensor, Tensor]

SCHEDULE: dict[str, Any] = {"schedule": "cosine", "decay_start": 0.3, "floor": 0.1, "warmup": 0.2}
CONFIG: dict[str, Any] = {"lr": 0.01, "batch_size": 32, "dropout": 0.2, "grad_clip": 1.0, **SCHEDULE}


def trained(problem: Problem, trial: Trial, span: Span, state: Any = None, **told: Any) -> Outcome:
    task = full_size_task("a task", trial.number, span, None, problem.settings.seed)
    return train_full_size_trial(problem, trial, task, state, **told)


def with_modes(params: Any, lr: float) -> torch.optim.Optimizer:
    return ScheduleFreeSGD(params, lr=lr)


def history_of(problem: Problem, config: Config, span: Span, **told: Any) -> History:
    return trained(problem, Trial(0, config), span, **told).epochs


@pytest.mark.parametrize(
    "optimizer",
    [
        {"optimizer": "adamw"},
        {"optimizer": "sgd", "momentum": 0.9},
        {"optimizer": "adafactor"},
        {"optimizer": "prodigy", "d0": 1e-3},
        {"optimizer": "schedule_free_adamw", "schedule": "constant"},
        {"optimizer": with_modes},
        {"optimizer": Counting},
    ],
)
def test_training_in_spans_is_training_in_one(problem: Problem, optimizer: dict[str, Any]) -> None:
    trial = Trial(5, {**CONFIG, **optimizer})
    whole = trained(problem, trial, Span(0, 4))
    first = trained(problem, trial, Span(0, 1))
    torch.rand(7)
    second = trained(problem, trial, Span(1, 4), first.state)
    assert first.epochs + second.epochs == whole.epochs
    assert [epoch for epoch, _ in whole.epochs] == [1, 2, 3, 4]
    for state, again in ((whole.state, second.state),):
        parts = [(state["model"], again["model"])]
        parts += [(state["trained"], again["trained"])] if "trained" in state else []
        parts += [(state["average"]["means"], again["average"]["means"])] if "trained" not in state else []
        for values, others in parts:
            assert values.keys() == others.keys()
            for name, value in values.items():
                assert torch.equal(others[name], value)


def test_what_is_validated_and_kept_are_averaged_weights(problem: Problem) -> None:
    """Training knows nothing of them."""
    trial = Trial(5, {"lr": 0.5, "optimizer": "sgd", "momentum": 0.9, "batch_size": 32, "dropout": 0.2})
    own, other = (trained(problem.with_settings(race=RaceConfig(ema=ema)), trial, Span(0, 6)) for ema in (0.0, 0.5))
    assert [line["train_loss"] for _, line in own.epochs] == [line["train_loss"] for _, line in other.epochs]
    for name, value in own.state["model"].items():
        assert torch.equal(other.state["model"][name], value)
    best = other.state["best"]
    assert best["score"] == min(line["val_loss"] for _, line in other.epochs)
    learner = SingleLearner(problem.target(trial), trial.config, problem.objective, problem.settings.max_t)
    for weights, line in (
        (best["model"], other.epochs[best["epoch"] - 1][1]),
        ({**other.state["model"], **other.state["average"]["means"]}, other.epochs[-1][1]),
        (own.state["model"], own.epochs[-1][1]),
    ):
        learner.model.load_state_dict(weights)
        with learner.evaluating():
            shares = problem.val_data.shares(1000, None, ALONE)
            found = summed((learner.evaluate(share.batch), share.examples) for share in shares).means()
        assert found["loss"].item() == pytest.approx(line["val_loss"])
    assert own.epochs[-1][1]["val_loss"] != other.epochs[-1][1]["val_loss"]


@pytest.mark.parametrize("lr", [0.02, 0.5])
def test_of_averaged_and_other_weights_the_better_ones_are_kept(problem: Problem, lr: float) -> None:
    """Averages lag behind a low rate, and smooth a high one; both are validated where training ends."""
    trial = Trial(5, {"lr": lr, "optimizer": "sgd", "momentum": 0.9, "batch_size": 32, "dropout": 0.2})
    own = trained(problem.with_settings(race=RaceConfig(ema=0)), trial, Span(0, 4))
    both = trained(problem.with_settings(race=RaceConfig(ema=0.5)), trial, Span(0, 4))
    best, (_, last) = both.state["best"], both.epochs[-1]
    left = {name: value for name, value in own.epochs[-1][1].items() if name.startswith("val_")}
    if lr == 0.02:
        assert last["val_loss_averaged"] > last["val_loss"]
        assert last.items() >= left.items()
        assert (best["epoch"], best["score"]) == (4, left["val_loss"])
        torch.testing.assert_close(dict(best["model"]), dict(own.state["model"]), rtol=0, atol=0)
    else:
        assert last["val_loss"] < last["val_loss_unaveraged"] == left["val_loss"]
        assert best["score"] == last["val_loss"]
    assert not {"val_accuracy_averaged", "val_accuracy_unaveraged"} & last.keys()


@pytest.mark.parametrize("optimizer", ["schedule_free_adamw", "schedule_free_sgd", with_modes])
@pytest.mark.parametrize("keep", ["best", "last"])
def test_the_optimizers_own_averages_are_validated_and_kept(problem: Problem, keep: Keep, optimizer: Any) -> None:
    """Nothing else averages weights, and validation changes nothing in training."""
    trial = Trial(5, {"lr": 0.02, "optimizer": optimizer, "batch_size": 32, "warmup_epochs": 0.5})
    outcome = trained(problem.with_settings(race=RaceConfig(keep=keep)), trial, Span(0, 3))
    assert {"average", "best"} & outcome.state.keys() == ({"best"} if keep == "best" else set())
    model = problem.target(trial)
    own = SingleLearner(model, trial.config, problem.objective, problem.settings.max_t)
    for epoch in range(3):
        own.seed([derive_seed(problem.settings.seed, "trial", 5, epoch)])
        own.train_mode(True)
        shares = list(shares_of([problem], 32, epoch, ALONE))
        for i, share in enumerate(shares):
            own.step(share, epoch + i / len(shares), len(shares))
    for name, value in outcome.state["trained"].items():
        assert torch.equal(value, model.get_parameter(name))
    own.optimizer.eval()  # type: ignore[attr-defined]
    model.eval()
    for name, value in outcome.state["model"].items():
        torch.testing.assert_close(value, model.state_dict()[name])
    (share,) = problem.val_data.shares(1000, None, ALONE)
    found = own.evaluate(share.batch)["loss"].item()
    assert found == pytest.approx(outcome.epochs[-1][1]["val_loss"])
    if keep == "best":
        assert outcome.state["best"]["epoch"] == 3, "choose another learning rate"
        for name, value in outcome.state["best"]["model"].items():
            assert torch.equal(value, outcome.state["model"][name])


def test_averages_stay_where_training_goes_on_with_another_share_of_them(problem: Problem) -> None:
    config = {"lr": 0.02, "optimizer": "schedule_free_adamw", "batch_size": 32}
    first = trained(problem, Trial(5, config), Span(0, 1))
    own = SingleLearner(problem.target(Trial(5, config)), {**config, "beta1": 0.5}, problem.objective, 4)
    own.load(first.state)
    again = own.state()
    for name, value in first.state["model"].items():
        torch.testing.assert_close(again["model"][name], value)
    assert not torch.equal(again["trained"]["0.weight"], first.state["trained"]["0.weight"])


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_best_epochs_weights_are_kept_across_spans(problem: Problem, mode: Mode) -> None:
    trial = Trial(5, {"lr": 0.5, "optimizer": "sgd", "momentum": 0.9, "batch_size": 32, "dropout": 0.2})
    last = trained(problem.with_settings(race=RaceConfig(keep="last")), trial, Span(0, 6))
    problem = problem.with_settings(mode=mode, race=RaceConfig(ema=0))
    scores = [metrics["val_loss"] for _, metrics in last.epochs]
    best = rank(scores, mode)[0] + 1
    assert 1 < best < 6, "choose another learning rate"
    first = trained(problem, trial, Span(0, best))
    assert "best" not in last.state
    for outcome in (trained(problem, trial, Span(0, 6)), trained(problem, trial, Span(best, 6), first.state)):
        assert (outcome.state["best"]["epoch"], outcome.state["best"]["score"]) == (best, scores[best - 1])
        for name, value in first.state["model"].items():
            assert torch.equal(outcome.state["best"]["model"][name], value)
        for name, value in last.state["model"].items():
            assert torch.equal(outcome.state["model"][name], value)


def test_patience_ends_a_training_that_becomes_no_better(problem: Problem) -> None:
    """Whatever span it is in, and whether or not the process lived to tell."""
    trial = Trial(5, {"lr": 0.5, "optimizer": "sgd", "momentum": 0.9, "batch_size": 32, "dropout": 0.2})
    problem = problem.with_settings(race=RaceConfig(ema=0))
    scores = [metrics["val_loss"] for _, metrics in trained(problem, trial, Span(0, 6)).epochs]
    best = [scores.index(min(scores[: epoch + 1])) for epoch in range(6)]
    last = next(epoch + 1 for epoch in range(6) if epoch - best[epoch] == 1)
    assert 1 < last < 6, "choose another learning rate"
    patient = problem.with_settings(race=RaceConfig(patience=1, ema=0))
    outcome = trained(patient, trial, Span(0, 6))
    assert (outcome.ended, [metrics["val_loss"] for _, metrics in outcome.epochs]) == (True, scores[:last])
    first = trained(patient, trial, Span(0, last - 1))
    assert not first.ended
    assert trained(patient, trial, Span(last - 1, 6), first.state).epochs == outcome.epochs[last - 1 :]
    again = trained(patient, trial, Span(last, 6), outcome.state)
    assert (again.ended, again.epochs) == (True, [])
    place = RankPlace(ALONE, 1.0, "gloo")
    task = full_size_task("key", 5, Span(0, 6), None, patient.settings.seed)
    of_ranks = train_target_on_ranks(patient, trial, task, None, place, lambda: None, lambda: False, lambda *_: None)
    assert (of_ranks.ended, [metrics["val_loss"] for _, metrics in of_ranks.epochs]) == (True, scores[:last])


def test_what_is_not_finite_is_never_kept_and_of_equals_the_last_is(problem: Problem) -> None:
    learner = SingleLearner(problem.target(Trial(0, CONFIG)), CONFIG, problem.objective, problem.settings.max_t)
    for epoch, score in enumerate([math.nan, -math.inf], 1):
        learner.remember(epoch, score, "min")
        assert "best" not in learner.state()
    for epoch, score in enumerate([0.5, 0.5, math.nan, 0.6], 3):
        learner.remember(epoch, score, "min")
    assert (learner.state()["best"]["epoch"], learner.state()["best"]["score"]) == (4, 0.5)


def test_an_epoch_whose_loss_is_not_finite_is_not_the_best(problem: Problem) -> None:
    wild = {"lr": 1e30, "optimizer": "sgd", "batch_size": 32}
    counts = problem.with_settings(metric="val_accuracy", mode="max", race=RaceConfig(keep="best"))
    state = trained(counts, Trial(0, wild), Span(0, 2)).state
    assert state is not None
    assert "best" not in state


def test_it_learns_and_says_so(problem: Problem) -> None:
    told: list[int] = []
    history = history_of(problem, CONFIG, Span(0, 3), on_epoch=lambda epoch, metrics: told.append(epoch))
    assert told == [1, 2, 3]
    assert history[-1][1]["val_loss"] < history[0][1]["val_loss"]
    assert set(history[0][1]) == {"train_loss", "train_accuracy", "val_loss", "val_accuracy"}


def test_it_stops_when_asked_or_diverged(problem: Problem) -> None:
    assert [epoch for epoch, _ in history_of(problem, CONFIG, Span(0, 4), should_stop=lambda: True)] == [1]
    wild = {"lr": 1e30, "optimizer": "sgd", "batch_size": 32}
    assert [epoch for epoch, _ in history_of(problem, wild, Span(0, 4))] == [1]


@pytest.mark.parametrize("batch_size", [32, 48])
def test_a_batch_in_parts_teaches_what_the_whole_one_does(problem: Problem, batch_size: int) -> None:
    """320 examples: with batches of 48, the last has fewer."""
    config = {"lr": 0.05, "optimizer": "sgd", "momentum": 0.9, "batch_size": batch_size, "grad_clip": 0.5}
    whole, parts = (history_of(problem, {**config, **more}, Span(0, 3)) for more in ({}, {"accumulate": 5}))
    for (_, a), (_, b) in zip(whole, parts, strict=True):
        assert a == pytest.approx(b, rel=1e-4)


def test_another_seed_is_another_training(problem: Problem) -> None:
    trial, task = Trial(0, CONFIG), full_size_task("a task", 0, Span(0, 1), None, problem.settings.seed)
    first, again = (train_full_size_trial(problem, trial, task, None).epochs for _ in range(2))
    other = train_full_size_trial(problem, trial, replace(task, seed=problem.settings.seed + 1), None).epochs
    assert first == again != other


def test_what_raises_fails_with_its_traceback(problem: Problem) -> None:
    def model_fn(config: Config, width_ratio: float) -> Any:
        raise ArithmeticError("this model cannot be built")

    outcome = trained(replace(problem, model_fn=model_fn), Trial(0, CONFIG), Span(0, 1))
    assert not outcome.checkpoint
    assert outcome.epochs == []
    assert outcome.error is not None
    assert "ArithmeticError: this model cannot be built" in outcome.error


def test_loaders_without_a_length_train_too(problem: Problem, digits: tuple[Pair, Pair]) -> None:
    (x, y), _ = digits

    def loader(batch_size: int) -> Iterator[Pair]:
        yield from zip(x.split(batch_size), y.split(batch_size))

    streamed = replace(problem, train_data=make_batches(loader, "train_data", problem.device, 0))
    history = history_of(streamed, CONFIG, Span(0, 2))
    assert history[1][1]["train_loss"] < history[0][1]["train_loss"]


def test_new_hyperparameters_hold_after_going_on(problem: Problem) -> None:
    """PBT goes on from another trial's state under a configuration of its own."""
    before = {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.5}
    state = trained(problem, Trial(0, before), Span(0, 1)).state
    assert state is not None
    config = {"optimizer": "adamw", "lr": 0.02, "weight_decay": 0.1, "beta1": 0.8}
    learner = SingleLearner(problem.target(Trial(0, config)), config, problem.objective, problem.settings.max_t)
    learner.load(state)
    (group,) = learner.optimizer.param_groups
    assert (group["lr"], group["weight_decay"], group["betas"][0]) == (0.02, 0.1, 0.8)
    assert {int(s["step"]) for s in learner.optimizer.state.values()} == {5}  # of 64 in 320 examples
