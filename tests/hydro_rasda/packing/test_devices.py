"""Devices of this machine, and of one with GPUs, as a library of NVIDIA's name tells of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hydro_rasda.packing import Device, Task, cpu, devices, gpus, pack
from hydro_rasda.packing import nvml as library
from hydro_rasda.packing.devices import local_devices
from hydro_rasda.packing.nvml import memory_of, share_of
from hydro_rasda.schedulers import Job, Placed, Room, worst_fit_overcommitted


class NVMLError(Exception):
    """As the library calls it."""


class Nvml:
    """Three GPUs, of which the second fell off the bus; those of `divided` are in MIG mode, with two parts each."""

    NVMLError = NVMLError
    by_process = True
    alike = False
    divided: frozenset[str] = frozenset()
    processes: Sequence[tuple[int, int | None]] = ((1, 100), (2, 20), (3, None))

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
        return SimpleNamespace(total=500 if handle.startswith("MIG") else 1000, used=300)

    def nvmlDeviceGetName(self, handle: str) -> str:  # noqa: N802
        return "model" if self.alike else f"model {handle}"

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:  # noqa: N802
        if handle == "GPU-2" and not self.divided:
            raise NVMLError  # an older model
        return [int(handle in self.divided), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, part: int) -> str:  # noqa: N802
        if part not in (1, 4):
            raise NVMLError
        return f"MIG-{handle[4:]}-{part}"

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=pid, usedGpuMemory=memory) for pid, memory in self.processes]

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=70)

    def nvmlDeviceGetProcessUtilization(self, handle: str, since: int) -> list[Any]:  # noqa: N802
        if not self.by_process:
            raise NVMLError
        return [SimpleNamespace(pid=1, smUtil=30), SimpleNamespace(pid=2, smUtil=10)]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    found = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", found)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return found


def test_gpus_that_are_there_and_visible(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    found = gpus()
    assert [(device.name, device.memory, device.compute) for device in found] == [("gpu-0", 900, 1), ("gpu-2", 900, 1)]
    assert [device.environment for device in found] == [{"CUDA_VISIBLE_DEVICES": f"GPU-{i}"} for i in (0, 2)]
    assert local_devices() == found


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("2", ["gpu-2"]),
        (" 2, 0", ["gpu-2", "gpu-0"]),
        ("0,-1,2", ["gpu-0"]),
        ("0,9,2", ["gpu-0"]),
        ("0,GPU-2", ["gpu-0"]),
        ("GPU-0", ["gpu-0"]),
        ("GPU-2,none,GPU-0", ["gpu-2"]),
        *[(hidden, []) for hidden in ("", "-1", "-1,0", "NoDevFiles")],
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(
    nvml: Nvml, visible: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the first that is none, in their order."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [device.name for device in local_devices()] == (names or ["cpu"])


@pytest.mark.parametrize("visible", ["1", "7", "0,0", "GPU-", "GPU-0,GPU-0", "MIG-2-1", "other"])
def test_visible_devices_that_are_none_do_not_end_on_the_cpu(
    nvml: Nvml, visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ValueError, match=rf"`CUDA_VISIBLE_DEVICES` is '{visible}', but must be GPUs that .*GPU-0"):
        local_devices()


def test_numbers_of_unlike_gpus_need_an_order(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's default has the fastest first, and the driver's library the lowest bus."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    with pytest.raises(ValueError, match=r"`CUDA_VISIBLE_DEVICES` is '0', .*CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        gpus()
    nvml.alike = True
    assert [device.name for device in gpus()] == ["gpu-0"]


def test_parts_of_a_gpu_are_devices(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.divided = frozenset({"GPU-2"})
    parts = [("gpu-2.1", "MIG-2-1", 450.0), ("gpu-2.4", "MIG-2-4", 450.0)]
    for visible, wanted in (
        (None, [("gpu-0", "GPU-0", 900.0), *parts]),
        ("2", parts),
        ("GPU-2", parts),
        ("MIG-2-4,MIG-2-1", parts[::-1]),
        ("MIG-2-4,GPU-0,MIG-9", [parts[1], ("gpu-0", "GPU-0", 900.0)]),
    ):
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert [(device.name, device.gpu, device.memory) for device in local_devices()] == wanted
        assert [device.environment for device in gpus()] == [{"CUDA_VISIBLE_DEVICES": uuid} for _, uuid, _ in wanted]


def test_what_processes_take_of_a_gpu(nvml: Nvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory_of("GPU-0", [1, 2, 4]) == 120
    assert memory_of("GPU-0", [1, 3]) is None  # the driver does not say what the second one holds
    assert share_of("GPU-0", [1, 2]) == 0.4
    nvml.by_process = False
    assert share_of("GPU-0", [1, 2]) == 0.7
    assert share_of("GPU-0", [1, 2], jobs=2) == 0.35
    monkeypatch.setattr(library, "_HOSTS_INODE", Path("/proc/self/ns/pid").stat().st_ino)
    assert memory_of("GPU-0", [4]) == 0
    monkeypatch.setattr(library, "_PID_NAMESPACE", tmp_path)  # of a container: none of these pids is known there
    assert memory_of("GPU-0", [4]) is None


LIMITED = """
import json, os, sys
with open(sys.argv[1] + "/cgroup.procs", "w") as file:
    file.write(str(os.getpid()))
