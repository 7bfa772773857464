from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hydro_rasda import RaceConfig, SweepConfig
from hydro_rasda.contracts import Finished, History, Outcome, Span, Task, full_size_task
from hydro_rasda.heats.chance_baseline import chance_of
from hydro_rasda.heats.race import train_finalists
from hydro_rasda.heats.run_plan import race_pieces
from hydro_rasda.history.lines import Unit, failure_line, metric_lines
from hydro_rasda.history.scores import deciding_curve
from hydro_rasda.problem.problem import Problem
from hydro_rasda.records.summary import sum_up
from hydro_rasda.run.events import Callbacks, MessageSaid
from hydro_rasda.run.record_full_size import record_done, record_epochs, record_failure, record_swept
from hydro_rasda.run.state import Run
from hydro_rasda.run.time_left import Piece
from tests.hydro_rasda.heats.conftest import Opens
from tests.hydro_rasda.scripted import Scores, Scripted, curves, open_run

# A race of up to four trials over milestones 1, 2 and 4, of which half goes on.
RACE: dict[str, Any] = {"max_t": 4, "race": RaceConfig(grace_period=1)}


@pytest.fixture
def open_race(opens: Opens) -> Opens:
    """Opens the same run once more, as the next process would."""
    return lambda number=4, **settings: opens(number, **{**RACE, **settings})


def epochs(run: Run) -> dict[int, list[int]]:
    return {n: [line["epoch"] for line in lines] for (heat, n), lines in run.history.metrics.items() if heat == "race"}


SCORES = {0: [0.9, 0.8, 0.7, 0.6], 1: [0.8, 0.7, 0.6, 0.5], 2: [0.7, 0.6, 0.5, 0.4], 3: [0.6, 0.5, 0.4, 0.3]}
LOST = {**SCORES, 2: [0.7, math.nan], 3: [0.6, math.nan]}
ALL_BUT_THE_LAST_LOST = {**LOST, 1: [0.8, 0.7, math.nan]}
FAILS_ONCE_IT_IS_BACK = {**SCORES, 1: [0.8, 0.7], 2: [0.7], 3: [0.6]}


def test_what_all_finalists_came_to_is_compared_with_their_surrogates(open_race: Opens) -> None:
    """After the first milestone, where half of them end; who raised is left out, and who diverged is last."""
    run = open_race(5, full_trainings=0)
    assert sum_up(run.history, [], run.store.path).agreement is None
    run.record("sweep/to-4/group-0", curves("sweep", {n: [0.5 + n / 10, 0.1] for n in range(5)}))
    train_finalists(run, [0, 1, 2, 3], Scripted({**SCORES, 3: [math.nan]}))
    run.record("race/trial-4/failed-after-0", Unit(None, [failure_line(4, "ValueError: no")]), again=True)
    found = sum_up(run.history, [0, 1, 2, 3, 4], run.store.path).agreement
    assert found is not None
    assert (found.epoch, found.verdict) == (1, "open")
    assert {n: pair for n, pair in found.scores.items() if n != 3} == {0: (0.5, 0.9), 1: (0.6, 0.8), 2: (0.7, 0.7)}
    assert found.rho == pytest.approx(0.2)  # places 0, 1, 2, 3 against 2, 1, 0, 3
    wide = open_race(5, full_trainings=0, sweep=SweepConfig(surrogate=1))
    assert sum_up(wide.history, [0, 1, 2, 3], wide.store.path).agreement is None


@pytest.mark.parametrize(
    ("settings", "trained"),
    [
        ({}, [4, 4, 6, 8]),
        ({"full_trainings": 4}, [8, 8, 8, 8]),  # enough for all
        ({"race": RaceConfig(grace_period=7)}, [7, 7, 8, 8]),  # one epoch saved is not worth a look
    ],
)
def test_at_the_last_look_the_second_goes_on_if_it_is_worth_it(
    open_race: Opens, settings: dict[str, Any], trained: list[int]
) -> None:
    run = open_race(**{"max_t": 8, "race": RaceConfig(), "full_trainings": 3, **settings})
    leader = [1.0 - 0.04 * epoch for epoch in range(8)]
    scores = {3 - i: [score + more for score in leader] for i, more in enumerate((0.0, 0.3, 0.5, 0.6))}
    train_finalists(run, [0, 1, 2, 3], Scripted(scores))
    assert [len(found) for found in epochs(run).values()] == trained
    assert sum_up(run.history, [0, 1, 2, 3], run.store.path).best_trial == 3


