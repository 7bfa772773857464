"""Devices of this machine, and of one with GPUs, as a library of NVIDIA's name tells of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hydro_rasda.packing import Device, cpu, devices, gpus
from hydro_rasda.packing.devices import local_devices
from hydro_rasda.packing.nvml import memory_of, share_of


class NVMLError(Exception):
    """As the library calls it."""


class Nvml:
    """Three GPUs, of which the second fell off the bus."""

    NVMLError = NVMLError
    by_process = True

    def nvmlInit(self) -> None: ...  # noqa: N802

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        if index == 1:
            raise NVMLError
        return f"GPU-{index}"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        return uuid

    def nvmlDeviceGetUUID(self, handle: str) -> bytes:  # noqa: N802
        return handle.encode()

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:  # noqa: N802
        return SimpleNamespace(total=1000)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=pid, usedGpuMemory=memory) for pid, memory in ((1, 100), (2, 20), (3, None))]

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=70)

    def nvmlDeviceGetProcessUtilization(self, handle: str, since: int) -> list[Any]:  # noqa: N802
        if not self.by_process:
            raise NVMLError
        return [SimpleNamespace(pid=1, smUtil=30), SimpleNamespace(pid=2, smUtil=10)]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    library = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return library


def test_gpus_that_are_there_and_visible(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    found = gpus()
    assert [(device.name, device.memory, device.compute) for device in found] == [("gpu-0", 900, 1), ("gpu-2", 900, 1)]
    assert [device.environment for device in found] == [{"CUDA_VISIBLE_DEVICES": f"GPU-{i}"} for i in (0, 2)]
    assert local_devices() == found
    for visible, names in (("2", ["gpu-2"]), ("GPU-0", ["gpu-0"]), ("GPU-", ["gpu-0", "gpu-2"]), ("", [])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert [device.name for device in gpus()] == names


def test_what_processes_take_of_a_gpu(nvml: Nvml) -> None:
    assert memory_of("GPU-0", [1, 3, 4]) == 100
    assert share_of("GPU-0", [1, 2]) == 0.4
    nvml.by_process = False
    assert share_of("GPU-0", [1, 2]) == 0.7


def test_gpus_that_cannot_be_measured_are_not_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(devices, "_NODES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "nvidiactl").touch()
    assert local_devices()[0].name == "cpu"
    (tmp_path / "nvidia0").touch()
    with pytest.raises(ValueError, match=r"`devices` is None, but must be .*hydro-rasda\[gpu\]"):
        local_devices()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert local_devices()[0].name == "cpu"


def test_without_gpus_the_cores_are_the_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(devices, "_NODES", tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (device,) = local_devices()
    assert (device.name, device.compute) == ("cpu", len(os.sched_getaffinity(0)))
    assert device.memory > 0
    assert device.environment["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert "OMP_NUM_THREADS" not in cpu(1, 1e9).environment


@pytest.mark.parametrize("name", ["memory", "compute"])
def test_a_device_without_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Device(**{"name": "gpu", "memory": 1, name: 0})  # type: ignore[arg-type]
