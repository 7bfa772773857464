import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusion.width import cgroup_memory, memory
from fusion.width.memory import available_memory, keep_freed_memory

CPU = torch.device("cpu")
linux = pytest.mark.skipif(sys.platform != "linux", reason="the resident set is read from /proc")


PEAKS = """
import torch
from fusion.width.memory import peak_memory

before = torch.ones(2**26, dtype=torch.uint8)
for _ in range(20):
    with peak_memory(torch.device("cpu")) as peak:
        for _ in range(3):
            torch.ones(2**24, dtype=torch.uint8)  # freed before the next
    if 2**23 < peak.bytes < 5 * 2**23:
        break
print(peak.bytes)
"""


@linux
def test_a_peak_is_what_was_held_at_once_beyond_what_was_there_before() -> None:
    """In a process of its own: where many tests ran before, the heap holds what they freed, and a try takes seconds.

    One try in twenty is enough: a system short of memory takes pages back from a process while it is measured. What was
    there before would make the peak five times as large, and the three blocks at once three times. Twice is fine: the
    heap need not place a block where the one before was.
    """
    done = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True)
    assert 2**23 < int(done.stdout) < 5 * 2**23


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
    """Of both versions of cgroups, also where a group above the process's own has it; caches of files can be freed.

    A line that is none is left out.
    """
    (tmp_path / "cgroup").write_text(f"\n9:pids:/\n{line}\n")
    (tmp_path / folder).mkdir(parents=True)
    for name, content in files.items():
        (tmp_path / folder / name).write_text(str(content))
    (tmp_path / folder / "memory.stat").write_text("inactive_file 1024\ntotal_inactive_file 1024\n")
    monkeypatch.setattr(cgroup_memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(cgroup_memory, "OWN_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_kilobytes", lambda path, field: 64 * GIB)
    assert available_memory(CPU) == GIB + 1024


def test_keep_freed_memory_says_whether_it_could() -> None:
    assert isinstance(keep_freed_memory(), bool)
