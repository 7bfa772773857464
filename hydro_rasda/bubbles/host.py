"""The host's side: `with bubbles(schedule, source) as guest:` around its training loop."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.pipelining.schedules as torch_schedules

from fusion.width.memory import available_memory
from hydro_rasda.bubbles.guest_handle import GuestProcess
from hydro_rasda.common.argument_checks import check_folder, check_number, require
from hydro_rasda.run.files import make_private, refuse_open_to_others
from hydro_rasda.schedulers.bubble_policy import Guard, WaitForecast

LOOK_S = 1.0
"""Minimum number of seconds between two checks of the guest and of the free memory, at the beginning of a step."""

_TIE_S = 10.0
_FAILURES = 3


@contextmanager
def bubbles(
    schedule: Any,
    source: str | Path,
    *,
    leave_free: float | None = None,
    patience_s: float = 10.0,
    preempt: bool | None = None,
) -> Iterator[Guest]:
    """Within the context, let a guest train in the bubbles of a pipeline: whenever a step waits for a neighbor.

    Every rank of a host wraps its training loop in this context; nothing else of the host changes. The guest is a
    separate process, so that the host's results are the same to the last bit. The guest trains groups of the sweep that
    `tune(backend=BubbleBackend(source))` runs at the same time, on any machine; without a sweep, it waits for one. A
    bubble has no guest if the waits of the last steps predict that it is too short. One step in
    `schedulers.bubble_policy.CONTROL` has no guest, for comparison. If guests cost the host more than 1 % of a step,
    only longer bubbles are used.

    On leaving the context, the guest ends its current epoch and hands over its training. If the host is killed, the
    guest ends with it. Then its training since the last checkpoint is repeated in another bubble.

    Args:
        schedule: The schedule of the host: any schedule of `torch.distributed.pipelining`.
        source: A folder that the host and the tuner both see.
        leave_free: Bytes of memory that must stay free for the host. If less is free, the guest ends at once, and comes
            back when twice as much is free. None for a tenth of the memory that is free now.
        patience_s: Maximum number of seconds that leaving the context may take.
        preempt: If True, the kernel stops and continues the guest. If False, the guest begins a quantum only if it fits
            the bubble. A quantum is the forward pass of a step, or the rest of the step. None means True on a CPU and
            False on a GPU, where work that has begun cannot be stopped. This has not been run on GPUs yet.

    Yields:
        The state of the guest; see `Guest`.

    Raises:
        ValueError: if an argument is invalid.
        RuntimeError: on other systems than Linux.
        Unsafe: if others own `source` or can write to it, because a file in it names the sweep whose pickles the guests
            load. Set HYDRO_RASDA_TRUST_SHARED_FOLDERS=1 if you trust these users with your account.
    """
    if sys.platform != "linux":
        raise RuntimeError("bubbles need Linux, whose kernel stops guests and ends them with their host")
    folder, device = check_folder("source", source), _device(schedule)
    if leave_free is None:
        leave_free = (available_memory(device) or 0) / 10
    check_number("leave_free", leave_free)
    check_number("patience_s", patience_s)
    require(preempt in (None, True, False), "preempt", preempt, "None, True or False")
    make_private(folder)
    refuse_open_to_others(folder)
    guest = Guest(folder, device, leave_free, device.type == "cpu" if preempt is None else preempt)
    try:
        with watched(schedule, guest):
            guest.try_to_start()
            yield guest
    finally:
        guest.leave(patience_s)


def _device(schedule: Any) -> torch.device:
    stages = getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]
    return torch.device(getattr(stages[0], "device", "cpu"))


class Guest:
    """The process that trains in a rank's bubbles.

    Attributes:
        steps: The number of the host's steps so far.
        waited: Seconds that the host waited while the guest had something to train: its bubbles, used or not.
        open: The part of `waited` in which the guest was allowed to run.
        paused: Set it to True to let the guest run in no bubble, and to False to let it run again.
    """

    def __init__(self, source: Path, device: torch.device, leave_free: float, preempt: bool) -> None:
        self._source, self._device, self._leave_free, self._preempt = source, device, leave_free, preempt
        self._forecast, self._guard = WaitForecast(), Guard()
        self._process: GuestProcess | None = None
        self._before = ("", 0)
        self._used_before = 0.0
        self._enough = leave_free
        self._failures = 0
        self._looked = self._began = 0.0
        self.steps, self.paused = 0, False
        self.waited = self.open = 0.0

    @property
    def pid(self) -> int | None:
        """The pid of the guest process; None without a process."""
        return None if self._process is None else self._process.pid

    @property
    def working(self) -> bool:
        """Tell whether the guest has something to train."""
        return self._process is not None and self._process.page.working

    @property
    def used(self) -> float:
        """Seconds of CPU time of all guest processes so far, including their start."""
        return self._used_before + (0.0 if self._process is None else self._process.used)

    @property
    def cost(self) -> float:
        """The share by which the guest lengthens the host's steps, as measured recently; NaN before it is known."""
        return self._guard.cost

    def start(self) -> None:
        """Start the guest process, if enough memory is free."""
        self._looked = time.monotonic()
        if self._free() < self._enough:
            return
        self._process = GuestProcess(self._source, str(self._device), self._preempt, self._before)
        self._process.tie(_TIE_S)

    def _free(self) -> float:
        free = available_memory(self._device)
        return float("inf") if free is None else free

    def begin_step(self) -> None:
        """Measure the host's previous step, and count the new one; end or restart the guest process if needed."""
        now = time.monotonic()
        if self.steps > 1 and not self.paused:  # not the first step, which sets the pipeline up
            self._guard.saw(now - self._began)
        self._began = now
        self.steps += 1
        if now - self._looked >= LOOK_S:
            self._looked = now
            process = self._process
            if process is None:
                if self._failures < _FAILURES:
                    self.try_to_start()
            elif self._free() < self._leave_free:
                self._end()
                self._enough = 2 * self._leave_free
            elif (status := process.over) is not None:
                # Two kinds of end do not count as failures here. With status 0, the sweep is over. If the guest was
                # working, its task may have killed it, and the tuner counts such deaths.
                self._failures = 0 if status == 0 or process.page.working else self._failures + 1
                self._end()

    def try_to_start(self) -> None:
        """Start the guest process. If the system refuses, warn, because the host does not need it."""
        try:
            self.start()
        except OSError as error:  # processes, memory or open files have run out
            self._failures += 1
            told = f"no guest could be started in the host's bubbles, which goes on without: {error}"
            warnings.warn(told, stacklevel=4)

    def _end(self) -> None:
        if self._process is not None:
            self._before = self._process.name, self._process.end()
            self._used_before += self._process.used
            self._process = None

    def wait(self, position: object, plain: Callable[[], None]) -> None:
        """Call `plain`, the schedule's own wait, and let the guest run meanwhile.

        `position` tells the waits of a step apart.
        """
        process, expected = self._process, self._forecast.expects(position)
        lets_in = not self.paused and self._guard.lets_in and expected >= self._guard.least
        began = time.monotonic()
        if process is None or not lets_in:
            plain()
        else:
            process.open(expected)
            try:
                plain()
            finally:
                process.close()
        seconds = time.monotonic() - began
        self._forecast.saw(position, seconds)
        if process is not None and process.page.working:
            self.waited += seconds
            self.open += seconds if lets_in else 0.0

    def leave(self, patience_s: float) -> None:
        """Let the guest send its training to the tuner within `patience_s` seconds, then end the guest."""
        if self._process is not None and self._process.over is None:
            self._process.leave(patience_s)
        self._end()


