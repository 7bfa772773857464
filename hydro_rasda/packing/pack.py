"""Runs as many jobs at the same time as devices have room for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Literal

from rich.box import SIMPLE
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hydro_rasda.common.argument_checks import check_flag, check_folder, check_function, check_name, require
from hydro_rasda.common.console import LINE_SECONDS, duration, make_console
from hydro_rasda.packing.devices import Device, Devices, check_listed, lister
from hydro_rasda.packing.job_process import Process
from hydro_rasda.packing.job_states import Grid, JobRecord, PackResult
from hydro_rasda.packing.mps import CONTROL, available
from hydro_rasda.packing.packer import Packer
from hydro_rasda.packing.tasks import Runnable, Task, tasks_of
from hydro_rasda.run.run_folder import Store
from hydro_rasda.schedulers import Policy


def pack(
    jobs: Iterable[Task | Runnable],
    devices: Devices | None = None,
    *,
    policy: Policy | None = None,
    mps: bool | Literal["auto"] = "auto",
    storage_path: str | Path = "packed",
    name: str = "pack",
    retry_failed: bool = False,
    verbose: bool = True,
) -> PackResult:
    """Run jobs to their end, several on one device if memory and compute allow.

    The first job whose memory or share (see `Estimate`) is unknown gets a device to itself until its needs are
    measured, after some seconds or at its end. Then jobs of its kind are expected to need the same. Jobs of unmeasured
    kinds are expected to need more memory than the largest job so far. Measurements correct the estimates, and are kept
    for later calls from the same folder (below HYDRO_RASDA_CACHE, or the user's cache folder). After an interruption,
    repeat the call: jobs that ended are not run again, and jobs that were cut off start again.

    Args:
        jobs: Commands (lists of arguments), functions without arguments, or `Task`s, which add an estimate to one of
            these.
        devices: The devices to run on; by default the GPUs of this machine, else its cores. GPUs need
            `hydro-rasda[gpu]`. A function that lists devices is called again and again. Jobs of a device that it no
            longer lists are stopped and wait again. A new device gets jobs. A listed device keeps its first memory.
        policy: Decides which jobs share a device. By default, a job starts where half of its share is free, or a fifth
            of a GPU (`hydro_rasda.schedulers.worst_fit_overcommitted`).
        mps: True if jobs on a GPU compute at the same time through NVIDIA's Multi-Process Service, each with its
            measured share of threads, rather than in turns. "auto" uses the service if `nvidia-cuda-mps-control` is
            installed and you have not started it yourself (CUDA_MPS_PIPE_DIRECTORY is not set). With the service, a
            fault of one job ends all jobs on its GPU, which then run once more, each alone.
        storage_path: Folder for runs.
        name: Name of the run. Its folder `storage_path/name` has the journal, the output of jobs, and how they ended.
        retry_failed: True to run jobs again that failed in an earlier call; False to leave them failed.
        verbose: True to show a table on a terminal, or a line a minute elsewhere; False to print nothing.

    Returns:
        The record of each job. A job that fails does not keep the others from running. A job that is killed or runs out
        of memory beside others runs once more, alone on a device with the most memory.

    Raises:
        ValueError: if an argument is wrong, or a job differs from the run's job of the same name.
        RuntimeError: if another process works on the run.
    """
    folder = check_folder("storage_path", storage_path)
    check_name("name", name)
    check_flag("retry_failed", retry_failed)
    check_flag("verbose", verbose)
    if policy is not None:
        check_function("policy", policy, 2, rule="None, or a function of (jobs, rooms), such as worst_fit_decreasing")
    tasks = tasks_of(jobs)
    listed = lister(devices)
    _check_mps(mps)
    check_listed(listed())
    with Store.open(folder / name, {"packing": 1}, "auto") as store:
        grid = Grid(store, tasks, retry_failed)
        with Progress(grid.records, silent=not verbose) as progress, Packer(grid, listed, policy, bool(mps)) as packer:
            while packer.step():
                progress.show(packer.running.values(), packer.devices.values(), store.seconds)
        return PackResult(list(grid.records.values()), store.path, store.seconds)


def _check_mps(mps: object) -> None:
    require(isinstance(mps, bool) or (isinstance(mps, str) and mps == "auto"), "mps", mps, "True, False or 'auto'")
    rule = f"False or 'auto' where {CONTROL} is not found, or one is set up"
    require(mps is not True or available(), "mps", mps, rule)


_GIB = 2.0**30


class Progress:
    """Shows the states of jobs, unless it is `silent`."""

    def __init__(self, records: Mapping[str, JobRecord], console: Console | None = None, silent: bool = False) -> None:
        self._records = records
        self._console = console or make_console(quiet=silent)
        live = self._console.is_terminal and not silent
        self._live = Live(console=self._console, auto_refresh=False, transient=True) if live else None
        self._said = 0.0

    def show(self, running: Collection[Process], devices: Collection[Device], seconds: float) -> None:
        """Show the states of all jobs after `seconds` of the run; without a terminal, at most once a minute."""
        line = f"{_counts(self._records)} after {duration(seconds)}"
        if self._live is not None:
            self._live.update(Group(Text(line), _table(running, devices)), refresh=True)
        elif seconds - self._said >= LINE_SECONDS:
            self._console.print(line)
            self._said = seconds

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
        self._console.print(_counts(self._records))


def _counts(records: Mapping[str, JobRecord]) -> str:
    counts = Counter(record.state for record in records.values())
    parts = [f"{counts[state]} {state}" for state in ("running", "pending", "failed") if counts[state]]
    return ", ".join([f"{counts['complete']} of {len(records)} jobs complete", *parts])


def _table(running: Collection[Process], devices: Collection[Device]) -> Table:
    table = Table(box=SIMPLE)
    table.add_column("device", no_wrap=True)
    table.add_column("jobs", overflow="fold")
    table.add_column("GiB in use", justify="right", no_wrap=True)
    for device in devices:
        there = [process for process in running if process.device.name == device.name]
        used = sum(process.now for process in there)
        names = " ".join(process.task.name for process in there)
        table.add_row(device.name, Text(names), f"{used / _GIB:.1f} of {device.memory / _GIB:.1f}")
    return table
