"""What Tune's events become in a run's journal, without Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.tune.experiment import Experiment

from hydro_rasda.backends.ray.event_log import EventLog, EventLogger
from hydro_rasda.backends.ray.full_size import offer_of
from hydro_rasda.backends.ray.run_recorder import RunRecorder
from hydro_rasda.backends.ray.trial_feed import Offer, TrialFeed
from hydro_rasda.problem import Problem
from hydro_rasda.run.state import Run
from hydro_rasda.run.targets import recall_targets, saved_epochs
from tests.hydro_rasda.scripted import open_run

Tell = Callable[..., None]

MEASURED = {"noise": {"signal": 0.5, "noise": 32.0}, "times": {"1": [0.25]}}


@pytest.fixture
def run(problem: Problem, tmp_path: Path) -> Iterator[Run]:
    opened = open_run(tmp_path / "run", problem, 2, max_t=4)
    yield opened
    opened.store.close()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EventLog]:
    opened = EventLog(tmp_path / "events.jsonl")
    yield opened
    opened.close()


@pytest.fixture
def tell(tmp_path: Path, log: EventLog) -> Tell:
    """Writes epochs of trial 0, and a checkpoint after the last of them unless told otherwise."""

    def write(*epochs: int, saved: bool = True, rescaled: Any = (), measured: Any = None, **config: Any) -> None:
        for epoch in epochs:
            metrics = {"train_loss": 1.0, "val_loss": 1 / epoch}
            log.write({"event": "metrics", "trial": 0, "epoch": epoch, "metrics": metrics, "seconds": 2.0})
        if saved:
            folder = tmp_path / f"checkpoint-{epochs[-1]}"
            folder.mkdir(exist_ok=True)
            state = {"model": {"weight": torch.tensor([float(epochs[-1])])}}
            more = {"rescaled": list(rescaled), "measured": measured or {}}
            torch.save({"state": state, "iteration": epochs[-1], **more}, folder / "worker.pt")
            log.write({"event": "saved", "trial": 0, "path": str(folder), "origin": 0, "config": {"lr": 0.1} | config})

    return write


def units(run: Run) -> dict[str, tuple[Any, list[int], float]]:
    return {
        key: (unit.value, [line["epoch"] for line in unit.lines if line["event"] == "metrics"], unit.seconds)
        for key, unit in run.store.units().items()
    }


def test_a_unit_ends_where_a_checkpoint_was_taken(run: Run, log: EventLog, tell: Tell) -> None:
    recorder = RunRecorder(run, log)
    tell(1, 2, saved=False)
    recorder.record_new()
    assert units(run) == {}
    tell(3)
    tell(4, saved=False)
    recorder.record_new()
    name = "target/trial-0/to-3"
    assert units(run) == {name: ({"checkpoint": name}, [1, 2, 3], 6.0)}
    assert run.store.load(name)["model"]["weight"] == 3
    log.write({"event": "ended", "trial": 0})
    recorder.record_new()
    assert list(units(run)) == [name, "target/trial-0/to-4", "target/trial-0/ended-after-4"]
    assert units(run)["target/trial-0/to-4"] == ({"checkpoint": None}, [4], 2.0)
    assert run.checkpoints == {0: name}


def test_a_checkpoint_that_tune_left_half_written_counts_for_nothing(
    run: Run, log: EventLog, tell: Tell, tmp_path: Path
) -> None:
    """As after a kill: what it held waits for the next, or trains again."""
    tell(1, 2)
    (tmp_path / "checkpoint-2" / "worker.pt").write_bytes(b"half")
    recorder = RunRecorder(run, log)
    recorder.record_new()
    assert units(run) == {}
    tell(3)
    recorder.record_new()
    assert list(units(run)) == ["target/trial-0/to-3"]


def test_a_log_that_was_read_before_changes_nothing(run: Run, log: EventLog, tell: Tell, tmp_path: Path) -> None:
    """As after a kill: epochs that no checkpoint held yet still wait."""
    tell(1, 2)
    tell(3, saved=False)
    RunRecorder(run, log).record_new()
    before = (run.store.path / "journal.jsonl").read_bytes()
    again = EventLog(tmp_path / "events.jsonl")
    recorder = RunRecorder(run, again)
    recall_targets(run)
    recorder.record_new()
    assert (run.store.path / "journal.jsonl").read_bytes() == before
    tell(4)
    recorder.record_new()
    again.close()
    assert units(run)["target/trial-0/to-4"][1] == [3, 4]
    recall_targets(run)
    assert run.checkpoints == {0: "target/trial-0/to-4"}
    assert run.store.has("target/trial-0/to-4"), "what was recalled once more lost its last checkpoint"


def test_epochs_repeated_after_a_failure_count_once(run: Run, log: EventLog, tell: Tell) -> None:
    recorder = RunRecorder(run, log)
    tell(1)
    tell(2, 3, saved=False)
    log.write({"event": "recovers", "trial": 0, "error": "its process died"})
    tell(2, 3)
    recorder.record_new()
    assert [line["epoch"] for line in run.metrics["target", 0]] == [1, 2, 3]
    assert saved_epochs(run, 0) == 3


def test_a_failure_is_kept_once_and_none_of_a_model_that_is_trained(run: Run, log: EventLog, tell: Tell) -> None:
    recorder = RunRecorder(run, log)
    tell(1)
    for _ in range(2):
        log.write({"event": "failed", "trial": 0, "error": "raised"})
        recorder.record_new()
    assert run.failures == {0: "raised"}
    assert sum("failed" in key for key in units(run)) == 1
    tell(2, 3, 4)
    log.write({"event": "failed", "trial": 0, "error": "died at its end"})
    recorder.record_new()
    assert run.failures == {}


def test_what_else_going_on_needs_is_kept_with_the_checkpoint(run: Run, log: EventLog, tell: Tell) -> None:
    """Where a warm-up after growth stands, what was measured, and what PBT changed, which the journal tells once."""
    recorder = RunRecorder(run, log)
    rescaled = [{"start": 1.0, "target": 2.0, "steps": 7, "done": 3}]
    for epoch in (1, 2, 3):
        tell(epoch, rescaled=rescaled, measured=MEASURED, lr=0.1 if epoch == 1 else 0.2)
        recorder.record_new()
    values = [value for value, *_ in units(run).values()]
    assert values[0] == {"checkpoint": "target/trial-0/to-1", "rescaled": rescaled, "measured": MEASURED}
    assert values[2] == {
        "checkpoint": "target/trial-0/to-3",
        "origin": 0,
        "mutable": {"lr": 0.2},
        "rescaled": rescaled,
        "measured": MEASURED,
    }
    told = [(key, line["config"]) for key, unit in run.store.units().items() for line in unit.lines if "config" in line]
    assert told == [("target/trial-0/to-2", {"lr": 0.2})]


def test_a_trial_starts_from_what_was_taken_in(run: Run, log: EventLog, tell: Tell, tmp_path: Path) -> None:
    """Its state, where its warm-up stands, what was measured, and the configuration that it was trained with."""
    rescaled = [{"start": 1.0, "target": 2.0, "steps": 7, "done": 3}]
    tell(1, 2, rescaled=rescaled, measured=MEASURED, lr=0.2)
    tell(3, saved=False)
    RunRecorder(run, log).record_new()
    offer = offer_of(run, 0, tmp_path / "ray")
    assert (offer.origin, offer.config) == (0, {"lr": 0.2})
    assert offer.start is not None
    saved = torch.load(Path(offer.start, "worker.pt"), weights_only=True)
    assert saved == {
        "state": {"model": {"weight": torch.tensor([2.0])}},
        "iteration": 2,
        "rescaled": rescaled,
        "measured": MEASURED,
    }
    assert offer_of(run, 1, tmp_path / "ray") == Offer(1, {"lr": 0.1})

    feed = TrialFeed(Experiment("ray", lambda config: None, storage_path=str(tmp_path)))
    feed.offer({0: offer})
    trial = feed.next_trial()
    assert trial is not None
    assert trial.config == {"trial": 0, "config": {"lr": 0.2}}
    assert trial.checkpoint.path == offer.start
    at = trial.latest_checkpoint_result.metrics
    assert (at["training_iteration"], at["epoch"], at["val_loss"]) == (2, 2, 0.5)


def test_an_epoch_takes_its_own_time_without_the_start_before_it(log: EventLog) -> None:
    metrics = {"val_loss": 0.5, "workers": 2, "gradient_noise_scale": 70.0, "scaling_efficiency": 0.9}
    result = {"epoch": 1, **metrics, "time_this_iter_s": 30.0}
    for seconds in ({"epoch_seconds": 2.0}, {}):
        EventLogger(log).on_trial_result(0, [], SimpleNamespace(trial_id="0"), result | seconds)
    events = [event for _, event in log.read()]
    assert [event["seconds"] for event in events] == [2.0, 30.0]
    assert events[0]["metrics"] == metrics
