"""Starts jobs where there is room, measures them, and records how they end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

from hydro_rasda.common.argument_checks import require
from hydro_rasda.common.interrupts import interrupts_put_off
from hydro_rasda.packing import nvml
from hydro_rasda.packing.devices import Device
from hydro_rasda.packing.job_estimates import cache_key, recall_estimates
from hydro_rasda.packing.job_process import Process
from hydro_rasda.packing.job_states import Grid, JobEnd, JobRecord
from hydro_rasda.packing.mps import Daemons, percentage
from hydro_rasda.packing.tasks import Estimate
from hydro_rasda.schedulers import Job, Policy, Room, one_a_device, worst_fit_overcommitted

LOOK_S = 0.5
"""The most seconds between two looks at jobs and devices."""

OUT_OF_MEMORY = (
    *("out of memory", "OUT_OF_MEMORY", "OutOfMemoryError", "MemoryError", "std::bad_alloc", "not enough memory"),
    *("an't allocate memory", "annot allocate memory", "ailed to allocate memory", "ALLOC_FAILED", "ALLOCATION_FAILED"),
    *("cudaErrorMemoryAllocation", "Unable to find a valid cuDNN algorithm", "was unable to find an engine to execute"),
)
"""Texts that programs print if memory runs out.

Each text of `fusion.evaluate.backoff` contains one of them. That module is not imported here, because it imports torch.
"""

_BY_A_NEIGHBOUR = ("MPS client", "MPS server")
"""Words in CUDA's errors if a fault of one process ended all processes that shared its GPU through MPS."""

_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)

_SIGNALS = {number.value: number.name for number in signal.Signals}


