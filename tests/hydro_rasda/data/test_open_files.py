"""Real files, open in a process before it forks."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import sqlite3
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from hydro_rasda import loguniform, tune
from hydro_rasda.data import make_batches
from hydro_rasda.data.open_files import OwnFiles, open_files_again
from hydro_rasda.processes.forks import Died, Notify, imap_forked
from tests.hydro_rasda.problems import CPU

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the library forks on Linux alone")

ROWS, BYTES = 512, 1024


def write_rows(path: Path) -> Path:
    """Row i has the number i in each of its places."""
    np.arange(ROWS, dtype=np.float32).repeat(BYTES // 4).tofile(path)
    return path


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Open the file at the first read, and leave it out of pickles; the target is 1 where another row was read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def __len__(self) -> int:
        return ROWS

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        self._file = self._file or open(self._path, "rb")  # noqa: SIM115
        self._file.seek(BYTES * row)
        read = np.frombuffer(self._file.read(BYTES), np.float32)
        return torch.randn(8), torch.tensor(float(len(read) != BYTES // 4 or bool((read != row).any())))


@pytest.fixture
def rows(tmp_path: Path) -> Iterator[Rows]:
    """Rows whose file is open already: they were looked at."""
    data = Rows(write_rows(tmp_path / "rows"))
    assert data[3][1] == 0
    assert data._file is not None
    with data._file:
        yield data


def objective(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"loss": model(batch[0]).square().mean(), "wrong": batch[1].mean()}


def model_fn(config: Any, width_ratio: float = 1.0) -> nn.Module:
    width = int(64 * width_ratio)
    return nn.Sequential(nn.Linear(8, width), nn.Linear(width, 1))


def moved_by_a_fork(number: int) -> bool:
    """Whether a forked process that moves the position in a file moves that of this process, too."""
    link = Path(f"/proc/self/fd/{number}")

    def move(_: Notify) -> tuple[int, ...]:
        held = [os.path.realpath(other) for other in link.parent.iterdir()]
        return os.lseek(number, 0, 1), os.lseek(number, 7, 0), held.count(os.path.realpath(link))

    os.lseek(number, 3, os.SEEK_SET)
    (found,) = imap_forked([move], 1, lambda *_: None)
    assert found == (0, (3, 7, 1)), "the fork is where this process was, and holds the file once"
    return os.lseek(number, 0, os.SEEK_CUR) == 7


def held_by(library: str, path: Path) -> Any:
    """Something that keeps a file at this path open to read it."""
    if library == "zipfile":
        with zipfile.ZipFile(path, "w") as made:
            made.writestr("rows", bytes(100))
        return zipfile.ZipFile(path)
    if library == "sqlite3":
        database = sqlite3.connect(path)
        database.execute("CREATE TABLE t (i)")
        return database
    path.write_bytes(bytes(100))
    return open(path, library)


@pytest.mark.parametrize("library", ["rb", "r+b", "zipfile", "sqlite3", "unlinked"])
def test_a_fork_has_its_own_position_in_each_file_that_is_read(library: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    with contextlib.closing(held_by("r+b" if library == "unlinked" else library, path)):
        links = {os.path.realpath(link): int(link.name) for link in Path("/proc/self/fd").iterdir()}
        if library == "unlinked":
            path.unlink()
        assert not moved_by_a_fork(links[str(path)])


def test_files_that_are_written_or_locked_stay_shared(tmp_path: Path) -> None:
    with open(tmp_path / "log", "wb") as log, open(tmp_path / "lock", "w+b") as lock:
        assert moved_by_a_fork(log.fileno())
        assert not moved_by_a_fork(lock.fileno())
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert moved_by_a_fork(lock.fileno())


def test_a_file_of_the_kernel_whose_process_is_gone_is_left_alone() -> None:
    """As one that a thread reads to measure memory while another one forks."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as ended, open(f"/proc/{ended.pid}/smaps_rollup", "rb"):
        ended.communicate()
        ((_, done),) = imap_forked([lambda notify: 1], 1, lambda *_: None)
    assert done == 1


def test_a_file_that_cannot_be_opened_again_is_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows")

    def as_another_user(notify: Notify) -> None:
        if os.geteuid() == 0:  # who may open any file
            os.seteuid(65534)
            ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE: else the list of open files would be root's
        open_files_again()

    with open(path, "rb"):
        path.chmod(0)
        ((_, died),) = imap_forked([as_another_user], 1, lambda *_: None)
    assert isinstance(died, Died)
    assert "must open a file again that the process before it has open; close it, or set HYDRO_RASDA_" in died.how


@pytest.mark.parametrize("by_hand", [False, True])
def test_processes_that_load_have_their_own_positions(by_hand: bool, rows: Rows) -> None:
    given = (lambda size: DataLoader(rows, size, num_workers=2)) if by_hand else rows
    batches = make_batches(given, "train_data", CPU, 0, loader_workers=2)
    assert [int(batch[1].sum()) for batch in batches.in_order(8)] == [0] * (ROWS // 8)


def test_a_loaders_own_start_of_its_processes_is_called(tmp_path: Path) -> None:
    started: list[int] = []
    OwnFiles(started.append)(3)
    assert started == [3]
    loader = DataLoader(Rows(tmp_path / "rows"), 2, num_workers=1, worker_init_fn=started.append)
    batches = make_batches(lambda size: loader, "train_data", CPU, 0)
    assert batches.steps(2) == batches.steps(2) == ROWS // 2
    assert loader.worker_init_fn == OwnFiles(started.append), "wrapped once"


def test_children_that_tune_forks_read_their_own_rows(rows: Rows, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        result = tune(
            model_fn,
            {"lr": loguniform(1e-3, 1e-1)},
            train_data=rows,
            val_data=rows,
            objective=objective,
            num_samples=4,
            max_t=4,
            progress=False,
            storage_path=tmp_path / "runs",
        )
    finally:
        torch.set_num_threads(threads)
    wrong = [(h["train_wrong"], h["val_wrong"]) for trial in result.trials for h in trial.history]
    assert {*wrong} == {(0.0, 0.0)}
