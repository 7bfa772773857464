"""The fold of a journal: facts stay for the life of a run, decisions for a call."""

from __future__ import annotations

import cProfile
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from hydro_rasda.common.heat_names import HEAT_NAMES, HeatName
from hydro_rasda.common.trial import Trial
from hydro_rasda.history.full_size import found_early, trained_spans
from hydro_rasda.history.history import CALL, DONE, ENTERED, FINALISTS, History
from hydro_rasda.history.lines import Unit, failure_line, metric_lines
from hydro_rasda.history.winner import best_of
from hydro_rasda.run.run_folder import Store
from hydro_rasda.settings.config import Keep, RaceConfig, SweepConfig, TuneConfig
from tests.hydro_rasda.journals import write_run

SETTINGS = TuneConfig(num_samples=4, max_t=8, sweep=SweepConfig(surrogate=0.5), race=RaceConfig(top_k=2))


def scores(heat: HeatName, of: Mapping[int, Mapping[int, float]]) -> list[dict[str, Any]]:
    """Lines of epochs, by trial."""
    return [
        line
        for number, curve in of.items()
        for line in metric_lines(heat, number, [(t, {"train_loss": v, "val_loss": v}) for t, v in curve.items()])
    ]


def swept(settings: TuneConfig = SETTINGS) -> History:
    """Four trials: all train to epoch 1, and the best two to epoch 2."""
    history = History(settings)
    told = [{"event": "trial", "trial": n, "config": {"lr": 0.1 * n}} for n in range(4)]
    history.take("sweep/kinds-from-0", Unit({str(n): "kind" for n in range(4)}, told))
    history.take("sweep/admitted-from-0", Unit({"trials": [0, 1, 2, 3], "samples": 4}))
    history.take("sweep/begin/of-4-a", Unit([[n, 1] for n in range(4)]))
    first = scores("sweep", {n: {1: 0.5 + 0.1 * n} for n in range(4)})
    history.take("sweep/to-1/from-0/group-0", Unit({"members": [0, 1, 2, 3]}, first))
    history.take("sweep/to-1/kept/of-4-b", Unit([[0, 2], [1, 2], [2, None], [3, None]]))
    second = scores("sweep", {0: {2: 0.4}, 1: {2: 0.3}})
    history.take("sweep/to-2/from-1/group-0", Unit({"members": [0, 1]}, second))
    return history


def test_the_state_of_the_sweep_is_that_of_its_decisions_and_groups() -> None:
    history = swept()
    assert history.sweep.scores == {1: {0: 0.5, 1: 0.6, 2: 0.7, 3: 0.8}, 2: {0: 0.4, 1: 0.3}}
    assert [n for n, trial in history.sweep.trials.items() if trial.dropped] == [2, 3]
    assert [*history.sweep.waiting] == [0, 1]
    assert history.sweep.spent == 6
    assert history.sources == dict.fromkeys((0, 1), "sweep/to-2/from-1/group-0")
    assert [*history.released()] == ["sweep/to-1/from-0/group-0"]
    assert [*history.released()] == []


def test_a_trial_that_has_one_of_several_metrics_no_more_is_among_the_best_no_more() -> None:
    history = History(replace(SETTINGS, objectives=(("val_loss", "min"), ("val_auc", "max"))))
    told = [{"event": "trial", "trial": n, "config": {"lr": 0.1}} for n in range(2)]
    history.take("sweep/kinds-from-0", Unit({"0": "kind", "1": "kind"}, told))
    history.take("sweep/admitted-from-0", Unit({"trials": [0, 1], "samples": 2}))
    for stop, aucs in ((1, (0.9, 0.8)), (2, (math.nan, 0.8))):
        history.take(f"sweep/to-{stop}/kept/of-2-{stop}", Unit([[0, stop], [1, stop]]))
        lines = [
            line
            for n, auc in enumerate(aucs)
            for line in metric_lines("sweep", n, [(stop, {"train_loss": 0.5, "val_loss": 0.5, "val_auc": auc})])
        ]
        history.take(f"sweep/to-{stop}/from-{stop - 1}/group-0", Unit({"members": [0, 1]}, lines))
        history.place()
        assert history.sweep.best(2) == ([0, 1] if stop == 1 else [1])