def test_a_budget_for_all_of_few_finalists_stops_none(open_race: Opens) -> None:
    """Though it is not enough for `top_k` of them."""
    run = open_race(3, max_t=8, race=RaceConfig(), full_trainings=3)
    train_finalists(run, [0, 1, 2], Scripted({n: [1.0 + n - 0.04 * epoch for epoch in range(8)] for n in range(3)}))
    assert [len(found) for found in epochs(run).values()] == [8, 8, 8]


def test_if_all_finalists_diverge_over_folds_none_trains_once_more(open_race: Opens) -> None:
    train_finalists(open_race(2, folds=2), [0, 1], device := Scripted({0: [math.nan], 1: [math.nan]}))
    assert device.trained == [(0, 1), (1, 1)]


class EarlyEndsLate(Scripted):
    """A trial that began early and did not enter the race is done while the winner trains on all examples."""

    early: Task | None = full_size_task("race/trial-3/to-1", 3, Span(0, 1), None, 0)

    def finished(self) -> list[Finished]:
        if self.task is None or not self.task.refit or self.early is None:
            return super().finished()
        early, self.early = self.early, None
        return [Finished(early, self._train(early))]


def test_the_model_on_all_examples_is_that_of_the_winner_alone(open_race: Opens) -> None:
    run = open_race(4, folds=2)
    train_finalists(run, [0, 1], device := EarlyEndsLate(SCORES))
    assert (3, 1) in device.trained
    assert run.history.refits == {1: "race/refit-1/to-4"}
    assert run.history.refitted == 4


def test_what_the_sweep_trained_costs_the_race_nothing(open_race: Opens) -> None:
    """At epoch 2, to which all were swept, there is a whole training left: two times 2 epochs."""
    run = open_race(3, full_trainings=1, sweep=SweepConfig(surrogate=1), race=RaceConfig(grace_period=2))
    scores = {n: values for n, values in SCORES.items() if n < 3}
    run.record("sweep/to-2/group-0", curves("sweep", {n: values[:2] for n, values in scores.items()}))
    for number in scores:
        record_swept(run, number, {"model": {}, "epoch": 2})
    train_finalists(run, [0, 1, 2], Scripted(scores))
    assert [len(found) for found in epochs(run).values()] == [2, 4, 4]


@pytest.mark.parametrize("kept", ["averaged", "own", "none averaged"])
def test_trials_are_compared_by_their_ends_and_the_winner_keeps_its_best_epoch(open_race: Opens, kept: str) -> None:
    """Trial 0 was better than trial 1 ever is; in the end it is worse, by the weights that training leaves alone."""
    own = {0: [0.9, 0.9, 0.9, 0.9], 1: [0.8, 0.7, 0.6, 0.5]}
    averaged = {0: [0.9, 0.2, 0.3, 0.47], 1: [0.8, 0.7, 0.6, 0.45 if kept == "averaged" else 0.55]}
    run = open_race(2, race=RaceConfig(grace_period=4))
    best = {0: (2, 0.2), 1: (4, averaged[1][-1] if kept == "averaged" else 0.5)}
    for number, scores in (own if kept == "none averaged" else averaged).items():
        lines = curves("race", {number: scores}).lines
        if kept == "own" and number == 1:
            lines[-1] |= {"val_loss": own[number][-1], "val_loss_averaged": scores[-1]}
        elif kept != "none averaged":
            lines[-1]["val_loss_unaveraged"] = own[number][-1]
        epoch, score = best[number]
        record_epochs(run, number, lines, {"model": {}, "best": {"epoch": epoch, "score": score, "model": {}}})
    train_finalists(run, [0, 1], Scripted({}))
    found = sum_up(run.history, [0, 1], run.store.path)
    assert (found.best_trial, found.best_metric, found.trials[1].kept_epoch) == (1, best[1][1], 4)
    assert [record.chance for record in found.trials] == [0.0, 1.0]
    assert found.averaged == (kept != "own")


@pytest.mark.parametrize(("averages", "score", "winner"), [(0.3, 0.375, 0), (0.5, 0.545, 1)])
def test_averages_that_are_far_ahead_in_the_end_win(
    open_race: Opens, averages: float, score: float, winner: int
) -> None:
    """Trial 0 ends worse than trial 1, by the weights that training left; averages cap by how much.

    Their gain is counted from 0.8 after the first epoch.
    """
    run = open_race(2, race=RaceConfig(grace_period=4))
    for number, own, last in ((0, 0.6, averages), (1, 0.5, 0.48)):
        lines = curves("race", {number: [0.8, 0.6, 0.5, last]}).lines
        lines[-1]["val_loss_unaveraged"] = own
        record_epochs(run, number, lines, {"model": {}, "best": {"epoch": 4, "score": last, "model": {}}})
    train_finalists(run, [0, 1], Scripted({}))
    assert deciding_curve(run.history, 0) == pytest.approx({4: score})
    assert deciding_curve(run.history, 1) == pytest.approx({4: 0.5})
    assert sum_up(run.history, [0, 1], run.store.path).best_trial == winner