class Packer:
    """Starts jobs and records how they end; the arguments are those of `pack`."""

    def __init__(
        self, grid: Grid, listed: Callable[[], Sequence[Device]], policy: Policy | None = None, mps: bool = False
    ) -> None:
        self._grid, self._listed, self._policy = grid, listed, policy or worst_fit_overcommitted
        self._daemons = Daemons("jobs", mps)
        self._key = cache_key(listed())
        self._estimates = recall_estimates(self._key)
        self.running: dict[str, Process] = {}
        self.devices: dict[str, Device] = {}
        self._before: dict[str, float] = {}  # bytes in use on a device before its first job began
        for record in grid.records.values():
            if record.state == "complete":
                measured = Estimate(record.memory or None, record.share or None, record.seconds or None)
                self._estimates.learn(grid.tasks[record.name], measured)
        for name in grid.unsettled():
            self._settle(name, grid.end(name), stopped=True)

    def __enter__(self) -> Packer:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running.values():
            process.stop()
        try:
            for process in list(self.running.values()):
                self._take_end(process)
        finally:
            self._daemons.stop()
            self._estimates.keep(self._key)

    def step(self) -> bool:
        """Measure jobs, start those that fit, and wait `LOOK_S` for one to end; return whether any job is left."""
        self.devices = {device.name: self._as_first_listed(device) for device in self._listed()}
        for process in self.running.values():
            if process.device.name not in self.devices:
                process.stop()
        self._look()
        self._start()
        if all(record.over for record in self._grid.records.values()):
            return False
        if not self.running:
            time.sleep(LOOK_S)  # no job could start, usually because no device is listed: look again later
            return True
        ready = wait([process.over for process in self.running.values()], LOOK_S)
        for process in [process for process in self.running.values() if process.over in ready]:
            self._take_end(process)
        return True

    def _as_first_listed(self, device: Device) -> Device:
        """Return a listed device with the memory that it had when it was first listed, in a row.

        A list made anew, such as `[cpu()]`, would count the jobs' own memory as taken by other programs.
        """
        before = self.devices.get(device.name, device)
        return before if replace(device, memory=before.memory) == before else device

    def _look(self) -> None:
        """Measure running jobs. If a device's jobs exceed its memory, stop the job that is most above its estimate."""
        for process in self.running.values():
            process.look(len(self._on(process.device)) - 1)
        for device in self.devices.values():
            self._share_out(device)
        for process in self.running.values():
            self._estimates.learn(process.task, process.so_far())
        for device in self.devices.values():
            there = [process for process in self._on(device) if not process.stopped]
            if len(there) > 1 and sum(process.now for process in there) > device.memory:
                most = max(there, key=lambda process: process.now / process.expected)
                self._estimates.learn(most.task, Estimate(memory=most.memory))
                most.stop()

    def _share_out(self, device: Device) -> None:
        """Divide the rest of a GPU's used memory among the jobs whose own memory is not reported.

        Each of these jobs gets a part in proportion to its estimate.
        """
        there = self._on(device)
        untold = [process for process in there if process.untold]
        if not untold:
            return
        told = sum(process.now for process in there if not process.untold)
        rest = max(0.0, nvml.used_memory(device.gpu) - self._before[device.name] - told)
        expected = sum(process.expected for process in untold)
        for process in untold:
            process.holds(rest * process.expected / expected)

    def _on(self, device: Device) -> list[Process]:
        return [process for process in self.running.values() if process.device.name == device.name]

    def _start(self) -> None:
        """Start jobs that fit: first jobs with unknown needs, to measure them, and last jobs that must run alone."""
        unknown: list[Job] = []
        known: list[Job] = []
        alone: list[Job] = []
        devices, most = list(self.devices.values()), self._most_memory()
        of_alike: dict[tuple[str, Estimate], Job | None] = {}  # thousands of jobs may wait, but of few kinds
        for record in self._grid.records.values():
            if record.state == "pending":
                task = self._grid.tasks[record.name]
                alike = task.kind, task.estimate
                if alike not in of_alike:
                    of_alike[alike] = self._expected(record.name)
                if (job := of_alike[alike]) is None:
                    unknown.append(Job(record.name, 0.0, 1.0, 0.0))
                elif _runs_alone(record, job, most):
                    alone.append(Job(record.name, 0.0, *job[2:]))
                else:
                    known.append(Job(record.name, *job[1:]))
        largest = [device for device in devices if device.memory == most]
        of_policy = (unknown, one_a_device, devices), (known, self._policy, devices), (alone, one_a_device, largest)
        for jobs, policy, among in of_policy:
            if jobs and among:
                placed = policy(jobs, [self._room(device) for device in among])
                _check_placed(placed, jobs, among)
                for name, device in placed:
                    self._begin(name, self.devices[device])

    def _expected(self, name: str) -> Job | None:
        """Return the expected needs of a job, with no more compute than a device has that holds it; None if unknown."""
        job = self._estimates.of(self._grid.tasks[name])
        if job is None:
            return None
        devices = self.devices.values()
        fits = [device for device in devices if job.memory <= device.memory] or devices
        return job._replace(compute=min(job.compute, max((device.compute for device in fits), default=0.0)))

    def _most_memory(self) -> float:
        """Return the memory of the largest device."""
        return max((device.memory for device in self.devices.values()), default=0.0)

    def _room(self, device: Device) -> Room:
        """Return the free memory and compute of a device.

        Nothing is free if a job on it has unknown needs or must run alone.
        """
        there = []
        for process in self._on(device):
            job, record = self._expected(process.task.name), self._grid.records[process.task.name]
            if job is None or _runs_alone(record, job, self._most_memory()):
                job = Job(record.name, device.memory, device.compute, 0.0)
            left = max(0.0, job.seconds - process.seconds)
            there.append(job._replace(memory=max(job.memory, process.memory), seconds=left))
        memory = device.memory - sum(job.memory for job in there)
        compute = device.compute - sum(job.compute for job in there)
        return Room(device.name, memory, compute, device.compute, tuple(there))

    def _begin(self, name: str, device: Device) -> None:
        record = self._grid.records[name]
        self._grid.change(name, state="running", attempt=record.attempt + 1, device=device.name)
        job = self._expected(name)
        expected = job.memory if job is not None else device.memory
        if device.gpu and not self._on(device):
            self._before[device.name] = nvml.used_memory(device.gpu)
        # A job may use the whole device if it runs alone or if its needs are being measured.
        shared = self._shared(device, job.compute / device.compute if job is not None and not record.alone else 1.0)
        with interrupts_put_off():  # otherwise, nobody might know of a process that has just started
            self.running[name] = Process(self._grid.tasks[name], device, self._grid, expected, shared)

    def _shared(self, device: Device, share: float) -> dict[str, str]:
        """Return environment variables for a job that computes beside others on a GPU; empty if jobs take turns."""
        found = self._daemons.environment(device.gpu) if device.gpu else {}
        return {**found, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": percentage(share)} if found else {}

    def _take_end(self, process: Process) -> None:
        name = process.task.name
        status = process.reap()
        del self.running[name]
        end = self._grid.end(name)
        if end is None and not process.stopped:  # somebody else killed `run_job.py` before it wrote the end file
            end = {"exit": status or -signal.SIGTERM, "seconds": 0.0, "cpu": 0.0, "memory": 0.0}
        stopped = process.stopped or process.device.name not in {device.name for device in self._listed()}
        self._settle(name, end, stopped, process)

    def _settle(self, name: str, end: JobEnd | None, stopped: bool, process: Process | None = None) -> None:
        """Record the new state of a job whose processes have all ended.

        Args:
            end: How the job ended. None if nothing is known of it, for example because the job was killed.
            stopped: True if `pack` or a user may have ended the job: then it waits to run again.
            process: The job's process. None if an earlier call of `pack` started the job.
        """
        record = self._grid.records[name]
        changed: dict[str, Any]
        if end is not None and end["exit"] == 0:
            measured = process.in_all(end) if process is not None else Estimate()
            self._estimates.learn(self._grid.tasks[name], measured)
            # `end["memory"]` is memory of the machine, so it counts only for a job on cores, not for one on a GPU.
            on_cores = process is None and any(of.name == record.device and not of.gpu for of in self._listed())
            changed = {
                "state": "complete",
                "exit": 0,
                "seconds": end["seconds"],
                "memory": measured.memory or (end["memory"] if on_cores else 0.0),
                "share": measured.share or 0.0,
            }
            try:
                changed["value"] = self._grid.value(name)
            except ValueError as refusal:
                changed |= {"state": "failed", "error": str(refusal)}
        elif stopped or end is None:
            changed = {"state": "pending"}
        elif not record.alone and self._beside_too_much(name, end):
            changed = {"state": "pending", "alone": True}
        else:
            error = self._error(name, end)
            changed = {"state": "failed", "exit": int(end["exit"]), "seconds": end["seconds"], "error": error}
        self._grid.change(name, **changed)
        self._grid.forget_files(name)

    def _beside_too_much(self, name: str, end: JobEnd) -> bool:
        told = self._grid.log_tail(name)
        return end["exit"] in _KILLED or any(words in told for words in (*OUT_OF_MEMORY, *_BY_A_NEIGHBOUR))

    def _error(self, name: str, end: JobEnd) -> str:
        code = int(end["exit"])
        lines = self._grid.log_tail(name).strip().splitlines()
        what = _SIGNALS.get(-code, f"signal {-code}") if code < 0 else f"exit status {code}"
        return ": ".join([what, *lines[-1:]])


def _runs_alone(record: JobRecord, job: Job, most: float) -> bool:
    """Tell whether a job gets a device for itself: after it ran out of memory, or if no device has as much: `most`."""
    return record.alone or job.memory > most


def _check_placed(placed: object, jobs: Sequence[Job], devices: Sequence[Device]) -> None:
    """Raise ValueError if a user's policy places a job twice, or something that it was not given."""
    if placed == []:
        return
    names, where = {job.name for job in jobs}, {device.name for device in devices}
    listed = isinstance(placed, list | tuple) and all(isinstance(pair, tuple) for pair in placed)
    pairs: Sequence[tuple[Any, ...]] = placed if listed else [()]  # type: ignore[assignment]
    holds = all(len(pair) == 2 and pair[0] in names and pair[1] in where for pair in pairs)
    rule = "a list of (job, device), with each of the given jobs at most once"
    require(holds and len({pair[0] for pair in pairs}) == len(pairs), "policy(...)", placed, rule)
