"""A real process, interrupted and killed at several points, ends as an unbroken one does."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from hydro_rasda import RaceConfig, SweepConfig, TuneResult, load, uniform
from hydro_rasda.contracts import Event
from hydro_rasda.history.history import is_live
from hydro_rasda.history.lines import Unit
from hydro_rasda.run.checkpoints import DamagedCheckpoint
from hydro_rasda.run.events import RungDecided
from hydro_rasda.run.journal import DamagedJournal
from hydro_rasda.run.run_folder import Store
from tests.hydro_rasda import resumable
from tests.hydro_rasda.conftest import on_threads
from tests.hydro_rasda.journals import signed
from tests.hydro_rasda.models import mlp


def start(storage_path: Path, name: str, threads: int = 1, units: int = 1000) -> subprocess.Popen[str]:
    """It waits once its journal has so many units."""
    command = [sys.executable, "-m", "tests.hydro_rasda.resumable", str(storage_path), name, "0", str(units)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return output


def finish_here(storage_path: Path, name: str) -> str:
    """The same on one thread of this process, which has imported all of it."""
    printed = io.StringIO()
    with on_threads(1), contextlib.redirect_stdout(printed):
        resumable.main(str(storage_path), name)
    return printed.getvalue()


def lines(journal: Path) -> list[dict[str, Any]]:
    """The journal's whole lines."""
    if not journal.exists():
        return []
    return [json.loads(raw) for raw in journal.read_bytes().splitlines(keepends=True) if raw.endswith(b"\n")]


def keys(journal: Path) -> list[str]:
    return [line["key"] for line in lines(journal) if line["event"] == "unit"]


def timeless(journal: Path) -> list[str]:
    """Lines without when things were done, beside what, in which run, and that epochs were trained again."""
    kept, of_a_run = [], ("seconds", "at", "swept", "left", "id", "sum")
    for line in lines(journal):
        if is_live(line.get("key", "")) and line["key"].endswith("/again"):
            continue
        told = {name: value for name, value in line.items() if name not in of_a_run}
        if isinstance(value := told.get("value"), dict):
            told["value"] = {name: part for name, part in value.items() if name not in ("beside", "device")}
        kept.append(json.dumps(told))
    return kept


def stop_after(units: int, how: signal.Signals, storage_path: Path, name: str, threads: int) -> str:
    """Start the run and send it a signal as soon as its journal has this many units; returns what it printed."""
    with start(storage_path, name, threads, units + 2) as process:
        while len(keys(storage_path / name / "journal.jsonl")) < units:
            assert process.poll() is None, "the run ended before it was stopped"
            time.sleep(0.002)
        os.kill(process.pid, how)
        output, _ = process.communicate()
    assert process.returncode not in (0, None)
    return output


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("threads", "often"),
    [(1, False), pytest.param(1, True, marks=pytest.mark.slow), pytest.param(2, True, marks=pytest.mark.slow)],
)
def test_killed_at_any_point_it_ends_with_the_same_result(tmp_path: Path, threads: int, often: bool) -> None:
    """On several threads, trials train beside each other, and their order in the journal is that of their ends."""
    unbroken = finish(start(tmp_path, "unbroken", threads)) if often else finish_here(tmp_path, "unbroken")
    whole = tmp_path / "unbroken" / "journal.jsonl"
    broken = tmp_path / "broken" / "journal.jsonl"
    order = keys(whole)
    first_kept = next(i for i, key in enumerate(order) if key.startswith("sweep/to-1/kept"))
    in_first_rung, between_rungs = first_kept - 1, first_kept + 1
    in_last_stage = next(i for i, key in enumerate(order) if key.startswith("race/")) + 2

    reached = [0]
    if often:
        said = stop_after(in_first_rung, signal.SIGINT, tmp_path, "broken", threads)
        assert f"KeyboardInterrupt: the same call with storage_path='{tmp_path}', name='broken' goes on" in said
        reached.append(len(keys(broken)))
    # The last one while two trials still train: after them, a run is over sooner than a signal comes.
    for point in (between_rungs, in_last_stage, len(order) - 6) if often else (in_last_stage,):
        stop_after(max(point, reached[-1] + 1), signal.SIGKILL, tmp_path, "broken", threads)
        reached.append(len(keys(broken)))
    assert all(earlier < later < len(order) for earlier, later in pairwise(reached))

    done = [key for key in keys(broken) if not is_live(key)]
    resumed = finish(start(tmp_path, "broken", threads))
    assert f"{len(done)} finished units of work are not repeated" in " ".join(resumed.split())
    assert resumed.splitlines()[-1] == unbroken.splitlines()[-1]
    assert len(keys(broken)) == len(set(keys(broken)))
    in_order = sorted if threads > 1 else list
    assert in_order(timeless(broken)) == in_order(timeless(whole))


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("gone", [True, False])
def test_a_finished_runs_winner_whose_weights_are_damaged_trains_again(
    quick: Callable[..., TuneResult], tmp_path: Path, gone: bool
) -> None:
    whole = quick(num_samples=4, sweep=SweepConfig(fusion=1))
    weights = whole.best_model().state_dict()
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob(f"race.trial-{whole.best_trial}.*")
    checkpoint.unlink() if gone else checkpoint.write_bytes(b"?" * 1000)
    again = quick(num_samples=4, sweep=SweepConfig(fusion=1))
    assert (again.best_trial, again.best_metric, again.finished) == (whole.best_trial, whole.best_metric, True)
    for name, value in again.best_model().state_dict().items():
        assert torch.equal(value, weights[name])


