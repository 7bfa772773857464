"""What a computation takes from a device's memory, and what freed memory costs on the CPU."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_HEAP_BLOCK = 32 * 2**20


@dataclass
class Peak:
    """What `peak_memory` measures.

    Attributes:
        bytes: The most that was held at once, over what was held before.
    """

    bytes: int = 0


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measure a peak in bytes: of the resident set on the CPU (Linux; else 0), of allocated memory on CUDA.

    The resident set counts what the heap holds but does not use, so it is larger than the tensors alive.
    """
    peak = Peak()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated(device) - before
        return
    _return_freed_memory()
    _reset_resident_peak()
    before = _resident("VmRSS")
    yield peak
    peak.bytes = max(0, _resident("VmHWM") - before)


def available_memory(device: torch.device) -> int | None:
    """Bytes that new tensors on `device` may take; None where the system does not tell."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return _kilobytes("/proc/meminfo", "MemAvailable")


def keep_freed_memory() -> bool:
    """Let this process reuse freed blocks of up to 32 MiB, rather than return them to the kernel (glibc only).

    By default glibc returns large blocks when they are freed, and the kernel zeroes new pages for the next
    step. The tensors of K members are large: measured on 2 cores, the page faults took up to half of a fused
    step. The price: memory that a step needed stays with the process. Torch on CUDA does the same.

    Returns:
        Whether the C library took the setting. It holds for the whole process.
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
        pass  # Then the peak is that of the process so far: exact only while it grows.


def _resident(field: str) -> int:
    return _kilobytes("/proc/self/status", field) or 0


def _kilobytes(path: str, field: str) -> int | None:
    try:
        with open(path) as file:
            lines = dict(line.split(":", 1) for line in file)
    except OSError:
        return None
    return int(lines[field].split()[0]) * 1024 if field in lines else None
