import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fusion.width import memory
from fusion.width.memory import available_memory, keep_freed_memory, peak_memory

CPU = torch.device("cpu")
linux = pytest.mark.skipif(sys.platform != "linux", reason="the resident set is read from /proc")


def peaks_at(work: Callable[[], object], expected: int, within: float) -> bool:
    """Whether the peak is what is expected, in one of fifty tries.

    For a while the system may take pages back from the process, and bring them in again, faster than it works.
    """
    for _ in range(50):
        with peak_memory(CPU) as peak:
            work()
        if peak.bytes == pytest.approx(expected, rel=within):
            return True
    return False


@linux
def test_a_peak_is_what_was_held_at_once() -> None:
    block = 64 * 2**20

    def one_after_another() -> None:
        for _ in range(3):
            torch.ones(block, dtype=torch.uint8)  # freed before the next

    assert peaks_at(one_after_another, block, within=0.1)


@linux
def test_a_peak_does_not_count_what_was_there_before() -> None:
    before = torch.ones(64 * 2**20, dtype=torch.uint8)
    assert peaks_at(lambda: torch.ones(16 * 2**20, dtype=torch.uint8), 16 * 2**20, within=0.2)
    del before


@linux
def test_available_memory_is_a_sensible_number() -> None:
    available = available_memory(CPU)
    assert available is not None
    assert 2**20 < available < 2**50


GIB = 2**30


@pytest.mark.parametrize(
    ("line", "folder", "files"),
    [
        ("0::/job/step", "job/step", {"memory.max": 2 * GIB, "memory.current": GIB}),
        ("0::/job/step", "job", {"memory.max": 2 * GIB, "memory.current": GIB}),
        ("4:memory:/slurm", "memory/slurm", {"memory.limit_in_bytes": 2 * GIB, "memory.usage_in_bytes": GIB}),
        ("4:memory:/elsewhere", "memory", {"memory.limit_in_bytes": 2 * GIB, "memory.usage_in_bytes": GIB}),
    ],
)
def test_a_limit_of_a_job_or_a_container_counts(
    line: str, folder: str, files: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of both versions of cgroups, also where a group above the process's own has it; caches of files can be freed."""
    (tmp_path / "cgroup").write_text(f"9:pids:/\n{line}\n")
    (tmp_path / folder).mkdir(parents=True)
    for name, content in files.items():
        (tmp_path / folder / name).write_text(str(content))
    (tmp_path / folder / "memory.stat").write_text("inactive_file 1024\ntotal_inactive_file 1024\n")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "OWN_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_kilobytes", lambda path, field: 64 * GIB)
    assert available_memory(CPU) == GIB + 1024


def test_keep_freed_memory_says_whether_it_could() -> None:
    assert isinstance(keep_freed_memory(), bool)
