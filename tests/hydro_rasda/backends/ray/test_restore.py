"""SIGKILL to a real driver in the middle of an experiment, and `Tuner.restore` in a new one."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hydro_rasda.backends.ray import JournalEntry, read_journal
from hydro_rasda.backends.ray.report_journal import replay
from hydro_rasda.schedulers import RASDA

COMMAND = [sys.executable, "-m", "tests.hydro_rasda.backends.ray.restore_script"]


def survivors_reached(path: Path, workers: int) -> list[JournalEntry]:
    if not (path / "rasda.jsonl").exists():
        return []
    text = (path / "rasda.jsonl").read_text()
    if not text.endswith("\n"):
        return []
    entries = read_journal(str(path))
    return entries if any(e.workers >= workers for e in entries) else []


@pytest.mark.slow
def test_rungs_promotions_and_sizes_come_back(tmp_path: Path) -> None:
    path = tmp_path / "run"
    driver = subprocess.Popen([*COMMAND, str(tmp_path)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 1000
    while not (before := survivors_reached(path, workers=2)) and time.monotonic() < until:
        assert driver.poll() is None, "the first run ended before it was killed"
        time.sleep(0.05)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert before
    before = read_journal(str(path))
    restored = subprocess.run([*COMMAND, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "FINISHED 0 0.0 8" in restored.stdout, restored.stderr[-3000:]

    after = read_journal(str(path))
    assert after[: len(before)] == before
    trials = {e.trial for e in after}
    assert len(trials) == 5
    rungs_before, rungs_after = replay(before, trials).rungs, replay(after, trials).rungs
    for milestone, rung in rungs_before.items():
        assert list(rungs_after[milestone].items())[: len(rung)] == list(rung.items())
    decided = [(e.trial, e.milestone) for e in after if e.milestone is not None]
    assert len(decided) == len(set(decided)), "a rung was decided twice"
    rule = RASDA(max_t=8)
    assert all(e.workers == rule.workers_at(e.t - 1) for e in after)
    # One that was stopped may repeat what led there, if Ray had not saved that it was; it comes no further.
    stopped = {e.trial: e.t for e in before if e.decision == "stop"}
    assert not [e for e in after[len(before) :] if e.t >= stopped.get(e.trial, 9) and e.decision != "stop"]