import psutil, torch
from fusion.width.memory import available_memory
from hydro_rasda.packing import cpu
held = bytearray(int(sys.argv[2]))
told = [cpu().memory / 0.9, available_memory(torch.device("cpu"))]
print(json.dumps([*told, psutil.Process().memory_info().rss - psutil.Process().memory_info().shared]))
"""


def test_the_memory_of_a_process_is_what_its_cgroups_have_left() -> None:
    """A real limit on the group above the process's own, and memory that the process holds already."""
    version_1 = Path("/sys/fs/cgroup/memory")
    above = (version_1 if version_1.is_dir() else Path("/sys/fs/cgroup")) / f"hydro-rasda-{os.getpid()}"
    limit, held = 2**30, 2**27
    try:
        (above / "own").mkdir(parents=True)
    except OSError as error:
        pytest.skip(f"cgroups cannot be made here: {error}")
    try:
        name = "memory.limit_in_bytes" if version_1.is_dir() else "memory.max"
        try:
            (above / name).write_text(str(limit))
        except OSError as error:
            pytest.skip(f"cgroups cannot be limited here: {error}")
        command = [sys.executable, "-c", LIMITED, str(above / "own"), str(held)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    finally:
        (above / "own").rmdir()
        above.rmdir()
    packing, fusion, holds = json.loads(done.stdout)
    assert packing < limit - held
    assert packing == pytest.approx(limit - holds, rel=0.1)
    assert packing == pytest.approx(fusion, rel=0.02)


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


ON_GPU = """
cd {folder}; touch held.$$; began=$(cat looks)
while [ $(cat looks) -lt $((began + 2)) ]; do sleep 0.02; done
rm held.$$
"""
"""A job that holds memory of the GPU until it was looked at twice."""


@pytest.mark.slow
def test_jobs_in_a_container_are_measured_and_share_a_gpu(
    nvml: Nvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver tells pids of the host, and the memory of all: 300 bytes for each job, 50 that others hold."""
    looks = tmp_path / "looks"
    looks.write_text("0")

    def told(handle: str) -> Any:
        held = 300 * len(list(tmp_path.glob("held.*")))
        if held:
            (tmp_path / "new").write_text(str(int(looks.read_text()) + 1))
            (tmp_path / "new").replace(looks)
        return SimpleNamespace(total=1000, used=50 + held)

    monkeypatch.setattr(nvml, "nvmlDeviceGetMemoryInfo", told)
    monkeypatch.setattr(library, "_PID_NAMESPACE", tmp_path)
    nvml.processes, nvml.by_process = ((4_000_000, 300),), False
    at_once: dict[str, list[int]] = {"first": [], "next": []}
    for name, counts in at_once.items():

        def policy(jobs: Sequence[Job], rooms: Sequence[Room]) -> list[Placed]:
            """Note how many jobs the GPU has from now on; jobs that have yet to be measured do not come here."""
            found = worst_fit_overcommitted(jobs, rooms)
            counts.append(len(rooms[0].jobs) + len(found))  # noqa: B023
            return found

        jobs = [Task(["sh", "-c", ON_GPU.format(folder=tmp_path)], kind="alike") for _ in range(3)]
        result = pack(jobs, gpus()[:1], policy=policy, storage_path=tmp_path, name=name, mps=False, verbose=False)
        assert not result.failed
        assert all(100 <= job.memory <= 300 for job in result.jobs)
    assert [max(counts) for counts in at_once.values()] == [2, 2]


def test_a_job_that_took_no_memory_of_a_gpu_teaches_none(
    nvml: Nvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_PID_NAMESPACE", tmp_path)
    nvml.processes = ()
    (job,) = pack([Task(["true"])], gpus()[:1], storage_path=tmp_path, mps=False, verbose=False).jobs
    assert (job.state, job.memory) == ("complete", 0)


def test_a_job_whose_share_of_a_gpu_the_driver_does_not_tell_is_run(
    nvml: Nvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends once it was looked at."""
    looked_at = tmp_path / "looked at"

    def rates(handle: str) -> None:
        looked_at.touch()
        raise NVMLError

    monkeypatch.setattr(nvml, "nvmlDeviceGetUtilizationRates", rates)
    waits = Task(["sh", "-c", 'until [ -e "$1" ]; do sleep 0.02; done', "sh", str(looked_at)])
    (job,) = pack([waits], gpus()[:1], storage_path=tmp_path, mps=False, verbose=False).jobs
    assert (job.state, job.share) == ("complete", 0)


@pytest.mark.parametrize("name", ["memory", "compute"])
def test_a_device_without_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Device(**{"name": "gpu", "memory": 1, name: 0})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"name": 0}, "`name` is 0, but must be a text"),
        ({"gpu": None}, "`gpu` is None, but must be a text"),
        ({"environment": ["A=1"]}, r"`environment` is \['A=1'\], but must be a dict of texts"),
        ({"environment": {"A=B": "1"}}, "`environment` is 'A=B', but must be a dict whose keys are names"),
        ({"environment": {"CUDA": 0}}, r"`environment\['CUDA'\]` is 0, but must be a text"),
    ],
)
def test_a_device_whose_jobs_could_not_start_is_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Device(**{"name": "gpu", "memory": 1.0, **wrong})