def test_with_several_metrics_the_first_chooses_on_the_front(open_race: Opens) -> None:
    """Trial 1 keeps the best score, though training leaves it worst; trial 2 has as good a score for more."""
    run = open_race(4, race=RaceConfig(grace_period=4), objectives=(("params", "min"), ("val_loss", "min")))
    run.history.costs |= {0: {"params": 5.0}, 1: {"params": 20.0}, 2: {"params": 30.0}, 3: {"params": 1.0}}
    for number, own, best in ((0, 0.5, (4, 0.4)), (1, 0.9, (3, 0.2)), (2, 0.3, (4, 0.2)), (3, 0.4, (2, 0.35))):
        lines = curves("race", {number: [0.9, 0.6, 0.5, 0.4]}).lines
        lines[best[0] - 1]["val_loss"] = best[1]
        lines[-1]["val_loss_unaveraged"] = own
        record_epochs(
            run, number, lines, {"model": {}, "best": dict(zip(("epoch", "score"), best, strict=True)) | {"model": {}}}
        )
    train_finalists(run, [0, 1, 2, 3], Scripted({}))
    found = sum_up(run.history, [0, 1, 2, 3], run.store.path)
    assert (found.best_trial, found.best_metric) == (1, 0.2)
    assert [each.trial for each in found.pareto] == [3, 1]
    assert [each.chance for each in found.trials] == [0.0, 0.5, 0.5, 0.0]


def test_the_trial_with_the_best_averages_goes_on_too(open_race: Opens) -> None:
    """Trial 2 is last of three at the milestone, by the weights that training left there."""
    run = open_race(3, full_trainings=1, race=RaceConfig(grace_period=2))
    for number, own, last in ((0, 0.6, 4), (1, 0.7, 2), (2, 0.8, 4)):
        lines = curves("race", {number: [0.9, 0.5 - number / 10, 0.4, 0.4][:last]}).lines
        for at in (2, last):
            lines[at - 1]["val_loss_unaveraged"] = own
        record_epochs(run, number, lines, {"model": {}, "best": {"epoch": last, "score": 0.4, "model": {}}})
    trained = Scripted({})
    train_finalists(run, [0, 1, 2], trained)
    assert not trained.trained
    assert [unit.value for key, unit in run.store.units().items() if key.startswith("race/to-2/kept")] == [
        [[0, 4], [2, 4], [1, None]]
    ]


def test_with_early_stopping_the_best_epoch_decides(open_race: Opens) -> None:
    run = open_race(2, race=RaceConfig(patience=2, grace_period=4))
    train_finalists(run, [0, 1], Scripted({0: [0.9, 0.2, 0.3, 0.4], 1: [0.8, 0.7, 0.6, 0.35]}))
    assert sum_up(run.history, [0, 1], run.store.path).best_trial == 0


def test_a_diverged_trials_best_epoch_wins_only_where_no_other_came_to_its_end(open_race: Opens) -> None:
    run = open_race(2, race=RaceConfig(grace_period=4))
    lines = curves("race", {0: [0.9, 0.2, math.nan]}).lines
    record_epochs(run, 0, lines, {"model": {}, "best": {"epoch": 2, "score": 0.2, "model": {}}})
    assert sum_up(run.history, [0, 1], run.store.path).best_trial == 0
    train_finalists(run, [0, 1], Scripted({0: [], 1: [0.8, 0.7, 0.6, 0.5]}))
    assert sum_up(run.history, [0, 1], run.store.path).best_trial == 1


def test_at_chance_level_none_is_stopped(open_race: Opens) -> None:
    told: list[str] = []
    run = open_race(4, full_trainings=0)
    chance = chance_of(run.problem, 8, classes=True)
    assert chance is not None
    flat = {n: [chance.score - n * chance.margin / 9] * 4 for n in range(4)}
    for number, (loss, *_) in flat.items():
        first = [(1, {"train_loss": loss, "val_loss": loss, "val_accuracy": 0.1})]
        record_epochs(run, number, metric_lines("race", number, first), {"model": {}})
    run.callbacks = Callbacks([lambda event: told.append(getattr(event, "text", ""))])
    train_finalists(run, [*flat], Scripted(flat))
    assert [len(found) for found in epochs(run).values()] == [4] * 4
    assert any("differs from chance at epoch 1: none is stopped" in text for text in told)