def test_a_call_decides_anew_and_keeps_what_was_trained() -> None:
    history = swept()
    history.take(FINALISTS, Unit([1, 0]))
    history.take(CALL, Unit({"samples": 5}))
    assert (history.finalists, history.samples, history.sweep.trials) == (None, 5, {})
    told = [{"event": "trial", "trial": 4, "config": {"lr": 0.5}}]
    history.take("sweep/kinds-from-4", Unit({"4": "kind"}, told))
    history.take("sweep/admitted-from-0", Unit({"trials": [0, 1, 2, 3, 4], "samples": 5}))
    history.take("sweep/begin/of-5-c", Unit([[n, 1] for n in range(5)]))
    assert [*history.sweep.waiting] == [0, 1, 2, 3]  # they have come there before
    assert [*history.sweep.training] == [4]
    assert history.sweep.trials[0].curve == {1: 0.5}, "the rule does not see what an earlier call trained beyond"


def trained_early(number: int, settings: TuneConfig = SETTINGS) -> tuple[History, str]:
    """A full-size training to epoch 4, with losses down to 0.25, that begins before the race; and its name."""
    history, name = swept(settings), f"race/trial-{number}/to-4"
    value = {"checkpoint": name, "early": True, "best": {"epoch": 4, "score": 0.25}}
    history.take(name, Unit(value, scores("race", {number: {t: 1 / t for t in range(1, 5)}}), 8.0))
    return history, name


@pytest.mark.parametrize("entrants", [[0, 1], [1]])
def test_a_training_that_began_early_counts_once_its_trial_enters_the_race(entrants: list[int]) -> None:
    history, name = trained_early(0)
    assert (history.epochs("race", 0), history.curve("race", 0), [*history.early]) == (0, {}, [0])
    assert history.spent["race"] == 8.0
    assert name not in history.released()
    history.take(ENTERED, Unit(entrants))
    assert (history.epochs("race", 0), 0 in history.checkpoints) == ((4, True) if 0 in entrants else (0, False))
    assert [*history.released()] == ([] if 0 in entrants else [name])
    assert not history.early
    late = "race/trial-1/to-4"
    value = {"checkpoint": late, "early": True}
    history.take(late, Unit(value, scores("race", {1: dict.fromkeys(range(1, 5), 0.5)})))
    assert history.curve("race", 1) == dict.fromkeys(range(1, 5), 0.5), "it has entered meanwhile"


def test_a_decision_says_nothing_of_a_trial_that_an_earlier_race_trained_further() -> None:
    history = swept()
    history.take(ENTERED, Unit([0, 1]))
    history.take("race/begin/of-2-a", Unit([[0, 4], [1, 4]]))
    for number, epoch in ((0, 4), (1, 8)):
        key = f"race/trial-{number}/to-{epoch}"
        lines = scores("race", {number: {t: 1 / t for t in range(1, epoch + 1)}})
        history.take(key, Unit({"checkpoint": key}, lines))
    history.take("race/to-4/kept/of-2-b", Unit([[0, 8], [1, None]]))
    assert history.decided == {0: True}
    assert history.race.trials[1].dropped


@pytest.mark.parametrize(("stop_at", "found"), [(0.25, [3]), (0.2, []), (None, [])])
def test_a_training_that_began_early_may_find_what_is_asked_for(stop_at: float | None, found: list[int]) -> None:
    history, _ = trained_early(3, replace(SETTINGS, stop_at=stop_at))
    assert found_early(history) == found
    history.take(FINALISTS, Unit([0, 1]))
    assert found_early(history) == []


