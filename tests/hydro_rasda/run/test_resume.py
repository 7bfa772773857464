"""A real process, interrupted and killed at several points, ends as an unbroken one does."""

from __future__ import annotations

import json
import os
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

from hydro_rasda import Event, RungDecided, TuneResult


def start(storage_path: Path, name: str, threads: int = 1, units: int = 1000) -> subprocess.Popen[str]:
    """It waits once its journal has so many units."""
    command = [sys.executable, "-m", "tests.hydro_rasda.resumable", str(storage_path), name, "0", str(units)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    return output


def lines(journal: Path) -> list[dict[str, Any]]:
    """The journal's whole lines."""
    if not journal.exists():
        return []
    return [json.loads(raw) for raw in journal.read_bytes().splitlines(keepends=True) if raw.endswith(b"\n")]


def keys(journal: Path) -> list[str]:
    return [line["key"] for line in lines(journal) if line["event"] == "unit"]


def timeless(journal: Path) -> list[str]:
    """Lines without when things were done, and beside what."""
    kept = []
    for line in lines(journal):
        told = {name: value for name, value in line.items() if name not in ("seconds", "at", "swept")}
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
        output, _ = process.communicate(timeout=60)
    assert process.returncode not in (0, None)
    return output


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_killed_at_any_point_it_ends_with_the_same_result(tmp_path: Path, threads: int) -> None:
    """On several threads, trials train beside each other, and their order in the journal is that of their ends."""
    unbroken = finish(start(tmp_path, "unbroken", threads))
    whole = tmp_path / "unbroken" / "journal.jsonl"
    broken = tmp_path / "broken" / "journal.jsonl"
    order = keys(whole)
    first_kept = next(i for i, key in enumerate(order) if key.startswith("surrogate/to-1/kept"))
    in_first_rung, between_rungs = first_kept - 1, first_kept + 1
    in_last_stage = next(i for i, key in enumerate(order) if key.startswith("target/")) + 2

    said = stop_after(in_first_rung, signal.SIGINT, tmp_path, "broken", threads)
    assert f"KeyboardInterrupt: the same call with storage_path='{tmp_path}', name='broken' goes on" in said
    reached = [len(keys(broken))]
    # The last one while two trials still train: after them, a run is over sooner than a signal comes.
    for point in (between_rungs, in_last_stage, len(order) - 6):
        stop_after(max(point, reached[-1] + 1), signal.SIGKILL, tmp_path, "broken", threads)
        reached.append(len(keys(broken)))
    assert all(earlier < later < len(order) for earlier, later in pairwise(reached))

    resumed = finish(start(tmp_path, "broken", threads))
    assert f"{reached[-1]} units of work are done" in " ".join(resumed.split())
    assert resumed.splitlines()[-1] == unbroken.splitlines()[-1]
    assert len(keys(broken)) == len(set(keys(broken)))
    in_order = sorted if threads > 1 else list
    assert in_order(timeless(broken)) == in_order(timeless(whole))


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("gone", [True, False])
def test_a_finished_runs_winner_whose_weights_are_damaged_trains_again(
    quick: Callable[..., TuneResult], tmp_path: Path, gone: bool
) -> None:
    whole = quick(num_samples=4, fusion=1)
    weights = whole.best_model().state_dict()
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob(f"target.trial-{whole.best_trial}.*")
    checkpoint.unlink() if gone else checkpoint.write_bytes(b"?" * 1000)
    again = quick(num_samples=4, fusion=1)
    assert (again.best_trial, again.best_metric, again.finished) == (whole.best_trial, whole.best_metric, True)
    for name, value in again.best_model().state_dict().items():
        assert torch.equal(value, weights[name])


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("stage", "surrogate"), [("surrogate", 0.5), ("target", 0.5), ("target", 1)])
def test_what_a_disk_has_changed_is_trained_again(
    quick: Callable[..., TuneResult],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    stage: str,
    surrogate: float,
) -> None:
    """A run is interrupted after a rung, and its checkpoints get wrong bytes before it goes on."""

    def interrupt(event: Event) -> None:
        if isinstance(event, RungDecided) and event.stage == stage:
            raise KeyboardInterrupt

    arguments: dict[str, Any] = {"num_samples": 8, "fusion": 1, "surrogate": surrogate, "ema": 0}
    whole = quick(name="whole", **arguments)
    with pytest.raises(KeyboardInterrupt):
        quick(name="broken", callbacks=[interrupt], **arguments)
    for checkpoint in (tmp_path / "broken" / "checkpoints").iterdir():
        content = bytearray(checkpoint.read_bytes())
        content[::50] = bytes(byte ^ 1 for byte in content[::50])
        checkpoint.write_bytes(content)
    capsys.readouterr()
    broken = quick(name="broken", progress=True, **arguments)
    assert f"checkpoint {tmp_path / 'broken' / 'checkpoints' / stage}" in capsys.readouterr().out
    assert [t.status for t in broken.trials] == [t.status for t in whole.trials]
    assert [t.history for t in broken.trials] == [t.history for t in whole.trials]
    for name, value in whole.best_model().state_dict().items():
        assert torch.equal(broken.best_model().state_dict()[name], value)
