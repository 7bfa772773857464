"""A training function of the user's at full size: `tune(train=...)` beside a loss, on this machine."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hydro_rasda import AllTrialsFailed, RaceConfig, TuneResult, Worker, load, loguniform
from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import Event, Outcome, Span, full_size_task
from hydro_rasda.problem.problem import OwnLoop, Problem
from hydro_rasda.records.report import state_of
from hydro_rasda.training.full_size import train_full_size_trial
from tests.hydro_rasda.models import mlp

pytestmark = pytest.mark.usefixtures("one_process")

LAST = 4


def train(worker: Worker, last: int = LAST) -> None:
    """What anybody might write: SGD with batches of 64."""
    (x, y), (x_val, y_val) = worker.data
    own = mlp(worker.config)
    optimizer = torch.optim.SGD(own.parameters(), lr=worker.config["lr"], momentum=0.9)
    if worker.checkpoint is not None:
        own.load_state_dict(worker.checkpoint["model"])
        optimizer.load_state_dict(worker.checkpoint["optimizer"])
    model = worker.prepare(own)
    for _ in range(worker.iteration, last):
        for batch, weight in worker.batches(len(x), 64, fixed_global=True):
            optimizer.zero_grad()
            (F.cross_entropy(model(x[batch]), y[batch]) * weight).backward()
            optimizer.step()
        with torch.no_grad():
            loss = F.cross_entropy(own(x_val), y_val)
        worker.report(
            {"val_loss": loss, "note": "seen"},
            lambda: {"model": own.state_dict(), "optimizer": optimizer.state_dict()},
        )


@pytest.fixture
def own(problem: Problem, digits: Any) -> Problem:
    return replace(problem, own_loop=OwnLoop(train, digits))


def at_full_size(function: Callable[[Worker], None] | None) -> dict[str, Any]:
    """Arguments of `tune` with which a function trains the full-size models alone."""
    return {"train": function, "loss_fn": F.cross_entropy}


def trained(problem: Problem, span: Span, state: Mapping[str, Any] | None = None, **told: Any) -> Outcome:
    trial = Trial(5, {"lr": 0.1})
    # As from a file: an optimizer goes on with the tensors that it is given.
    return train_full_size_trial(
        problem, trial, full_size_task("a task", 5, span, None, 0), copy.deepcopy(state), **told
    )


def running(problem: Problem, function: Callable[[Worker], None]) -> Problem:
    assert problem.own_loop is not None
    return replace(problem, own_loop=OwnLoop(function, problem.own_loop.data))


def test_it_is_left_where_the_span_ends_and_goes_on_from_there(own: Problem) -> None:
    told: list[int] = []
    first = trained(own, Span(0, 1), on_epoch=lambda epoch, metrics: told.append(epoch))
    second = trained(own, Span(1, 4), first.state)
    # The weights that the function draws depend on where its span begins; from a checkpoint, on nothing but that.
    again = trained(own, Span(1, 4), first.state)
    assert [epoch for epoch, _ in first.epochs + second.epochs] == [1, 2, 3, 4]
    assert second.epochs == again.epochs
    assert told == [1]
    assert not first.ended
    assert not second.ended
    assert set(first.epochs[0][1]) == {"val_loss"}
    best = min(first.epochs + second.epochs, key=lambda line: line[1]["val_loss"])
    assert (second.state["best"]["epoch"], second.state["best"]["score"]) == (best[0], best[1]["val_loss"])
    whole = trained(own, Span(0, 4))
    assert whole.epochs == first.epochs + second.epochs
    for name, value in whole.state["model"].items():
        assert torch.equal(second.state["own"]["model"][name], value)


def test_it_is_over_where_it_returns(own: Problem) -> None:
    short = running(own, lambda worker: train(worker, last=2))
    outcome = trained(short, Span(0, 4))
    assert (outcome.ended, [epoch for epoch, _ in outcome.epochs]) == (True, [1, 2])
    again = trained(short, Span(2, 4), outcome.state)
    assert (again.ended, again.epochs, again.error) == (True, [], None)


def test_it_stops_when_asked_or_diverged(own: Problem) -> None:
    asked = trained(own, Span(0, 4), should_stop=lambda: True)
    assert ([epoch for epoch, _ in asked.epochs], asked.ended) == ([1], False)

    def diverges(worker: Worker) -> None:
        for loss in (0.5, math.nan, 0.4):
            worker.report({"val_loss": loss}, {"model": {}})

    diverged = trained(running(own, diverges), Span(0, 4))
    assert [epoch for epoch, _ in diverged.epochs] == [1, 2]
    assert diverged.state["best"]["epoch"] == 1


def test_of_the_values_that_are_reported_numbers_are_kept(own: Problem) -> None:
    def tells(worker: Worker) -> None:
        more: dict[str, Any] = {"val_note": "seen", "val_counts": torch.eye(2), "val_none": None, "val_ok": True}
        more["train_steps"] = 3
        more["train_loss"] = math.nan  # as of an epoch without a step; the metric says whether a trial has diverged
        worker.report({"val_loss": np.array(0.5), **more}, {"model": {}})

    outcome = trained(running(own, tells), Span(0, 1))
    assert outcome.epochs == [(1, {"val_loss": 0.5, "val_ok": 1.0, "train_steps": 3.0})]


class Odd:
    """What no checkpoint holds."""


@pytest.mark.parametrize(
    ("report", "told"),
    [
        (lambda worker: None, r"`train` returned without a report"),
        (lambda worker: worker.report({"loss": 1.0}, {"model": {}}), "`metrics` is .*'val_loss', which is `tune`'s"),
        (
            lambda worker: worker.report({"val_loss": 1.0, "val_loss_unaveraged": 0.9}, {"model": {}}),
            "`metric` is 'val_loss', but must be one beside which nothing reports val_loss_unaveraged",
        ),
        (lambda worker: worker.report({"val_loss": 1.0}), "`state` is None, but must be given with every report"),
        (lambda worker: worker.report({"val_loss": 1.0}, {"net": {}}), r"""`state` is \['net'\], but must be a dict"""),
        (lambda worker: worker.report({"val_loss": 1.0}, {"model": {}, "x": Odd()}), "`state` must hold tensors and"),
    ],
)
def test_what_a_run_cannot_do_with_is_refused(own: Problem, report: Callable[[Worker], None], told: str) -> None:
    outcome = trained(running(own, report), Span(0, 1))
    assert outcome.error is not None
    with pytest.raises(ValueError, match=told):
        raise ValueError(outcome.error)


def test_the_winner_comes_back_trained(quick: Callable[..., TuneResult], digits: Any) -> None:
    """On two threads, its trials train beside each other in processes of their own."""
    result = quick(**at_full_size(train))
    assert result.finished
    assert result.evaluate(digits[1])["loss"] == pytest.approx(result.best_metric, rel=1e-5)
    finalists = [record for record in result.trials if record.epochs]
    assert len(finalists) == 2
    assert all("val_accuracy" in record.history[0] for record in result.trials), "the sweep is the library's own"
    assert max(record.epochs for record in finalists) == LAST


def test_it_goes_on_with_the_run_that_was_interrupted(quick: Callable[..., TuneResult], tmp_path: Path) -> None:
    whole = quick(race=RaceConfig(checkpoint_every=1), **at_full_size(train), name="whole")
    interrupted: list[int] = []

    def halting(worker: Worker) -> None:
        if worker.iteration == 2 and not interrupted:
            interrupted.append(worker.iteration)
            raise KeyboardInterrupt
        train(worker)

    with pytest.raises(KeyboardInterrupt):
        quick(race=RaceConfig(checkpoint_every=1), **at_full_size(halting))
    assert interrupted == [2]
    again = quick(race=RaceConfig(checkpoint_every=1), **at_full_size(train), resume="changed")
    assert (again.best_config, again.best_metric) == (whole.best_config, whole.best_metric)
    assert [record.history for record in again.trials] == [record.history for record in whole.trials]
    for name, value in whole.best_model().state_dict().items():
        assert torch.equal(again.best_model().state_dict()[name], value)


def test_a_function_that_failed_is_mended_without_another_sweep(quick: Callable[..., TuneResult]) -> None:
    def broken(worker: Worker) -> None:
        raise NameError("name 'optimiser' is not defined")

    with pytest.raises(AllTrialsFailed, match="name 'optimiser' is not defined"):
        quick(**at_full_size(broken))
    with pytest.raises(Exception, match=r"`train` is another function than the run's"):
        quick(**at_full_size(train))
    told: list[Any] = []
    result = quick(**at_full_size(train), resume="changed", callbacks=[told.append])
    assert result.finished
    assert result.best_metric < 2.3
    assert not [e for e in told if type(e).__name__ == "EpochEnded" and e.heat == "sweep" and not e.recalled]


def test_a_mended_function_is_tried_although_the_call_that_brought_it_was_interrupted(
    quick: Callable[..., TuneResult],
) -> None:
    def broken(worker: Worker) -> None:
        raise NameError("name 'optimiser' is not defined")

    def stops(event: Event) -> None:
        raise KeyboardInterrupt

    with pytest.raises(AllTrialsFailed):
        quick(**at_full_size(broken))
    with pytest.raises(KeyboardInterrupt):
        quick(**at_full_size(train), resume="changed", callbacks=[stops])
    assert quick(**at_full_size(train), resume="changed").finished


def test_who_ends_by_itself_leaves_the_race_and_may_win_it(quick: Callable[..., TuneResult]) -> None:
    result = quick(**at_full_size(lambda worker: train(worker, last=1)))
    assert result.finished
    assert [record.epochs for record in result.trials if record.epochs] == [1, 1]
    again = quick(**at_full_size(lambda worker: train(worker, last=1)), resume="changed")
    assert again.best_metric == result.best_metric


def test_those_without_patience_end_and_the_best_epoch_wins(quick: Callable[..., TuneResult]) -> None:
    space = {"lr": loguniform(0.4, 0.6), "optimizer": "sgd", "momentum": 0.9, "batch_size": 32}
    result = quick(space=space, num_samples=2, max_t=8, race=RaceConfig(patience=1, ema=0), full_trainings=2)
    assert result.finished
    finalists = [record for record in result.trials if record.epochs]
    assert result.best_metric == min(record.metric for record in finalists)
    assert all(record.kept_epoch + 1 == record.epochs < 8 for record in finalists)
    with pytest.raises(ValueError, match=r"`race\.patience` is 1, but must be None with `train`"):
        quick(race=RaceConfig(patience=1), **at_full_size(train))


@pytest.mark.parametrize("full_size", [None, train])
def test_a_score_that_is_good_enough_ends_the_stage(quick: Callable[..., TuneResult], full_size: Any) -> None:
    whole = quick(**at_full_size(full_size), name="whole", full_trainings=2)
    curves = {r.trial: [line["val_loss"] for line in r.history if line["heat"] == "race"] for r in whole.trials}
    enough = max(curve[1] for curve in curves.values() if len(curve) > 1)
    result = quick(**at_full_size(full_size), full_trainings=2, stop_at=enough)
    assert (result.finished, state_of(result), state_of(load(result.path))) == (True, "finished", "finished")
    assert result.best_metric <= enough
    first, epochs = result.best_trial, len([None for line in _target(result) if line["val_loss"] > enough]) + 1
    assert len(_target(result)) == epochs
    assert [line["val_loss"] for line in _target(result)] == curves[first][:epochs]
    again = quick(**at_full_size(full_size), full_trainings=2, stop_at=enough)
    assert again.cost.race_epochs == result.cost.race_epochs
    on = quick(**at_full_size(full_size), full_trainings=2)
    assert on.finished
    assert (on.best_trial, on.best_metric) == (whole.best_trial, whole.best_metric)


def _target(result: TuneResult) -> list[Mapping[str, Any]]:
    """The best trial's epochs at full size."""
    return [line for line in result.trials[result.best_trial].history if line["heat"] == "race"]


def test_only_a_function_of_one_argument_will_do(quick: Callable[..., TuneResult]) -> None:
    loop: Any = lambda: None  # noqa: E731
    with pytest.raises(ValueError, match=r"`train` is .*, but must be None, or a function"):
        quick(**at_full_size(loop))


def test_data_reach_it_as_they_were_given(own: Problem, digits: Any) -> None:
    seen: list[Any] = []

    def looks(worker: Worker) -> None:
        seen.append(worker.data)
        worker.report({"val_loss": Tensor([0.5])}, {"model": {}})

    trained(running(own, looks), Span(0, 1))
    assert seen[0] is digits