def test_units_say_how_far_each_trial_came_and_what_it_left(open_race: Opens) -> None:
    run = open_race(race=RaceConfig(grace_period=1, checkpoint_every=3))
    train_finalists(run, [3, 2, 1, 0], Scripted({**SCORES, 2: [0.7], 1: [math.inf]}))
    units = run.store.units()
    trials = {key: unit.value for key, unit in units.items() if key.startswith("race/trial-")}
    names = ["3/to-1", "2/to-1", "1/to-1", "0/to-1", "3/to-2", "3/to-3", "3/to-4"]
    keys = [f"race/trial-{name}" for name in names]
    failure = "race/trial-2/failed-after-1"
    assert trials == {key: {"checkpoint": key} for key in keys} | {failure: None}
    assert run.history.failures == {2: "trial 2 raised in epoch 2"}
    assert units["race/done"].value == [0, 1, 2, 3]
    assert run.history.checkpoints == {n: f"race/trial-{n}/to-{epoch}" for n, epoch in ((0, 1), (1, 1), (2, 1), (3, 4))}
    assert {path.name for path in (run.store.path / "checkpoints").iterdir()} == {
        run.store.file(name).name for name in run.history.checkpoints.values()
    }


@pytest.mark.parametrize(
    "scores",
    [{**SCORES, 1: [0.8, math.nan], 3: [0.6, 0.5, 0.9, 0.9]}, ALL_BUT_THE_LAST_LOST, FAILS_ONCE_IT_IS_BACK],
)
@pytest.mark.parametrize("epochs_a_process", [1, 2, 5])
def test_interrupted_anywhere_it_ends_as_an_unbroken_race(
    open_race: Opens, problem: Problem, tmp_path: Path, epochs_a_process: int, scores: Scores
) -> None:
    unbroken = open_run(tmp_path / "unbroken", problem, 4, **RACE)
    train_finalists(unbroken, [0, 1, 2, 3], Scripted(scores))
    trained: list[tuple[int, int]] = []
    while not (run := open_race()).store.done("race/done"):
        device = Scripted(scores, epochs_a_process)
        train_finalists(run, [0, 1, 2, 3], device)
        trained += device.trained
        assert device.trained, "it would go on for ever"
        assert len(trained) < 20, "it would go on for ever"
    assert sorted(trained) == sorted((n, epoch) for n, seen in epochs(unbroken).items() for epoch in seen)
    assert (run.history.metrics, run.history.checkpoints, run.history.failures) == (
        unbroken.history.metrics,
        unbroken.history.checkpoints,
        unbroken.history.failures,
    )
    decided, expected = (
        {key: unit.value for key, unit in of.store.units().items() if "/kept" in key} for of in (run, unbroken)
    )
    assert decided == expected
    unbroken.store.close()


class EndsByItself(Scripted):
    """As `Scripted`, but a training that diverges has ended by itself the epoch before."""

    def _train(self, task: Task) -> Outcome:
        ends = self.scores[task.number][task.span.stop :] == [math.nan]
        return replace(super()._train(task), ended=ends)


@pytest.mark.parametrize(("kind", "scores"), [(Scripted, [0.6]), (EndsByItself, [0.6, 0.5, math.nan])])
def test_nobody_takes_the_place_of_a_trial_that_ends_after_a_milestone(
    open_race: Opens, problem: Problem, tmp_path: Path, kind: type[Scripted], scores: list[float]
) -> None:
    """Trial 3 goes on from epoch 1, then raises, or ends by itself. Later the run is interrupted, and goes on."""
    race = RaceConfig(grace_period=1, checkpoint_every=1)
    settings, all_scores = {**RACE, "race": race, "full_trainings": 3}, {**SCORES, 3: scores}
    unbroken = open_run(tmp_path / "unbroken", problem, 4, **settings)
    train_finalists(unbroken, [0, 1, 2, 3], kind(all_scores))
    for part in (6, math.inf):
        train_finalists(run := open_race(**settings), [0, 1, 2, 3], kind(all_scores, part))
    assert epochs(run) == epochs(unbroken)
    unbroken.store.close()


