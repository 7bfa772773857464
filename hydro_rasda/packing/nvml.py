"""Measurements of GPUs and their processes by NVIDIA's driver. Without `nvidia-ml-py`, no GPU is found."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hydro_rasda.common.argument_checks import require

VISIBLE = "CUDA_VISIBLE_DEVICES"

_PID_NAMESPACE, _HOSTS_INODE = Path("/proc/self/ns/pid"), 0xEFFFFFFC
"""The pid namespace of this process, and the inode of the host's pid namespace (PROC_PID_INIT_INO of Linux)."""


class Gpu(NamedTuple):
    """A GPU, or a part of one in MIG mode: its number on the machine, its UUID, and its bytes of memory."""

    number: str
    uuid: str
    memory: float


class _Found(NamedTuple):
    """A GPU of the machine; `parts` has the GPU itself, or its parts in MIG mode."""

    uuid: str
    model: str
    parts: Sequence[Gpu]


def available() -> bool:
    """Return whether `nvidia-ml-py` is installed and finds the driver."""
    return _library() is not None


def hidden() -> bool:
    """Return whether CUDA_VISIBLE_DEVICES hides all GPUs on purpose, as CUDA reads it."""
    first = os.environ.get(VISIBLE, "all").split(",")[0].strip()
    return first in ("", "NoDevFiles") or first.startswith("-")  # Slurm writes "NoDevFiles" for a job without a GPU


def gpus() -> list[Gpu]:
    """List the GPUs that CUDA_VISIBLE_DEVICES allows, as CUDA reads it, without GPUs that fell off the bus.

    Raise ValueError if the variable names only GPUs that do not exist, or has numbers whose order is unknown.
    """
    library = _library()
    if library is None or hidden():
        return []
    machine = list(_machine(library))
    visible, there = os.environ.get(VISIBLE), [part for gpu in machine if gpu is not None for part in gpu.parts]
    if visible is None or not there:
        return there
    words = [word.strip() for word in visible.split(",")]
    if re.match(r"\d", words[0]):
        by_bus = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.model for gpu in machine if gpu}) < 2
        rule = "UUIDs, or numbers with CUDA_DEVICE_ORDER=PCI_BUS_ID, where the GPUs are of several models"
        require(by_bus, VISIBLE, visible, rule)
        found = _numbered(words, machine)
    else:
        found = _named(words, machine)
    rule = f"GPUs that CUDA finds, such as {there[0].uuid}, each once; or '' to use none"
    require(bool(found), VISIBLE, visible, rule)
    return found


def _machine(library: Any) -> Iterator[_Found | None]:
    """Yield the GPUs of the machine in the order of their bus numbers; None for a GPU that fell off the bus."""
    for index in range(library.nvmlDeviceGetCount()):
        try:
            handle = library.nvmlDeviceGetHandleByIndex(index)
            whole = _gpu(library, str(index), handle)
            model = _text(library.nvmlDeviceGetName(handle))
        except library.NVMLError:
            yield None
            continue
        mig = _mig(library, index, handle)
        yield _Found(whole.uuid, model, [whole] if mig is None else mig)


def _gpu(library: Any, number: str, handle: Any) -> Gpu:
    memory = float(library.nvmlDeviceGetMemoryInfo(handle).total)
    return Gpu(number, _text(library.nvmlDeviceGetUUID(handle)), memory)


def _mig(library: Any, index: int, gpu: Any) -> list[Gpu] | None:
    """Return the parts of a GPU in MIG mode; None for a GPU in another mode."""
    try:
        if not library.nvmlDeviceGetMigMode(gpu)[0]:
            return None
    except library.NVMLError:  # this GPU has no MIG mode
        return None
    found = []
    for part in range(library.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            handle = library.nvmlDeviceGetMigDeviceHandleByIndex(gpu, part)
            found.append(_gpu(library, f"{index}.{part}", handle))
        except library.NVMLError:  # the GPU is divided into fewer parts
            continue
    return found


def _numbered(words: Sequence[str], machine: Sequence[_Found | None]) -> list[Gpu]:
    """Return the GPUs whose numbers are `words`, up to the first number without a GPU; [] if a number comes twice."""
    taken: list[int] = []
    for word in words:
        digits = re.match(r"\d+", word)
        number = int(digits[0]) if digits else -1
        if not 0 <= number < len(machine):
            break
        if number in taken:
            return []
        taken.append(number)
    return [part for number in taken if (gpu := machine[number]) is not None for part in gpu.parts]


def _named(words: Sequence[str], machine: Sequence[_Found | None]) -> list[Gpu]:
    """Return GPUs and MIG parts whose UUIDs begin with `words`, up to the first word that does not fit exactly one.

    The list is empty if a GPU or part comes twice.
    """
    there = [gpu for gpu in machine if gpu is not None]
    known = {part.uuid: [part] for gpu in there for part in gpu.parts} | {gpu.uuid: gpu.parts for gpu in there}
    found: list[Gpu] = []
    for word in words:
        fits = [parts for uuid, parts in known.items() if word and uuid.startswith(word)]
        if len(fits) != 1:
            break
        if any(part in found for part in fits[0]):
            return []
        found += fits[0]
    return found


def used_memory(uuid: str) -> float:
    """Return the bytes of a GPU's memory that all processes hold; 0 if the driver does not tell."""
    library = _library()
    if library is None:
        return 0.0
    try:
        return float(library.nvmlDeviceGetMemoryInfo(library.nvmlDeviceGetHandleByUUID(uuid)).used)
    except library.NVMLError:
        return 0.0


def memory_of(uuid: str, pids: Collection[int]) -> float | None:
    """Return the bytes of a GPU's memory that the processes `pids` hold; None if the driver does not tell.

    The driver knows processes by the pids of the host. In a container, pids differ, so that the answer is None there,
    too.
    """
    library = _library()
    if library is None:
        return None
    try:
        processes = library.nvmlDeviceGetComputeRunningProcesses(library.nvmlDeviceGetHandleByUUID(uuid))
    except library.NVMLError:
        return None
    held = [process.usedGpuMemory for process in processes if process.pid in pids]
    if None in held or not (held or _has_the_hosts_pids()):
        return None
    return float(sum(held))


def _has_the_hosts_pids() -> bool:
    try:
        return _PID_NAMESPACE.stat().st_ino == _HOSTS_INODE
    except OSError:
        return False


def share_of(uuid: str, pids: Collection[int], jobs: int = 1) -> float | None:
    """Return the share of a GPU that the processes of a job kept busy recently; None if the driver does not tell.

    Under MPS, the driver may tell only the share of the whole GPU. In a container, it may know only pids of the host.
    In both cases, each of the `jobs` on the GPU is assumed to have an equal part.
    """
    library = _library()
    if library is None:
        return None
    try:
        handle = library.nvmlDeviceGetHandleByUUID(uuid)
        whole = float(library.nvmlDeviceGetUtilizationRates(handle).gpu) / 100 / jobs
    except library.NVMLError:
        return None
    try:
        samples = library.nvmlDeviceGetProcessUtilization(handle, 0)
    except library.NVMLError:  # the driver does not support this call, or has no samples yet
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
