"""Checks of the contract of a backend, one for each promise.

Each check uses the devices as a run does, with models that train in milliseconds. The middle heat is the part of a run
between the sweep and the race.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydro_rasda.contracts import Backend, Finished
from hydro_rasda.heats.race import train_finalists
from hydro_rasda.history.full_size import is_race_over
from hydro_rasda.testing.tiny_runs import (
    MAX_T,
    PATIENCE_S,
    by_epoch,
    group,
    histories,
    is_running,
    opened,
    record,
    references,
    require,
    require_each_once,
    require_one_failure,
    targets,
    train,
    train_two_rungs,
)

Check = Callable[[Callable[[], Backend], Path], None]


def backend_checks() -> Sequence[Check]:
    """Return the checks of the contract: functions of (`make_backend`, an empty folder).

    A check raises an AssertionError with the broken promise; its docstring says what the contract demands.
    """
    return [
        check_groups,
        check_results,
        check_middle_heat,
        check_full_size,
        check_both_kinds,
        check_failures,
        check_deaths,
        check_time,
        check_leaving,
        check_race,
    ]


def check_groups(make_backend: Callable[[], Backend], folder: Path) -> None:
    """An idle device takes a group, is not idle until the group is finished, and reports it once.

    `plan` returns widths for each kind of models that it is given.
    """
    configs = [{"lr": 0.01 * (n + 1)} for n in range(5)]
    with opened(make_backend(), folder, configs) as (run, devices):
        require(not devices.busy(), "devices are not `busy` before anything was begun")
        first, trials = devices.idle()[0], run.history.trials
        kinds = {"even": [trials[0], trials[2]], "odd": [trials[1]]}
        planned = devices.plan(first, kinds)
        require(planned.keys() == kinds.keys(), f"`plan` answers for each kind, not for {sorted(planned)}")
        require(all(of.most >= 1 and 1 in of.throughput for of in planned.values()), "`plan` gives widths >= 1")
        require(devices.cores(first) >= 1, "`cores` is 1 or more")
        require(isinstance(devices.machine(first), str), "`machine` is a string")
        tasks = [group(0, 2), group(1), group(3), group(4)]
        done = train(devices, tasks)
        require_each_once(done, range(5))
        require({finished.task.key for finished in done} == {task.key for task in tasks}, "`finished` names its task")
        for number, history in histories(done).items():
            require([epoch for epoch, _ in history] == [1, 2], f"trial {number} trains epochs 1 and 2 once each")
        for device in devices.idle():
            speed = devices.speed(device, "a kind")
            require(speed is None or speed > 0, "`speed` is None or positive")


def check_results(make_backend: Callable[[], Backend], folder: Path) -> None:
    """A group reaches exactly the same numbers as on `LocalBackend` with one device of the same sort.

    This holds for a training from the beginning, and from a checkpoint of an earlier task of any backend.
    """
    configs: list[dict[str, Any]] = [{"lr": 0.02, "optimizer": "adamw"}, {"lr": 0.1, "momentum": 0.9}]
    found = train_two_rungs(make_backend(), folder / "tried", configs)
    expected = [train_two_rungs(local, folder / str(local.device), configs) for local in references()]
    require(found in expected, f"metrics are those of the local backend, {expected[0]}, not {found}")


def check_middle_heat(make_backend: Callable[[], Backend], folder: Path) -> None:
    """A task of the middle heat trains groups as a task of the sweep does, but on surrogates of its own width.

    It reaches exactly the same numbers as on `LocalBackend` with one device of the same sort.
    """
    configs = [{"lr": 0.02 * (n + 1)} for n in range(4)]

    def trained(backend: Backend, name: str, **of: Any) -> dict[tuple[int, int], Mapping[str, float]]:
        with opened(backend, folder / name, configs) as (_, devices):
            tasks = [group(*members, **of) for members in ((0, 1), (2,), (3,))]
            done = train(devices, tasks, room=len(devices.idle(tasks[0])))
        require_each_once(done, range(4))
        require({finished.task.heat for finished in done} == {tasks[0].heat}, "`finished` names the heat of its task")
        return by_epoch(done)

    middle: dict[str, Any] = {"heat": "middle", "width": 0.25}
    found, swept = trained(make_backend(), "tried", **middle), trained(references()[0], "swept")
    require(found != swept, "a task of the middle heat trains surrogates of its own width, not those of the sweep")
    expected = [trained(local, f"{local.device}", **middle) for local in references()]
    require(found in expected, f"metrics of the middle heat are those of the local backend, {expected[0]}, not {found}")


def check_full_size(make_backend: Callable[[], Backend], folder: Path) -> None:
    """Full-size models train as in one process, from the beginning and from a checkpoint.

    At any time, the devices train at most as many of these models as they have cores.
    """
    configs = [{"lr": 0.02 * (n + 1)} for n in range(5)]
    with opened(make_backend(), folder / "tried", configs) as (run, devices):
        room = sum(devices.cores(device) for device in devices.idle())
        done = list[Finished]()
        for stop in (1, 3):
            to_stop = train(devices, targets(run, stop), room)
            require_each_once(to_stop, range(5))
            require(not any(of.outcome.failures for of in to_stop), "full-size models train without an error")
            for finished in to_stop:
                record(run, finished)
            done += to_stop
    found = by_epoch(done)
    for local in references():
        with opened(local, folder / str(local.device), configs) as (run, devices):
            if found == by_epoch(train(devices, targets(run, 3))):
                return
    raise AssertionError("a backend breaks its contract: full-size models train as in one process")


def check_both_kinds(make_backend: Callable[[], Backend], folder: Path) -> None:
    """One device trains a group of surrogates while another trains a full-size model."""
    with opened(make_backend(), folder, [{"lr": 0.1}] * 4) as (run, devices):
        model = targets(run, 1)[2]
        first, *others = devices.idle()
        devices.start(first, group(0, 1))
        there = devices.idle(model)
        require(bool(there) == bool(others), f"a full-size model can begin on the devices {others}, not on {there}")
        done = train(devices, [model, group(3)])
        require_each_once(done, range(4))
        require(sorted(len(history) for history in histories(done).values()) == [1, 2, 2, 2], "each trains its epochs")


def check_failures(make_backend: Callable[[], Backend], folder: Path) -> None:
    """If a trial raises an error, it fails alone, with its traceback. This holds in a group and at full size."""
    with opened(make_backend(), folder, [{"lr": 0.1}, {"lr": 0.1, "raises": True}, {"lr": 0.2}]) as (run, devices):
        for tasks in ([group(0, 1, 2)], targets(run, 1)):
            done = train(devices, tasks)
            require_one_failure(done, 1, "this trial raises")
            require(histories(done).keys() == {0, 1, 2}, "`finished` gives also what failed")


def check_deaths(make_backend: Callable[[], Backend], folder: Path) -> None:
    """If a trial kills each process that trains it, it fails alone. Other trials only lose time.

    In a backend that trains in the tuner's own process, the trial of this check raises instead.
    """
    deadly = {"lr": 0.1, "kills_other_than": os.getpid()}
    with opened(make_backend(), folder, [{"lr": 0.1}, deadly, {"lr": 0.2}]) as (_, devices):
        done = train(devices, [group(0, 1), group(2)])
        require_one_failure(done, 1, "")
        require(all(len(history) == 2 for n, history in histories(done).items() if n != 1), "the others train on")


def check_time(make_backend: Callable[[], Backend], folder: Path) -> None:
    """Once the time budget is spent, trainings end after their current epoch, and the epochs trained so far count."""
    with opened(make_backend(), folder, [{"lr": 0.1}, {"lr": 0.2}], time_budget_s=1e-6) as (run, devices):
        for number, history in histories(train(devices, [group(0, 1)])).items():
            require([epoch for epoch, _ in history] == [1], f"trial {number} of a group ends after its first epoch")
        for history in histories(train(devices, targets(run, 3))).values():
            require([epoch for epoch, _ in history] == [1], "a full-size model ends after its first epoch")


def check_leaving(make_backend: Callable[[], Backend], folder: Path) -> None:
    """When the context of the devices ends, even by an exception, all their processes on this machine end."""
    folder.mkdir(exist_ok=True)
    seen = folder / "processes"
    seen.mkdir()
    configs = [{"lr": 0.1, "waits_in": str(seen), "tuner": os.getpid()}] * 2
    until = time.monotonic() + PATIENCE_S
    with contextlib.suppress(KeyboardInterrupt), _interrupted_once(lambda: bool(list(seen.iterdir()))):
        with opened(make_backend(), folder / "run", configs) as (_, devices):
            for device, number in zip(devices.idle(), (0, 1)):
                devices.start(device, group(number))
            while time.monotonic() < until:
                devices.finished()
        require(False, "a device begins what it is given")
    until = time.monotonic() + PATIENCE_S / 4
    here = [int(file.name.split("@")[0]) for file in seen.iterdir() if file.name.endswith(f"@{socket.gethostname()}")]
    while left := [pid for pid in here if is_running(pid)]:
        require(time.monotonic() < until, f"processes {left} end with the devices")
        time.sleep(0.05)


@contextlib.contextmanager
def _interrupted_once(holds: Callable[[], bool]) -> Iterator[None]:
    """Inside the context, send this thread a SIGINT (Ctrl-C) as soon as a condition holds."""
    over, caller = threading.Event(), threading.get_ident()

    def press() -> None:
        while not over.wait(0.02):
            if holds():
                signal.pthread_kill(caller, signal.SIGINT)
                return

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    watching = threading.Thread(target=press)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()
        signal.signal(signal.SIGINT, before)


def check_race(make_backend: Callable[[], Backend], folder: Path) -> None:
    """A backend resumes the full-size trainings that another backend began.

    Here, the local backend trains all finalists for an epoch. The checked backend then finishes the race. After that,
    the local backend finds nothing left to do. No epoch is trained twice.
    """
    configs = [{"lr": 0.02 * (n + 1)} for n in range(3)]
    local = references()[0]
    with opened(local, folder, configs) as (run, devices):
        for finished in train(devices, targets(run, 1)):
            record(run, finished)
    with opened(make_backend(), folder, configs) as (run, devices):
        require(set(train_finalists(run, [0, 1, 2], devices)) == {0, 1, 2}, "all finalists count as tried")
        require(is_race_over(run.history, [0, 1, 2]), "the end of the race is recorded")
        curves = {number: run.history.curve("race", number) for number in run.history.trials}
        recorded = len(run.store.units())
    lengths = {number: len(curve) for number, curve in curves.items()}
    require(
        all(list(curves[n]) == list(range(1, length + 1)) for n, length in lengths.items()), "epochs are counted up"
    )
    require(max(lengths.values()) == MAX_T, f"a finalist trains to the end, not to {max(lengths.values())}")
    with opened(local, folder, configs) as (run, devices):
        train_finalists(run, [0, 1, 2], devices)
        require(len(run.store.units()) == recorded, "the local backend has nothing left to train")
        again = {number: run.history.curve("race", number) for number in run.history.trials}
        require(again == curves, "the local backend finds what was recorded")
        lines = [line for unit in run.store.units().values() for line in unit.lines if line["event"] == "metrics"]
        require(len(lines) == sum(lengths.values()), "no epoch is trained twice")