def test_epochs_that_are_trained_again_replace_their_lines() -> None:
    history = swept()
    again = scores("sweep", {0: {2: 0.35, 3: 0.2}})
    history.take("sweep/to-3/from-1/group-0", Unit({"members": [0]}, again))
    assert history.curve("sweep", 0) == {1: 0.5, 2: 0.35, 3: 0.2}
    assert history.epochs("sweep", 0) == 3


def test_a_copy_has_its_sources_weights_configuration_and_kind_as_they_were_before_any_copy() -> None:
    history = swept()
    before = {n: history.sources[n] for n in (0, 1)}
    history.take("sweep/to-2/kept/of-2-d", Unit([[0, 4, 1, {"lr": 0.9}], [1, 4, 0, {}]]))
    assert [dict(history.trials[n].config) for n in (0, 1)] == [{"lr": 0.9}, {"lr": 0.0}]
    assert history.copies == {0: 1, 1: 0}
    assert history.sources == {0: before[1], 1: before[0]}
    longer = scores("sweep", {0: {3: 0.2, 4: 0.1}, 1: {3: 0.2, 4: 0.15}})
    history.take("sweep/to-4/from-2/group-0", Unit({"members": [0, 1]}, longer))
    assert history.copies == {}
    assert [*history.sweep.waiting] == [0, 1]


def test_a_finalist_by_a_found_schedule_has_its_sources_objects_and_unkept_values() -> None:
    """The journal has only names of classes, so that its line of such a trial is not enough."""
    line = {"event": "trial", "trial": 0, "config": {"lr": 0.1, "act": "GELU"}, "literals": [[["act"], None]]}
    new = {"event": "trial", "trial": 1, "config": {"lr": 0.2, "act": "GELU"}}
    trials: list[dict[int, Trial]] = [{0: Trial(0, {"lr": 0.1, "act": nn.GELU})}, {}]
    for known in trials:
        history = History(SETTINGS, known=known)
        history.take("sweep/kinds-from-0", Unit({"0": "kind"}, [line]))
        history.take("sweep/schedules/of-1-a", Unit([[1, 0, {"lr": 0.2}]], [new]))
        assert history.trials[1].config == {"lr": 0.2, "act": nn.GELU if known else "GELU"}
        assert history.unkept.get(1, frozenset()) == (frozenset() if known else {("act",)})


def test_who_failed_at_full_size_goes_on_in_a_sweep_that_is_given_more() -> None:
    history = swept()
    history.take("race/trial-0/failed-after-0", Unit(None, [failure_line(0, "out of memory")]))
    assert history.failures == {0: "out of memory"}
    assert not history.passed("sweep", 0, 4)
    assert math.isnan(history.score("race", 0))
    history.take("race/retry-of-0", Unit(None, [{"event": "retried", "trial": 0}]))
    assert history.failures == {}


def test_a_surrogate_that_failed_in_the_middle_heat_may_train_at_full_size() -> None:
    history = swept()
    history.failed["middle", 0] = "out of memory"
    assert history.failures == {}
    assert [history.has_failed(heat, 0) for heat in HEAT_NAMES] == [heat == "middle" for heat in HEAT_NAMES]
    history.failed["sweep", 1] = "out of memory"
    assert history.failures == {1: "out of memory"}
    assert all(history.has_failed(heat, 1) for heat in HEAT_NAMES)


def test_a_lost_checkpoint_takes_its_epochs_along() -> None:
    history = swept()
    key = "race/trial-1/to-2"
    value = {"checkpoint": key, "best": {"epoch": 2, "score": 0.2}}
    history.take(key, Unit(value, scores("race", {1: {1: 0.3, 2: 0.2}})))
    assert (history.checkpoints, history.best, history.epochs("race", 1)) == ({1: key}, {1: (2, 0.2)}, 2)
    history.take("race/trial-1/lost-after-2", Unit(None))
    assert (history.checkpoints, history.best, history.epochs("race", 1)) == ({}, {}, 0)
    assert key in [*history.released()]