@pytest.mark.usefixtures("one_process")
def test_another_runs_checkpoint_is_not_taken_for_the_winners(quick: Callable[..., TuneResult], tmp_path: Path) -> None:
    """It has the same name and shapes; nor is one of the same run, of another trial."""
    arguments: dict[str, Any] = {"num_samples": 4, "sweep": SweepConfig(fusion=1), "space": {"lr": uniform(0.01, 0.1)}}
    whole = quick(**arguments)
    weights = whole.best_model().state_dict()
    checkpoint = whole.best_checkpoint
    assert checkpoint is not None
    (other,) = (path for path in checkpoint.parent.glob("race.*") if path != checkpoint)
    own, same_run = checkpoint.read_bytes(), other.read_bytes()
    quick(**arguments, name="other")
    another_run = (tmp_path / "other" / "checkpoints" / checkpoint.name).read_bytes()
    for wrong in (same_run, another_run):
        checkpoint.write_bytes(wrong)
        with pytest.raises(DamagedCheckpoint, match=f"{checkpoint} is not the one that this run wrote there"):
            load(whole.path).best_model(model_fn=mlp)
        again = quick(**arguments)
        assert (again.best_trial, again.best_metric, again.finished) == (whole.best_trial, whole.best_metric, True)
        for name, value in again.best_model().state_dict().items():
            assert torch.equal(value, weights[name])
    checkpoint.write_bytes(own)
    shutil.copytree(whole.path, tmp_path / "copy")
    copied = load(tmp_path / "copy").best_model(model_fn=mlp).state_dict()
    assert torch.equal(copied["0.weight"], weights["0.weight"])


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("each", [True, False])
def test_a_journal_that_was_doubled_is_the_run_that_it_was(
    quick: Callable[..., TuneResult], tmp_path: Path, each: bool
) -> None:
    whole = quick(num_samples=4)
    journal = tmp_path / "run" / "journal.jsonl"
    once = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(line * 2 for line in once) if each else b"".join(once * 2))
    for found in (load(whole.path), quick(num_samples=4)):
        assert [getattr(found, name) for name in ("best_metric", "cost", "finished")] == [
            getattr(whole, name) for name in ("best_metric", "cost", "finished")
        ]
        assert repr(found.trials) == repr(whole.trials)


@pytest.mark.usefixtures("one_process")
def test_a_journal_that_has_lost_its_trials_is_refused(quick: Callable[..., TuneResult], tmp_path: Path) -> None:
    quick(num_samples=4)
    journal = tmp_path / "run" / "journal.jsonl"
    lines = map(json.loads, journal.read_bytes().splitlines())
    journal.write_bytes(signed(line for line in lines if line["event"] != "trial"))
    with pytest.raises(DamagedJournal, match=f"'sweep/admitted-from-0' of {journal} does not follow"):
        quick(num_samples=4)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("heat", "surrogate"), [("sweep", 0.5), ("race", 0.5), ("race", 1)])
def test_what_a_disk_has_changed_is_trained_again(
    quick: Callable[..., TuneResult],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    heat: str,
    surrogate: float,
) -> None:
    """A run is interrupted after a rung, and its checkpoints get wrong bytes before it goes on."""

    def interrupt(event: Event) -> None:
        if isinstance(event, RungDecided) and event.heat == heat:
            raise KeyboardInterrupt

    arguments: dict[str, Any] = {
        "num_samples": 8,
        "sweep": SweepConfig(fusion=1, surrogate=surrogate),
        "race": RaceConfig(ema=0),
    }
    whole = quick(name="whole", **arguments)
    with pytest.raises(KeyboardInterrupt):
        quick(name="broken", callbacks=[interrupt], **arguments)
    for checkpoint in (tmp_path / "broken" / "checkpoints").iterdir():
        content = bytearray(checkpoint.read_bytes())
        content[::50] = bytes(byte ^ 1 for byte in content[::50])
        checkpoint.write_bytes(content)
    capsys.readouterr()
    broken = quick(name="broken", progress=True, **arguments)
    assert f"checkpoint {tmp_path / 'broken' / 'checkpoints' / heat}" in capsys.readouterr().out
    assert [t.status for t in broken.trials] == [t.status for t in whole.trials]
    assert [t.history for t in broken.trials] == [t.history for t in whole.trials]
    for name, value in whole.best_model().state_dict().items():
        assert torch.equal(broken.best_model().state_dict()[name], value)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("lines", [0, 1, 2])
def test_a_damaged_winner_trains_again_also_after_a_kill(
    quick: Callable[..., TuneResult], monkeypatch: pytest.MonkeyPatch, lines: int
) -> None:
    """The process that finds the damage ends after this number of units."""
    whole = quick(num_samples=4, sweep=SweepConfig(fusion=1))
    assert whole.best_checkpoint is not None
    whole.best_checkpoint.write_bytes(b"?" * 1000)
    record, left = Store.record, iter(range(lines))

    def killed(*given: Any, **named: Any) -> Unit:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return record(*given, **named)

    monkeypatch.setattr(Store, "record", killed)
    with pytest.raises(KeyboardInterrupt):
        quick(num_samples=4, sweep=SweepConfig(fusion=1))
    monkeypatch.undo()
    again = quick(num_samples=4, sweep=SweepConfig(fusion=1))
    assert (again.best_trial, again.best_metric, again.finished) == (whole.best_trial, whole.best_metric, True)
