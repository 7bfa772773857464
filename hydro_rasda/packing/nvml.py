"""Measurements of GPUs and their processes by NVIDIA's driver; none if `nvidia-ml-py` is not installed."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any, NamedTuple


class Gpu(NamedTuple):
    """A GPU: its place among those of the machine, its UUID, and bytes of its memory."""

    number: int
    uuid: str
    memory: float


def available() -> bool:
    """Return whether `nvidia-ml-py` is installed, and finds the driver."""
    return _library() is not None


def gpus() -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES allows; a GPU that fell off the bus is not among them."""
    library = _library()
    if library is None:
        return []
    found = []
    for index in range(library.nvmlDeviceGetCount()):
        try:
            handle = library.nvmlDeviceGetHandleByIndex(index)
            uuid = _text(library.nvmlDeviceGetUUID(handle))
            found.append(Gpu(index, uuid, float(library.nvmlDeviceGetMemoryInfo(handle).total)))
        except library.NVMLError:
            continue
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    wanted = [word for word in map(str.strip, visible.split(",")) if word]
    # CUDA takes the beginning of a UUID, too.
    return [gpu for gpu in found if str(gpu.number) in wanted or gpu.uuid.startswith(tuple(wanted))]


def memory_of(uuid: str, pids: Collection[int]) -> float:
    """Bytes of a GPU's memory that some processes hold; 0 where the driver does not tell."""
    library = _library()
    if library is None:
        return 0.0
    try:
        processes = library.nvmlDeviceGetComputeRunningProcesses(library.nvmlDeviceGetHandleByUUID(uuid))
    except library.NVMLError:
        return 0.0
    return float(sum(process.usedGpuMemory or 0 for process in processes if process.pid in pids))


def share_of(uuid: str, pids: Collection[int]) -> float | None:
    """Share of a GPU that some processes kept busy of late; None where the driver does not tell.

    If it tells of the whole GPU alone, as under MPS, it is the share of all processes there.
    """
    library = _library()
    if library is None:
        return None
    try:
        handle = library.nvmlDeviceGetHandleByUUID(uuid)
        whole = float(library.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
    except library.NVMLError:
        return None
    try:
        samples = library.nvmlDeviceGetProcessUtilization(handle, 0)
    except library.NVMLError:  # not supported, or nothing was sampled
        return whole
    own = [sample.smUtil for sample in samples if sample.pid in pids]
    return float(sum(own)) / 100 if own else whole


def _library() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver
        return None
    return pynvml


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
