"""The devices of jobs: the GPUs of this machine, or its cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from hydro_rasda.argument_checks import check_function, check_is, check_number, require
from hydro_rasda.packing import nvml

_KEPT = 0.9
"""Share of free memory that jobs may have: estimates err, and other programs live here, too."""

_NODES = Path("/dev")
"""The folder of the files by which processes reach GPUs; a container without GPUs has none."""

_CGROUP = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class Device:
    """A GPU, or the cores of this machine, for jobs that run beside each other.

    Attributes:
        memory: Bytes for all jobs on it.
        compute: Sum of the shares that it has room for: 1 for a GPU, the cores of a CPU. It is more for a GPU that
            was measured to be faster than the others.
        environment: Set for its jobs.
        gpu: UUID of the GPU, by which memory and utilization are measured; "" for a CPU.
    """

    name: str
    memory: float
    compute: float = 1.0
    environment: Mapping[str, str] = field(default_factory=dict)
    gpu: str = ""

    def __post_init__(self) -> None:
        check_number("memory", self.memory, above=0)
        check_number("compute", self.compute, above=0)


def gpus() -> list[Device]:
    """The GPUs of this machine that CUDA_VISIBLE_DEVICES allows, with 90 % of their memory; needs `nvidia-ml-py`."""
    return [
        Device(f"gpu-{i}", _KEPT * memory, environment={"CUDA_VISIBLE_DEVICES": uuid}, gpu=uuid)
        for i, uuid, memory in nvml.gpus()
    ]


def cpu(cores: float | None = None, memory: float | None = None) -> Device:
    """Cores of this machine as one device.

    Args:
        cores: How many; by default those that this process may use.
        memory: Bytes for all jobs; by default 90 % of what is free, within the cgroup's limit.
    """
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    memory = _KEPT * _free_memory() if memory is None else memory
    # A job that takes all cores for its threads leaves none to share.
    threads = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
    return Device("cpu", memory, cores, {**threads, "CUDA_VISIBLE_DEVICES": ""})


def local_devices() -> list[Device]:
    """The GPUs of this machine, or its cores where it has none; ValueError if it has GPUs that cannot be measured."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles")  # the last one by Slurm
    unknown = not hidden and not nvml.available() and any(_NODES.glob("nvidia[0-9]*"))
    rule = "a list such as [cpu()] where GPUs cannot be measured: `pip install 'hydro-rasda[gpu]'` to use them"
    require(not unknown, "devices", None, rule)
    return gpus() or [cpu()]


Devices = Sequence[Device] | Callable[[], Sequence[Device]]
"""Those that there are; or a function that says which there are now, asked again and again."""


def check_listed(devices: Sequence[Device]) -> None:
    """Refuse what is no list of devices, or has two of one name."""
    check_is("devices", devices, Device, several=True)
    names = [device.name for device in devices]
    require(len({*names}) == len(names), "devices", names, "devices of different names")


def lister(devices: Devices | None) -> Callable[[], Sequence[Device]]:
    """Return a function that lists the devices; by default, those of this machine."""
    rule = "None, a list of one `Device` or more, or a function without arguments that returns a list of them"
    if devices is None:
        return partial(list, local_devices())
    if callable(devices):
        check_function("devices", devices, 0, rule=rule)
        return devices
    require(isinstance(devices, list | tuple) and len(devices) > 0, "devices", devices, rule)
    return partial(list, devices)


def _free_memory() -> float:
    free: float = psutil.virtual_memory().available
    for file in _CGROUP:
        try:
            free = min(free, float(file.read_text()))
        except (OSError, ValueError):  # no such cgroup, or "max"
            continue
    return free