def test_if_last_weights_count_the_best_of_those_that_ended_by_themselves_wins(open_race: Opens) -> None:
    """Another one trained longer, but ended worse, and a third raised."""
    run = open_race(3, race=RaceConfig(grace_period=4, checkpoint_every=1, keep="last"))
    scores = {0: [0.3, 0.1, math.nan], 1: [0.9, 0.8, 0.5, math.nan], 2: [0.9, 0.8, 0.05]}
    train_finalists(run, [0, 1, 2], EndsByItself(scores))
    assert epochs(run) == {0: [1, 2], 1: [1, 2, 3], 2: [1, 2, 3]}
    result = sum_up(run.history, [0, 1, 2], run.store.path)
    assert result.best_trial == 0
    assert [trial.status for trial in result.trials] == ["finished", "finished", "failed"]


def test_without_time_the_first_of_all_begins_and_no_other(open_race: Opens) -> None:
    for finalists in ([1, 0], [0, 1]):
        train_finalists(run := open_race(time_budget_s=1e-9), finalists, Scripted(SCORES))
        assert epochs(run) == {1: [1]}
        assert not run.store.done("race/done")


@pytest.fixture
def tight(problem: Problem, opens: Opens) -> Opens:
    """Opens a race that is foreseen to take longer than its budget, with which it comes to its end all the same."""
    slow = replace(problem, steady_epoch_seconds=5.0)

    def call(name: str = "tight", lanes: int = 1, **settings: Any) -> Run:
        run = opens(4, slow, name, **{"time_budget_s": 50.0, **RACE, **settings})
        run.time_left.lanes = lanes
        return run

    return call


@pytest.mark.parametrize("checkpoint_every", [None, 1])
def test_if_time_is_short_the_leader_of_the_sweep_trains_to_its_end_first(
    tight: Opens, checkpoint_every: int | None
) -> None:
    race = RaceConfig(grace_period=1, checkpoint_every=checkpoint_every)
    train_finalists(run := tight(race=race), [1, 0, 2, 3], device := Scripted(SCORES))
    assert device.trained[:7] == [*((1, epoch) for epoch in (1, 2, 3, 4)), (0, 1), (2, 1), (3, 1)]
    assert epochs(run) == {1: [1, 2, 3, 4], 0: [1], 2: [1, 2], 3: [1, 2, 3, 4]}, "else as in any race"
    assert sum_up(run.history, [1, 0, 2, 3], run.store.path).best_trial == 3
    train_finalists(run := tight("short", race=race), [1, 0, 2, 3], Scripted(SCORES, epochs=5))
    assert sum_up(run.history, [1, 0, 2, 3], run.store.path).best_trial == 1, "of those trained to the end"
    assert not run.store.done("race/done")


def test_how_slow_the_sweep_was_does_not_change_who_trains_first(tight: Opens) -> None:
    """A leader that needs 30 s of 50 s was foreseen to need more if small groups had waited for processes."""
    run = tight()
    for part in ("sweep", "transfer check"):  # the budget ended the check before it began
        run.time_left.plan(part, [Piece(100, 0.01)])
    run.time_left.begin("sweep", 0.0)
    run.time_left.advance(100, 4.0)
    train_finalists(run, [1, 0, 2, 3], device := Scripted(SCORES))
    assert device.trained[:4] == [(1, epoch) for epoch in (1, 2, 3, 4)]


def test_the_epochs_ahead_are_foreseen_from_the_next_milestone_on(tight: Opens) -> None:
    """On a CPU, all cores count also for few models; a GPU without a model saves no time."""
    run = tight(lanes=8)
    assert race_pieces(run, 4) == [Piece(4, 5 / 8), Piece(2, 5 / 8), Piece(2, 5 / 8)]
    assert race_pieces(run, 3, first=5, start=1, trained=4) == [Piece(5, 5 / 8), Piece(2, 5 / 8)]
    run.problem = replace(run.problem, device=torch.device("meta"))
    assert race_pieces(run, 4) == [Piece(4, 5 / 4), Piece(2, 5 / 2), Piece(2, 5 / 1)]


def test_the_last_look_is_foreseen_to_stop_nobody(open_race: Opens) -> None:
    run = open_race(4, max_t=8, race=RaceConfig(grace_period=4))
    assert (run.settings.race_milestones, run.settings.last_look) == ((4, 6, 8), 6)
    assert [piece.epochs for piece in race_pieces(run, 4)] == [4 * 4, 2 * 2, 2 * 2]


