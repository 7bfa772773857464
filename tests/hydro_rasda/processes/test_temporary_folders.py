"""Folders of processes that are killed before they could remove them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hydro_rasda.processes.temporary_folders import make_folder, owner, remove_left

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux alone")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_only_what_the_dead_left_is_removed(temporary: Path) -> None:
    with subprocess.Popen(["sleep", "600"]) as actor:
        left = Path(make_folder(owner(actor.pid)))
        (left / "worker.pt").touch()
        (mine := Path(make_folder(owner(os.getpid())))).joinpath("worker.pt").touch()
        others = [temporary / name for name in ("hydro_rasda-0-abc", "hydro_rasda-of-x", "checkpoint-1-1-a")]
        others.append(temporary / left.name.replace("-of-", "-of-another"))  # in a container that has this folder, too
        for other in others:
            other.mkdir()
        remove_left()
        assert left.exists()
        actor.send_signal(signal.SIGKILL)
    remove_left()
    assert set(temporary.iterdir()) == {mine, *others}
    assert not mine.stat().st_mode & 0o077


def test_a_number_that_is_given_again_is_another_process(temporary: Path) -> None:
    place, pid, started = owner(os.getpid()).split("-")
    earlier = f"{place}-{pid}-{int(started) - 1}"
    folder = Path(make_folder(earlier))
    remove_left()
    assert not folder.exists()


def test_a_link_is_not_followed(temporary: Path) -> None:
    target = temporary / "kept"
    target.mkdir()
    (target / "precious").touch()
    place = owner(os.getpid()).split("-")[0]
    (temporary / f"hydro_rasda-of-{place}-999999999-1-x").symlink_to(target)
    remove_left()
    assert (target / "precious").exists()
