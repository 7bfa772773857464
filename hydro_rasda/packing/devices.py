"""The devices of jobs: the GPUs of this machine, or its cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from fusion.width.cgroup_memory import left_in_cgroups
from hydro_rasda.common.argument_checks import check_function, check_is, check_number, is_text, require
from hydro_rasda.packing import nvml

_KEPT = 0.9
"""Share of free memory for jobs. It is below 1 because estimates err and other programs need memory, too."""

_NODES = Path("/dev")
"""The folder of the device files of GPUs; in a container without GPUs, it has no such files."""


@dataclass(frozen=True)
class Device:
    """A GPU, or the cores of this machine, which several jobs can share.

    Attributes:
        memory: Bytes for all jobs on the device together.
        compute: The sum of shares that fit on the device: 1 for a GPU, or the number of cores for a CPU. It is above 1
            for a GPU that was measured to be faster than the others.
        environment: Environment variables for the jobs of the device.
        gpu: UUID of the GPU, by which memory and utilization are measured; "" for a CPU.
    """

    name: str
    memory: float
    compute: float = 1.0
    environment: Mapping[str, str] = field(default_factory=dict)
    gpu: str = ""

    def __post_init__(self) -> None:
        for name in ("name", "gpu"):
            require(is_text(getattr(self, name)), name, getattr(self, name), "a text")
        require(isinstance(self.environment, Mapping), "environment", self.environment, "a dict of texts")
        for name, value in self.environment.items():
            holds = is_text(name) and name != "" and "=" not in name
            require(holds, "environment", name, "a dict whose keys are names of environment variables")
            fits = isinstance(value, str) and "\0" not in value
            require(fits, f"environment[{name!r}]", value, "a text without NUL bytes")
        check_number("memory", self.memory, above=0)
        check_number("compute", self.compute, above=0)


def gpus() -> list[Device]:
    """List the GPUs of this machine that CUDA_VISIBLE_DEVICES allows, with 90 % of their memory; needs `nvidia-ml-py`.

    Each part of a GPU in MIG mode is a device. CUDA_VISIBLE_DEVICES is read as CUDA reads it. Raise ValueError if it
    names no GPU of this machine, or if it numbers GPUs of several models without CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    return [
        Device(f"gpu-{i}", _KEPT * memory, environment={nvml.VISIBLE: uuid}, gpu=uuid)
        for i, uuid, memory in nvml.gpus()
    ]


def cpu(cores: float | None = None, memory: float | None = None) -> Device:
    """Make one device of the cores of this machine.

    Args:
        cores: The number of cores; by default those that this process may use.
        memory: Bytes for all jobs; by default 90 % of the memory that is free, both on the machine and in the cgroups
            of this process.
    """
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    if memory is None:
        memory = _KEPT * min([psutil.virtual_memory().available, *left_in_cgroups()])
    # By default, OpenMP starts a thread for each core, so that one job would leave no core to others. Each job
    # therefore gets one thread, unless the user has set another number.
    threads = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
    return Device("cpu", memory, cores, {**threads, nvml.VISIBLE: ""})


def local_devices() -> list[Device]:
    """List the GPUs of this machine, or its cores if it has no GPU; ValueError if its GPUs cannot be measured."""
    unknown = not nvml.hidden() and not nvml.available() and any(_NODES.glob("nvidia[0-9]*"))
    rule = "a list such as [cpu()] where GPUs cannot be measured: `pip install 'hydro-rasda[gpu]'` to use them"
    require(not unknown, "devices", None, rule)
    return gpus() or [cpu()]


Devices = Sequence[Device] | Callable[[], Sequence[Device]]
"""A list of devices, or a function that lists the present devices and is called again and again."""


def check_listed(devices: Sequence[Device]) -> None:
    """Refuse values that are no list of devices, and lists with two devices of the same name."""
    check_is("devices", devices, Device, several=True)
    names = [device.name for device in devices]
    require(len({*names}) == len(names), "devices", names, "devices of different names")


def lister(devices: Devices | None) -> Callable[[], Sequence[Device]]:
    """Return a function that lists the devices. With None, it lists the devices of this machine."""
    rule = "None, a list of one `Device` or more, or a function without arguments that returns a list of them"
    if devices is None:
        return partial(list, local_devices())
    if callable(devices):
        check_function("devices", devices, 0, rule=rule)
        return partial(_checked, devices)
    require(isinstance(devices, list | tuple) and len(devices) > 0, "devices", devices, rule)
    return partial(list, devices)


def _checked(devices: Callable[[], Sequence[Device]]) -> Sequence[Device]:
    listed = devices()
    check_listed(listed)
    return listed