def test_the_checkpoint_of_a_group_of_which_all_members_failed_is_released() -> None:
    history = swept()
    [*history.released()]
    history.take("sweep/to-2/kept/of-2-d", Unit([[0, 4], [1, 4]]))
    key, lines = "sweep/to-4/from-2/group-0", [failure_line(n, "out of memory") for n in (0, 1)]
    history.take(key, Unit({"members": [0, 1]}, lines))
    assert {*history.released()} == {"sweep/to-2/from-1/group-0", key}


def test_a_checkpoint_lives_until_no_trial_needs_it() -> None:
    history = swept()
    [*history.released()]
    key = "sweep/to-2/from-1/group-0"
    history.take("sweep/to-2/kept/of-2-d", Unit([[0, 4], [1, None]]))
    assert [*history.released()] == []
    history.take("sweep/to-4/from-2/group-0", Unit({"members": [0]}, scores("sweep", {0: {3: 0.2, 4: 0.1}})))
    assert [*history.released()] == [key]
    history.take(FINALISTS, Unit([0]))
    assert [*history.released()] == ["sweep/to-4/from-2/group-0"]


def test_a_full_size_stage_that_is_over_says_for_whom() -> None:
    history = swept()
    history.take(DONE, Unit([0, 1]))
    assert (history.over, history.last, history.last_of_race) == ([0, 1], DONE, DONE)


@pytest.mark.parametrize(("keep", "winner"), [("best", 0), ("last", 1)])
def test_if_last_weights_count_and_none_came_to_its_end_one_that_trained_longest_wins(keep: Keep, winner: int) -> None:
    history = History(TuneConfig(num_samples=3, max_t=8, race=RaceConfig(keep=keep)))
    told = {0: {1: 0.1}, 1: {1: 0.6, 2: 0.5}, 2: {1: 0.5, 2: 0.7}}
    for number, of in told.items():
        key = f"race/trial-{number}/to-{max(of)}"
        history.take(key, Unit({"checkpoint": key}, scores("race", {number: of})))
    assert best_of(history, [0, 1, 2]) == (winner, told[winner][max(told[winner])])


def test_a_unit_costs_no_more_among_many(tmp_path: Path) -> None:
    """Function calls of a fold, for each trial: counts do not depend on load."""

    def calls(number: int) -> float:
        folder = tmp_path / str(number)
        write_run(folder, num_samples=number, width=8)
        units = Store.read(folder).units()
        history, profile = (
            History(TuneConfig(num_samples=number, max_t=27, race=RaceConfig(top_k=3))),
            cProfile.Profile(),
        )
        profile.enable()
        for key, unit in units.items():
            history.take(key, unit)
        profile.disable()
        return sum(entry.callcount for entry in profile.getstats()) / number

    assert calls(2000) < 1.1 * calls(500)


