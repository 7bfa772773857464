from __future__ import annotations

import logging
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.scale_rows import StandInController, stand_in_trial
from hydro_rasda import RASDAScheduler
from hydro_rasda.backends.ray.event_log import _error


@pytest.mark.parametrize("kept", [0, -3])
def test_an_error_that_a_full_disk_cut_short_is_told_as_that(kept: int, tmp_path: Path) -> None:
    path = tmp_path / "error.pkl"
    path.write_bytes(pickle.dumps(OSError("[Errno 28] No space left on device"))[:kept])
    trial: Any = SimpleNamespace(pickled_error_file=str(path), local_path=str(tmp_path))
    assert "could not be written to" in _error(trial)
    assert "MiB left" in _error(trial)


@pytest.mark.parametrize("free", [0, 2**30])
def test_a_script_is_told_of_a_full_disk_where_a_trial_fails(
    free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "Resources": {"CPU": 32.0}}])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    scheduler = RASDAScheduler(max_t=4, metric="loss", mode="min")
    controller = StandInController(scheduler, [[0.0] * 4], str(tmp_path))
    trial = stand_in_trial(0, str(tmp_path))
    scheduler.on_trial_add(controller, trial)
    with caplog.at_level(logging.WARNING, logger="hydro_rasda"):
        scheduler.on_trial_error(controller, trial)
    assert ("is full" in caplog.text) == (free == 0)