class TwoLanes(Scripted):
    """Trains up to two models beside each other."""

    def __init__(self, scores: Scores) -> None:
        super().__init__(scores)
        self.tasks: list[Task] = []

    def idle(self, task: Task | None = None) -> list[int]:
        return [0] * (len(self.tasks) < 2)

    def busy(self) -> bool:
        return bool(self.tasks)

    def start(self, device: int, task: Task) -> None:
        self.tasks.append(task)

    def finished(self) -> list[Finished]:
        tasks, self.tasks = self.tasks, []
        return [Finished(task, self._train(task)) for task in tasks]


def test_trials_at_which_processes_died_train_alone_once_all_others_are_there(open_race: Opens) -> None:
    """The one with the fewest deaths comes first."""
    beside: list[list[int]] = []

    class Notes(TwoLanes):
        def finished(self) -> list[Finished]:
            beside.append([task.number for task in self.tasks])
            return super().finished()

    run = open_race(4, race=RaceConfig(grace_period=4))
    run.store.doing._deaths |= {"race/trial-0/to-4": (0, 3), "race/trial-1/to-4": (0, 2)}
    train_finalists(run, [0, 1, 2], Notes({number: [0.9, 0.8, 0.7, 0.6] for number in range(3)}))
    assert beside == [[2], [1], [0]]


def test_beside_the_leader_other_lanes_train_others_to_the_milestone(tight: Opens) -> None:
    train_finalists(tight(lanes=2, full_trainings=3, time_budget_s=35.0), [1, 0, 2, 3], device := TwoLanes(SCORES))
    assert device.trained[:7] == [*((1, epoch) for epoch in (1, 2, 3, 4)), (0, 1), (2, 1), (3, 1)]
    every = RaceConfig(grace_period=1, checkpoint_every=1)
    spans = tight("spans", lanes=2, race=every, full_trainings=3, time_budget_s=35.0)
    train_finalists(spans, [1, 0, 2, 3], device := TwoLanes(SCORES))
    assert device.trained[:7] == [(1, 1), (0, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4)]


@pytest.mark.parametrize(
    "settings",
    [
        {"time_budget_s": 1e6},
        {"time_budget_s": None},
        {"time_budget_s": 25.0},  # 4 epochs are foreseen to take 30 s
        {"time_budget_s": 25.0, "lanes": 2},  # as long as the race in two lanes
        {"lanes": 4},
    ],
)
def test_with_too_much_or_too_little_time_or_a_lane_for_each_finalist_nobody_is_first(
    tight: Opens, settings: Any
) -> None:
    train_finalists(tight(**settings), [1, 0, 2, 3], device := Scripted(SCORES))
    assert device.trained[:4] == [(1, 1), (0, 1), (2, 1), (3, 1)]


def test_a_leader_that_was_stopped_does_not_train_on_when_time_is_short(tight: Opens) -> None:
    train_finalists(tight(time_budget_s=None), [1, 0, 2, 3], Scripted(SCORES, epochs=5))
    train_finalists(run := tight(), [1, 0, 2, 3], Scripted(SCORES))
    assert epochs(run)[1] == [1]


def test_who_was_interrupted_catches_up_first(open_race: Opens) -> None:
    settings = {"race": RaceConfig(grace_period=2)}
    train_finalists(open_race(2, **settings), [0, 1], Scripted(SCORES, epochs=1))
    train_finalists(open_race(2, **settings), [0, 1], device := Scripted(SCORES))
    assert device.trained[:3] == [(1, 1), (1, 2), (0, 2)]


def test_a_race_that_is_over_trains_nothing_and_other_finalists_are_another_race(open_race: Opens) -> None:
    train_finalists(open_race(), [0, 1], first := Scripted(SCORES))
    assert first.trained == [(0, 1), (1, 1), (1, 2), (1, 3), (1, 4)]
    train_finalists(run := open_race(), [1, 0], again := Scripted(SCORES))
    assert again.trained == []
    assert epochs(run) == {0: [1], 1: [1, 2, 3, 4]}
    assert train_finalists(run := open_race(), [1, 2], more := Scripted(SCORES)) == [1, 2, 0]
    assert more.trained == [(2, 1), (2, 2), (2, 3), (2, 4)]
    assert epochs(run) == {0: [1], 1: [1, 2, 3, 4], 2: [1, 2, 3, 4]}
    train_finalists(open_race(), [1, 2], last := Scripted(SCORES))
    assert last.trained == []


