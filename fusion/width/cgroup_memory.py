"""The memory that the cgroups of this process (Slurm, containers) have left. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")

_LIMITS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""For each version of cgroups: the files of limit and usage, and the entry of `memory.stat` for pages of files."""


def left_in_cgroups() -> list[int]:
    """Return the number of bytes that each cgroup of this process, and each above it, may still take.

    Inactive pages of files count as free, because the kernel reclaims them.
    """
    return [left for cgroup in _cgroups() if (left := _left_of(cgroup)) is not None]


def _cgroups() -> Iterator[Path]:
    """Yield the folders of all cgroups that limit this process's memory, the innermost first."""
    try:
        lines = [line.strip().split(":", 2) for line in OWN_CGROUPS.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if controllers and "memory" not in controllers.split(","):
            continue
        top = CGROUPS / "memory" if controllers else CGROUPS
        own = top / path.lstrip("/")
        yield from (own, *(parent for parent in own.parents if parent == top or top in parent.parents))


def _left_of(cgroup: Path) -> int | None:
    """Return the number of bytes that a cgroup may still take; None if it has no limit."""
    for limit, usage, files in _LIMITS:
        try:
            most, used = int((cgroup / limit).read_text()), int((cgroup / usage).read_text())
            parts = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # the cgroup has no such files, or its limit is "max"
            continue
        return max(0, most - used + int(parts.get(files, 0)))
    return None
