"""A real process, interrupted and killed at several points, ends as an unbroken one does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest


def start(storage_path: Path, name: str, threads: int = 1) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.hydro_rasda.resumable", str(storage_path), name]
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
    kept = [
        {name: value for name, value in line.items() if name not in ("seconds", "at", "swept")}
        for line in lines(journal)
    ]
    return [json.dumps(line) for line in kept]


def stop_after(units: int, how: signal.Signals, storage_path: Path, name: str, threads: int) -> str:
    """Start the run and send it a signal as soon as its journal has this many units; returns what it printed."""
    with start(storage_path, name, threads) as process:
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
        stop_after(point, signal.SIGKILL, tmp_path, "broken", threads)
        reached.append(len(keys(broken)))
    assert all(earlier < later < len(order) for earlier, later in pairwise(reached))

    resumed = finish(start(tmp_path, "broken", threads))
    assert f"{reached[-1]} units of work are done" in " ".join(resumed.split())
    assert resumed.splitlines()[-1] == unbroken.splitlines()[-1]
    assert len(keys(broken)) == len(set(keys(broken)))
    in_order = sorted if threads > 1 else list
    assert in_order(timeless(broken)) == in_order(timeless(whole))