def test_decisions_count_what_was_scored_at_their_milestone(open_race: Opens) -> None:
    """Of what another backend trained, one trial is ahead of the milestone at which it would have been stopped."""
    run = open_race(2)
    unit = curves("race", {0: [0.5, 0.1]})
    record_epochs(run, 0, unit.lines, {"model": {}})
    train_finalists(run, [0, 1], Scripted({0: [], 1: [0.4, 0.4, 0.4, 0.4]}))
    assert epochs(run) == {0: [1, 2], 1: [1, 2, 3, 4]}
    assert not run.history.failures


def test_epochs_that_were_trained_again_count_as_they_went_the_last_time(open_race: Opens) -> None:
    run = open_race(1)
    record_epochs(run, 0, curves("race", {0: [0.5, 0.4]}).lines, {"model": {}})
    record_epochs(run, 0, curves("race", {0: [0.3]}).lines, {"model": {}})
    assert run.history.curve("race", 0) == {1: 0.3}
    run = open_race(1)
    assert run.history.curve("race", 0) == {1: 0.3}
    assert run.history.checkpoints == {0: "race/trial-0/to-1"}


def test_who_failed_or_diverged_stays_so_and_who_went_on_did_not_fail(open_race: Opens) -> None:
    run = open_race(3)
    for number, score in ((0, 0.5), (1, math.nan), (2, 0.5)):
        record_epochs(run, number, curves("race", {number: [score]}).lines, {"model": {}})
    record_failure(run, 0, "it raised")
    record_failure(run, 2, "its machine died")
    record_epochs(run, 2, curves("race", {2: SCORES[2]}).lines, {"model": {}})
    for again in (run, open_race(3)):
        assert again.history.failures == {0: "it raised"}
        assert epochs(again) == {0: [1], 1: [1], 2: [1, 2, 3, 4]}
    train_finalists(again, [0, 1, 2], device := Scripted({}))
    assert device.trained == []
    assert again.store.done("race/done")


def test_where_nobody_is_left_the_best_of_those_that_were_stopped_goes_on(open_race: Opens) -> None:
    said: list[str] = []
    run = open_race()
    run.callbacks = Callbacks([lambda event: said.append(getattr(event, "text", ""))])
    train_finalists(run, [0, 1, 2, 3], Scripted(ALL_BUT_THE_LAST_LOST))
    assert {n: seen[-1] for n, seen in sorted(epochs(run).items())} == {0: 4, 1: 3, 2: 2, 3: 2}
    told = "race at epoch {}: nobody is left; of those stopped at epoch 1, [{}] go on"
    assert [text for text in said if "nobody is left" in text] == [told.format(2, 1), told.format(4, 0)]
    assert run.store.done("race/done")


def test_nobody_comes_back_where_one_has_ended_by_itself(open_race: Opens) -> None:
    class Ending(Scripted):
        def _train(self, task: Task) -> Outcome:
            return replace(super()._train(task), ended=task.number == 3 and task.span.stop == 2)

    train_finalists(run := open_race(), [0, 1, 2, 3], Ending({**SCORES, 2: [0.7, math.nan]}))
    assert epochs(run) == {0: [1], 1: [1], 2: [1, 2], 3: [1, 2]}


def test_the_winner_that_is_told_may_have_ended_early_or_be_of_an_earlier_call(open_race: Opens) -> None:
    class Ending(Scripted):
        def _train(self, task: Task) -> Outcome:
            return replace(super()._train(task), ended=task.number == 3 and task.span.stop == 2)

    scores, said = {**SCORES, 3: [0.6, 0.2]}, list[str]()
    for finalists in ([0, 1, 2, 3], [0, 1]):
        run = open_race()
        run.callbacks = Callbacks([lambda event: said.append(getattr(event, "text", ""))])
        train_finalists(run, finalists, Ending(scores))
        *_, line = [text for text in said if text.startswith("race at epoch")]
        assert line == "race at epoch 4: done; trial 3 wins with val_loss 0.2 (epoch 2)"
        assert sum_up(run.history, [0, 1, 2, 3], run.store.path).best_trial == 3


def test_a_race_that_goes_on_repeats_its_decisions_with_the_scores_of_then(open_race: Opens) -> None:
    said: list[str] = []
    for part in (8, math.inf):  # the first process ends within the last epochs
        run = open_race(full_trainings=2.5)
        run.callbacks = Callbacks([lambda event: said.append(getattr(event, "text", ""))])
        train_finalists(run, [0, 1, 2, 3], Scripted(SCORES, part, keep="best"))
    told = ["race at epoch 1: 2 of 4 go on; trial 3 leads with val_loss 0.6 (epoch 1)"]
    assert [text for text in said if text.startswith("race at epoch") and "done" not in text] == 2 * told