def test_nothing_but_what_is_shown_depends_on_epochs_that_no_checkpoint_holds() -> None:
    """They count with the checkpoint, and not at all if the trial fails, or its checkpoint is lost."""
    told = {number: scores("race", {number: {1: 0.5, 2: 0.4, 3: 0.3}}) for number in (0, 1)}

    def folded(live: bool, *more: tuple[str, Unit]) -> dict[str, Any]:
        history = swept()
        history.take(FINALISTS, Unit([1, 0]))
        for number, lines in told.items():
            for line in lines if live else ():
                at = Unit(None, [line], 0.0, at=50.0, left=7.0)
                history.take(f"race/trial-{number}/at-{line['epoch']}", at)
        for key, unit in more:
            history.take(key, unit)
        assert (history.epochs("race", 0), history.began("race")) == ((3, True) if history.checkpoints else (0, False))
        shown = ("live", "now", "left", "last")
        found = {name: value for name, value in vars(history).items() if name not in shown}
        heats = {name: vars(heat) | {"state": vars(heat.state)} for name, heat in history.heats.items()}
        return found | {"heats": heats, "race": vars(history.race)}

    assert folded(live=True) == folded(live=False)
    ends = {n: f"race/trial-{n}/to-3" for n in (0, 1)}
    unit = {n: Unit({"checkpoint": key}, told[n], 6.0, at=60.0) for n, key in ends.items()}
    known = {n: Unit({"checkpoint": key}, [], 6.0, at=60.0) for n, key in ends.items()}
    whole = folded(False, (ends[0], unit[0]), ("race/trial-1/failed-after-0", Unit(None, [failure_line(1, "no")])))
    assert whole == folded(
        True, (ends[0], known[0]), ("race/trial-1/failed-after-0", Unit(None, [failure_line(1, "no")]))
    )
    assert whole["epoch_seconds"] == [(2.0, 3)]
    corrected = Unit({"checkpoint": ends[0]}, scores("race", {0: {2: 0.45}}), 6.0, at=60.0)
    history = swept()
    for line in told[0]:
        history.take(f"race/trial-0/at-{line['epoch']}", Unit(None, [line]))
    history.take(ends[0], corrected)
    assert history.curve("race", 0) == {1: 0.5, 2: 0.45, 3: 0.3}
    for line in told[1]:
        history.take(f"race/trial-1/at-{line['epoch']}", Unit(None, [line]))
    history.take("race/trial-1/to-2", Unit({"checkpoint": "race/trial-1/to-2"}, scores("race", {1: {2: 0.45}})))
    assert history.curve("race", 1) == {1: 0.5, 2: 0.45}, "epochs beyond the checkpoint train again"
    history.take("race/trial-0/at-4", Unit(None, scores("race", {0: {4: 0.2}})))
    history.take("race/trial-0/lost-after-3", Unit(None))
    assert (history.live, history.epochs("race", 0)) == ({}, 0)


def test_spans_have_all_epochs_that_led_to_a_checkpoint() -> None:
    lines = scores("race", {0: {1: 0.5, 2: 0.4}})
    units = {
        "race/trial-0/at-1": Unit(None, lines[:1]),
        "race/trial-1/at-1": Unit(None, scores("race", {1: {1: 0.7}})),
        "race/trial-1/failed-after-0": Unit(None, [failure_line(1, "no")]),
        "race/trial-0/to-2": Unit({"checkpoint": "race/trial-0/to-2"}, lines[1:], 4.0),
    }
    ((number, unit),) = trained_spans(units)
    assert (number, unit.lines, unit.seconds) == (0, lines, 4.0)


def test_an_epoch_costs_no_more_after_many() -> None:
    """Lines that a fold looks at, for each epoch of a trial on which a rule decides after each epoch."""

    def looks(epochs: int) -> float:
        count = 0

        class Line(dict[str, Any]):
            def __getitem__(self, name: str) -> Any:
                nonlocal count
                count += name == "epoch"
                return super().__getitem__(name)

        history = History(TuneConfig(num_samples=1, max_t=epochs + 1))
        told = {"event": "trial", "trial": 0, "config": {"lr": 0.1}}
        history.take("sweep/kinds-from-0", Unit({"0": "kind"}, [told]))
        history.take("sweep/admitted-from-0", Unit({"trials": [0], "samples": 1}))
        for epoch in range(1, epochs + 1):
            history.take(f"sweep/to-{epoch}/kept/of-1-{epoch}", Unit([[0, epoch]]))
            lines: list[dict[str, Any]] = [Line(line) for line in scores("sweep", {0: {epoch: 0.5}})]
            history.take(f"sweep/to-{epoch}/from-{epoch - 1}/group-0", Unit({"members": [0]}, lines))
        assert [*history.sweep.waiting] == [0]
        return count / epochs

    assert looks(400) < 1.1 * looks(100)