_WAIT = "_wait_batch_p2p"
"""The function of torch's module that all schedules call to wait: for receives, and for sends that must have ended."""


@contextmanager
def watched(schedule: Any, guest: Guest) -> Iterator[None]:
    """Within the context, patch a schedule so that `guest` learns of its steps and runs during its waits."""
    known = callable(getattr(schedule, "step", None)) and hasattr(schedule, "_step_microbatches")
    require(known, "schedule", schedule, "one of torch.distributed.pipelining, such as Schedule1F1B")
    before = getattr(torch_schedules, _WAIT, None)
    if before is None:
        raise RuntimeError(
            f"torch {torch.__version__} has no {_WAIT} in {torch_schedules.__name__}: it waits elsewhere"
        )
    inside, position = None, 0  # thread of the current step; number of its waits so far

    def wait(works: Sequence[Any]) -> None:
        nonlocal position
        if inside != threading.get_ident() or not works:
            before(works)
            return
        position += 1
        guest.wait((schedule._has_backward, position), lambda: before(works))

    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside, position
        inside, position = threading.get_ident(), 0
        guest.begin_step()
        try:
            return plain_step(*args, **kwargs)
        finally:
            inside = None

    plain_step, own = schedule.step, vars(schedule).get("step")  # `own` is one that the user has put on the object
    schedule.step = step
    setattr(torch_schedules, _WAIT, wait)
    try:
        yield
    finally:
        setattr(torch_schedules, _WAIT, before)
        if own is None:
            del schedule.step
        else:
            schedule.step = own