class MetricComesLate(Scripted):
    """The training loss is finite, whatever the metric is."""

    def _train(self, task: Task) -> Outcome:
        stop, scores = min(task.span.stop, task.span.start + self.left), self.scores[task.number]
        self.left -= stop - task.span.start
        epochs = range(task.span.start + 1, int(stop) + 1)
        history: History = [(epoch, {"train_loss": 1.0, "val_loss": scores[epoch - 1]}) for epoch in epochs]
        return Outcome.of_model(task.number, {"model": {}, "epoch": stop}, history, 1.0)


@pytest.mark.parametrize("checkpoint_every", [None, 1])
def test_a_metric_that_is_not_known_yet_counts_at_the_milestone_alone(
    open_race: Opens, checkpoint_every: int | None
) -> None:
    run = open_race(2, race=RaceConfig(grace_period=2, checkpoint_every=checkpoint_every))
    scores = {0: [math.nan, 0.5, math.nan, 0.3], 1: [math.nan, math.nan, 0.1, 0.1]}
    train_finalists(run, [0, 1], MetricComesLate(scores))
    assert epochs(run) == {0: [1, 2, 3, 4], 1: [1, 2]}


@pytest.mark.parametrize("epochs_a_process", [1, math.inf])
def test_who_is_brought_back_trains_on_where_its_metric_is_not_known_yet(
    open_race: Opens, epochs_a_process: float
) -> None:
    scores = {0: [0.9, math.nan, math.nan, 0.5], 1: [0.5, 0.4, math.nan, math.nan]}
    for _ in range(9):
        train_finalists(run := open_race(2), [0, 1], MetricComesLate(scores, epochs_a_process))
    assert epochs(run) == {0: [1, 2, 3, 4], 1: [1, 2, 3, 4]}
    assert sum_up(run.history, [0, 1], run.store.path).best_trial == 0


class Stumbling(Scripted):
    """Raises the first few times, or dies."""

    def __init__(self, scores: Scores, times: int, died: bool = False) -> None:
        super().__init__(scores)
        self.times, self.died = times, died

    def _train(self, task: Task) -> Outcome:
        if self.times == 0:
            return super()._train(task)
        self.times -= 1
        return Outcome.failed(task.number, "Traceback\nOSError: the network is down\n", 1.0, self.died)


@pytest.mark.parametrize(("times", "fails"), [(1, False), (2, False), (3, True)])
def test_who_raises_has_two_more_tries_each_of_which_is_told(open_race: Opens, times: int, fails: bool) -> None:
    run, said = open_race(1), []
    run.callbacks = Callbacks([lambda event: said.append(event.text) if isinstance(event, MessageSaid) else None])
    train_finalists(run, [0], Stumbling(SCORES, times))
    said = [text for text in said if text.startswith("trial 0 is tried again")]
    assert epochs(run) == ({} if fails else {0: [1, 2, 3, 4]})
    assert (0 in run.history.failures) == fails
    again = "trial 0 is tried again at full size ({} of 2), as it raised OSError: the network is down"
    assert said == [again.format(n) for n in (1, 2)][:times]


def test_who_died_has_had_its_second_chance(open_race: Opens) -> None:
    run = open_race(1)
    train_finalists(run, [0], Stumbling(SCORES, 1, died=True))
    assert 0 in run.history.failures


def test_who_stands_where_a_decision_was_taken_is_decided(open_race: Opens) -> None:
    run = open_race()
    train_finalists(run, [0, 1, 2, 3], Scripted(SCORES, epochs=5))  # all to epoch 1, one of the two that go on to 2
    run = open_race()
    assert run.history.epochs("race", 3) == 2
    assert run.history.decided == {0: False, 1: False, 2: True}
    record_done(run, 3)
    assert run.history.decided == {0: False, 1: False, 2: True, 3: False}
    record_epochs(run, 3, metric_lines("race", 3, [(3, {"train_loss": 0.4, "val_loss": 0.4})]), {"model": {}})
    assert 3 not in run.history.decided


def test_a_metric_counts_for_nothing_where_the_loss_was_not_finite(open_race: Opens) -> None:
    run = open_race(1)
    line = {"event": "metrics", "heat": "race", "trial": 0, "epoch": 1, "train_loss": math.nan, "val_loss": 0.1}
    record_epochs(run, 0, [line], {"model": {}})
    assert math.isnan(run.history.score_at("race", 0, 1))
    assert math.isnan(run.history.score("race", 0))
