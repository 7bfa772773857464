from __future__ import annotations

import sys
from pathlib import Path

import pytest
from filelock import FileLock

from hydro_rasda.run import run_lock as module
from hydro_rasda.run.run_lock import LOCK, held


@pytest.mark.skipif(sys.platform != "linux", reason="the list of locks is Linux's")
def test_a_run_is_held_while_its_lock_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where a file of the same number on another device is locked."""
    assert not held(tmp_path)
    with FileLock(tmp_path / LOCK):
        assert held(tmp_path)
        mine = f":{(tmp_path / LOCK).stat().st_ino} "
        (line,) = (line for line in Path("/proc/locks").read_text().splitlines() if mine in line and "->" not in line)
        for device, expected in ((line.split()[5].rpartition(":")[0], True), ("00:99", False)):
            before, _, after = line.partition(line.split()[5])
            (tmp_path / "locks").write_text(f"{before}{device}{mine.rstrip()}{after}\n")
            monkeypatch.setattr(module, "_LOCKS", tmp_path / "locks")
            assert held(tmp_path) is expected
        monkeypatch.undo()
    assert not held(tmp_path)
