"""Measurement of the memory that a computation takes, and a setting that lets a process reuse freed memory."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fusion.width.cgroup_memory import left_in_cgroups

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_HEAP_BLOCK = 32 * 2**20
# Share of the free memory that training may use. The rest is left for other code.
_SHARE_OF_FREE_MEMORY = 0.9


@dataclass
class Peak:
    """The result of `peak_memory`: the largest memory in `bytes` at any time, minus that at the start."""

    bytes: int = 0


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measure the peak memory of the code in this context.

    On CUDA, the peak is the larger of two numbers: the memory of tensors, and the memory that the allocator took from
    the device. The second one includes fragments and the pools of recorded steps.

    On a CPU, the peak of the resident set is measured; without Linux, the result is 0. The resident set also includes
    memory that the heap holds but does not use. Pages of files, such as code that a library runs for the first time,
    are subtracted, because processes share them. The system does not tell when it mapped these pages. The measured peak
    is therefore too low by the pages that were mapped after the true peak.
    """
    peak = Peak()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        held, taken = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        yield peak
        allocated = torch.cuda.max_memory_allocated(device) - held
        peak.bytes = max(allocated, torch.cuda.max_memory_reserved(device) - taken)
        return
    _return_freed_memory()
    _reset_resident_peak()
    before, files = _resident("VmRSS"), _resident("RssFile")
    yield peak
    peak.bytes = max(0, _resident("VmHWM") - before - max(0, _resident("RssFile") - files))


@contextmanager
def objects_so_far_set_aside(device: torch.device) -> Iterator[None]:
    """Let the garbage collector skip all present objects, inside this context.

    This saves time, because each measurement of memory begins with a garbage collection.
    """
    if device.type == "cuda":
        # Garbage may hold GPU memory that fused groups need, so collect it first. Do not collect it on a CPU, because a
        # full collection takes longer than the measured steps of small models.
        gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def available_memory(device: torch.device) -> int | None:
    """Return the number of bytes available for new tensors on `device`; None if the system does not tell."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    known = [_kilobytes("/proc/meminfo", "MemAvailable"), *left_in_cgroups()]
    return min((left for left in known if left is not None), default=None)


def usable_memory(device: torch.device) -> int | None:
    """Return the share of `available_memory` that training may take, in bytes; None if the system does not tell."""
    free = available_memory(device)
    return None if free is None else int(_SHARE_OF_FREE_MEMORY * free)


def keep_freed_memory() -> bool:
    """Let this process reuse freed blocks of up to 32 MiB, rather than return them to the kernel (glibc only).

    By default, glibc returns large freed blocks to the kernel, which then has to zero new pages for the next step. This
    takes long, because the tensors of K members are large. On 2 cores, page faults took up to half of the time of a
    fused step. With this setting, the process keeps the memory that a step needed, as torch does on CUDA.

    Returns:
        True if the C library took the setting. It holds for the whole process.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_HEAP_BLOCK) and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))


def _return_freed_memory() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _reset_resident_peak() -> None:
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass  # `VmHWM` is then the peak since the process began, so the measured peak may be too large.


def _resident(field: str) -> int:
    return _kilobytes("/proc/self/status", field) or 0


def _kilobytes(path: str, field: str) -> int | None:
    try:
        with open(path) as file:
            lines = dict(line.split(":", 1) for line in file)
    except OSError:
        return None
    return int(lines[field].split()[0]) * 1024 if field in lines else None
