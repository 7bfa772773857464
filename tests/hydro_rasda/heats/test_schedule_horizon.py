"""A sweep that is over before a full training sees schedules to their ends, where the space has shares of one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hydro_rasda import RaceConfig, SweepConfig, TuneResult, choice, uniform
from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import Event, Span, full_size_task
from hydro_rasda.problem.problem import Problem
from hydro_rasda.run.events import RungDecided
from hydro_rasda.schedulers import Continue, SweepRule
from hydro_rasda.training.full_size import train_full_size_trial

Quick = Callable[..., TuneResult]
SPACE: dict[str, Any] = {"lr": choice([0.3]), "optimizer": "sgd", "batch_size": 32}
DECAYS = {**SPACE, "schedule": "linear"}
NONE = "hint: the learning rate never decays"
TOLD = "The sweep trains 2 of 4 epochs. From epoch 1 on, its schedules run faster, so that they end with it."

pytestmark = pytest.mark.usefixtures("one_process")


def swept(result: TuneResult, trial: int = 0) -> list[float]:
    """The losses of a trial's surrogate, epoch by epoch."""
    return [line["train_loss"] for line in result.trials[trial].history if line["heat"] == "sweep"]


def test_configurations_that_differ_in_decay_start_alone_get_different_scores(quick: Quick) -> None:
    """Of four epochs the sweep trains two: decays that begin at half of them and later."""
    early, late = (quick(space={**DECAYS, "decay_start": share}, name=f"{share}") for share in (0.5, 0.9))
    ends = [(swept(early, n), swept(late, n)) for n in range(9) if len(swept(early, n)) == len(swept(late, n)) == 2]
    assert ends
    assert all(one[0] == other[0] and one[1] != other[1] for one, other in ends)


def test_no_rung_before_a_warmup_as_a_share_is_over(quick: Quick) -> None:
    result = quick(space={**SPACE, "warmup": choice([0.0, 0.5])}, race=RaceConfig(top_k=1))
    assert {t.sweep_epochs for t in result.trials} == {2}


def test_all_that_is_left_of_a_schedule_passes_in_the_last_leg(problem: Problem, quick: Quick) -> None:
    stretched = replace(problem.with_settings(max_t=27), horizon=9, unhurried=3)
    assert [stretched.schedule_time(epoch) for epoch in (0, 1.5, 3, 6, 9)] == [0, 1.5, 3, 15, 27]
    assert [replace(stretched, unhurried=0).schedule_time(epoch) for epoch in (0, 3, 9)] == [0, 9, 27]
    assert problem.schedule_time(2.5) == 2.5
    said: list[str] = []
    quick(space={**DECAYS, "floor": 0.1}, callbacks=[lambda event: said.append(getattr(event, "text", ""))])
    assert TOLD in said


class Whole(SweepRule):
    """Trains each trial to the end."""

    def decide(self, sweep: Any) -> Any:
        return {n: Continue(sweep.max_t) for n in sweep.waiting_at(0)}


@pytest.mark.parametrize(
    "changes",
    [{"sweep": SweepConfig(surrogate=1)}, {"sweep": SweepConfig(rule=Whole())}, {"space": {**DECAYS, "momentum": 0.5}}],
    ids=["goes on at full size", "a rule of one's own", "no share"],
)
def test_elsewhere_schedules_are_those_of_a_full_training(changes: dict[str, Any], quick: Quick) -> None:
    said: list[str] = []
    space = {**DECAYS, "decay_start": uniform(0, 1)}
    quick(**{"space": space, **changes}, callbacks=[lambda event: said.append(getattr(event, "text", ""))])
    assert not any("schedules pass" in text or NONE in text for text in said)


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        ({}, True),
        ({"schedule": choice(["constant", "step"])}, False),
        ({"optimizer": "schedule_free_sgd", "momentum": 0.9}, False),
    ],
)
def test_it_is_said_once_that_no_learning_rate_decays(schedule: dict[str, Any], told: bool, quick: Quick) -> None:
    said: list[str] = []
    quick(space={**SPACE, **schedule}, callbacks=[lambda event: said.append(getattr(event, "text", ""))])
    assert sum(text.startswith(NONE) for text in said) == told


def test_a_full_size_training_with_another_horizon_is_one_of_so_many_epochs(problem: Problem) -> None:
    trial = Trial(0, {"lr": 0.1, "batch_size": 32, "schedule": "wsd", "decay_start": 0.5, "warmup": 0.2})
    task = full_size_task("check", 0, Span(0, 2), None, 3, horizon=2)
    found = train_full_size_trial(problem, trial, task, None)
    settings = replace(problem.settings, max_t=2, seed=3, race=RaceConfig(grace_period=2))
    whole = train_full_size_trial(replace(problem, settings=settings), trial, replace(task, horizon=None), None)
    assert found.error is None
    assert [line["train_loss"] for _, line in found.epochs] == [line["train_loss"] for _, line in whole.epochs]


class Killed(KeyboardInterrupt):
    """Stands for a kill between two units of work."""


def test_a_run_that_was_killed_at_its_last_rung_comes_to_the_same_answer(quick: Quick) -> None:
    def kill(event: Event) -> None:
        if isinstance(event, RungDecided) and event.epoch == 1:
            raise Killed

    space = {**DECAYS, "lr": choice([0.1, 0.3]), "decay_start": uniform(0, 1), "floor": uniform(0, 0.5)}
    whole = quick(space=space, name="whole")
    with pytest.raises(Killed):
        quick(space=space, name="killed", callbacks=[kill])
    resumed = quick(space=space, name="killed")
    assert [(t.status, t.sweep_epochs, t.metric) for t in resumed.trials] == [
        (t.status, t.sweep_epochs, t.metric) for t in whole.trials
    ]
    assert [swept(resumed, n) for n in range(9)] == [swept(whole, n) for n in range(9)]
    assert resumed.best_config == whole.best_config
    assert math.isfinite(resumed.best_metric)
