from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hydro_rasda import RaceConfig, TuneResult
from hydro_rasda.contracts import Event
from hydro_rasda.history.lines import Unit
from hydro_rasda.problem.problem import Problem
from hydro_rasda.run.events import (
    Callbacks,
    CheckpointSaved,
    EpochEnded,
    EpochsTrained,
    FinalistsChosen,
    HeatBegan,
    HeatEnded,
    MessageSaid,
    RunBegan,
    RunEnded,
    RungDecided,
    TrialConfigured,
    TrialEnded,
    TrialFailed,
)
from hydro_rasda.run.record_full_size import record_done
from hydro_rasda.run.run_folder import Store
from hydro_rasda.run.state import Run
from tests.hydro_rasda.conftest import on_threads
from tests.hydro_rasda.models import stumbles_in_some

Quick = Callable[..., TuneResult]

SMALL: dict[str, Any] = {"num_samples": 4, "max_t": 2, "race": RaceConfig(top_k=2)}


def journal(result: TuneResult, event: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (result.path / "journal.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == event]


def as_lines(events: list[Event]) -> list[dict[str, Any]]:
    """The journal's lines that these events tell of."""
    epochs = [e for e in events if isinstance(e, EpochEnded)]
    return [{"event": "metrics", "heat": e.heat, "trial": e.trial, "epoch": e.epoch, **e.metrics} for e in epochs]


def of(kind: type[Any], events: list[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


@pytest.mark.parametrize("threads", [1, 2])
def test_it_is_told_each_line_of_the_journal_once_and_in_order(threads: int, quick: Quick) -> None:
    """In one process, and where groups and full-size models train in processes forked of it."""
    events: list[Event] = []
    with on_threads(threads):
        result = quick(callbacks=[events.append], model_fn=stumbles_in_some, **SMALL)
    assert as_lines(events) == journal(result, "metrics")
    assert {event.heat for event in of(EpochEnded, events)} == {"sweep", "race"}
    for kind, name, key in ((TrialConfigured, "trial", "config"), (TrialFailed, "failed", "error")):
        expected = [(line["trial"], line[key]) for line in journal(result, name)]
        assert [(event.trial, getattr(event, key)) for event in of(kind, events)] == expected
    assert not any(event.recalled for event in events)
    seconds = [event.seconds for event in events if not isinstance(event, EpochEnded)]
    assert seconds == pytest.approx(sorted(seconds), abs=1e-3)


@pytest.mark.usefixtures("one_process")
def test_it_is_told_decisions_checkpoints_and_how_the_run_goes(quick: Quick) -> None:
    events: list[Event] = []
    there: list[bool] = []

    def callback(event: Event) -> None:
        events.append(event)
        if isinstance(event, CheckpointSaved):
            there.append(event.path.exists())

    result = quick(callbacks=[callback], **SMALL)
    (began,) = of(RunBegan, events)
    assert (events[0], began.path, began.metric, began.mode) == (began, result.path, "val_loss", "min")
    assert began.settings["num_samples"] == 4
    ended = events[-1]
    assert isinstance(ended, RunEnded)
    assert (ended.best_trial, ended.best_config) == (result.best_trial, result.best_config)
    assert (ended.best_metric, ended.error) == (result.best_metric, None)
    by_key = {line["key"]: line["value"] for line in journal(result, "unit")}
    units = {key.rpartition("/")[0]: value for key, value in by_key.items()}
    decided = {f"{event.heat}/to-{event.epoch}/kept": list(event.kept) for event in of(RungDecided, events)}
    swept, raced = ({key: value for key, value in decided.items() if key.startswith(of)} for of in ("sweep", "race"))
    going_on = {
        key: [number for number, to in moves if to is not None]
        for key, moves in units.items()
        if key.startswith("race/to-") and key.endswith("/kept")
    }
    *_, end = raced
    assert raced == going_on | {end: [result.best_trial]}, "at the end, nobody goes on"
    for key, kept in swept.items():
        assert set(kept) == {n for n in range(4) if [n, None] not in units[key]}
    assert {heat for heat, *_ in map(str.partition, decided, "/" * len(decided))} == {"sweep", "race"}
    assert all(set(event.kept) <= set(event.candidates) for event in of(RungDecided, events))
    (chosen,) = of(FinalistsChosen, events)
    assert (list(chosen.candidates), list(chosen.kept)) == ([0, 1, 2, 3], by_key["sweep/finalists"])
    assert there
    assert all(there)
    assert {event.heat for event in of(CheckpointSaved, events)} == {"sweep", "race"}
    assert "sweep at epoch 1: 2 of 4 go on" in " ".join(event.text for event in of(MessageSaid, events))
    trained = sum(event.epochs for event in of(EpochsTrained, events))
    heats = of(HeatBegan, events)
    assert trained == sum(event.epochs for event in heats) == len(of(EpochEnded, events))
    bounds = [type(event) for event in events if isinstance(event, HeatBegan | HeatEnded)]
    assert bounds == [HeatBegan, HeatEnded] * len(heats), "each heat ends before the next one begins"


def forgetful(events: list[Event]) -> list[Event]:
    return [replace(event, seconds=0, recalled=False) for event in events]


class Remembers:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)


@pytest.mark.usefixtures("one_process")
def test_what_a_resumed_run_recalls_is_told_as_such_and_nothing_twice(quick: Quick) -> None:
    first, second, third = Remembers(), Remembers(), Remembers()
    quick(callbacks=[first], **SMALL)
    whole = quick(callbacks=[second], **SMALL)
    assert as_lines(second.events) == as_lines(first.events)
    for kind in (EpochEnded, TrialConfigured, RungDecided, FinalistsChosen):
        again = of(kind, second.events)
        assert again, kind
        assert forgetful(again) == forgetful(of(kind, first.events)), kind
        assert all(event.recalled for event in again), kind
    bounds = [type(event) for event in second.events if isinstance(event, HeatBegan | HeatEnded)]
    assert bounds == [HeatBegan, HeatEnded], "the race is over"
    grown = quick(callbacks=[third], **{**SMALL, "num_samples": 6})
    assert as_lines([event for event in third.events if event.recalled]) == as_lines(first.events)
    assert as_lines(third.events) == journal(grown, "metrics")
    assert len(as_lines(third.events)) > len(as_lines(first.events))
    assert whole.best_trial == of(RunEnded, first.events)[0].best_trial


@pytest.mark.usefixtures("one_process")
def test_one_that_raises_is_left_out_and_changes_nothing(quick: Quick) -> None:
    told: list[Event] = []
    plain = quick(name="plain", callbacks=[told.append], **SMALL)
    raised: list[Event] = []

    def breaks(event: Event) -> None:
        raised.append(event)
        if isinstance(event, EpochEnded):
            raise ArithmeticError("full disk")

    others: list[Event] = []
    with pytest.warns(UserWarning, match=r"(?s)breaks.* raised at EpochEnded.*Traceback.*ArithmeticError: full disk"):
        result = quick(name="raises", callbacks=[breaks, others.append], **SMALL)
    assert len(of(EpochEnded, raised)) == 1
    # Groups train beside each other: whose epoch ends first may differ.
    assert Counter(map(type, others)) == Counter(map(type, told))
    assert result.trials == plain.trials
    assert result.best_metric == plain.best_metric
    for name, weights in result.best_model().state_dict().items():
        assert torch.equal(plain.best_model().state_dict()[name], weights)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("event", [EpochsTrained, CheckpointSaved])
def test_one_that_ends_the_script_does_so_also_within_training(event: type[Event], quick: Quick) -> None:
    whole = quick(name="whole")

    def leaves(told: Event) -> None:
        if isinstance(told, event):
            sys.exit(3)

    with pytest.raises(SystemExit, match="3"):
        quick(callbacks=[leaves])
    again = quick()
    assert again.best_metric == whole.best_metric
    assert not [record.error for record in again.trials if record.error]


@pytest.mark.usefixtures("one_process")
def test_it_is_told_that_a_run_was_interrupted(quick: Quick) -> None:
    events: list[Event] = []

    def interrupts(event: Event) -> None:
        events.append(event)
        if isinstance(event, RungDecided):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="the same call with storage_path="):
        quick(callbacks=[interrupts], **SMALL)
    ended = events[-1]
    assert isinstance(ended, RunEnded)
    assert (ended.error or "").startswith("KeyboardInterrupt: the same call")
    assert ended.best_trial is None


async def awaited(event: Event) -> None:
    """A callback that nothing would await."""


@pytest.mark.parametrize(
    ("callbacks", "named"),
    [
        (print, "`callbacks` is <built-in function print>, but must be a list of"),
        ([print, 3], r"`callbacks\[1\]` is 3, but must be a function of an event"),
        ([Remembers], r"`callbacks\[0\]` is <class .*Remembers'>, but must be"),
        ([awaited], r"`callbacks\[0\]` is <function awaited.*, but must be without `async`"),
    ],
)
def test_what_is_no_callback_is_refused_before_work_starts(
    callbacks: Any, named: str, quick: Quick, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=named):
        quick(callbacks=callbacks)
    assert not (tmp_path / "run").exists()


def test_a_trial_that_ended_by_itself_is_told_of_once(problem: Problem, tmp_path: Path) -> None:
    events: list[Event] = []
    with Store.open(tmp_path / "run", {}, "auto") as store:
        run = Run(problem, store, Callbacks([events.append]))
        lines = [{"event": "metrics", "heat": "race", "trial": 3, "epoch": 2, "val_loss": 0.5}]
        run.record("race/trial-3/to-2", Unit({"checkpoint": "race/trial-3/to-2"}, lines))
        for _ in range(2):
            record_done(run, 3)
    assert [(event.trial, event.epoch) for event in of(TrialEnded, events)] == [(3, 2)]
