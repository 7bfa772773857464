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
"""So often, at the beginning of a step, the host looks after its guest, and at what memory is left."""

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
    """Have a guest train in the bubbles of a pipeline: inside, whenever a step waits for a neighbour.

    Every rank of a host does so around its loop; nothing else of it changes. The guest is a process of its own: what
    the host computes is the same to the last bit. It trains groups of the sweep that
    `tune(backend=BubbleBackend(source))` runs meanwhile, wherever that is; without a sweep, it waits for one. Bubbles
    stay empty if they are too short to be worth it, by the last steps' waits. One step in
    `schedulers.bubble_policy.CONTROL` stays empty, too, for comparison. If guests cost the host more than 1 % of a
    step, only longer bubbles are used.

    Leaving lets the guest end the current epoch and hand over its training. If the host is killed, the guest ends with
    it. Its training since its last checkpoint is then repeated in another bubble.

    Args:
        schedule: The host's, of `torch.distributed.pipelining`: any that it has.
        source: A folder that the host and the tuner both see.
        leave_free: Bytes of memory that the guest leaves for the host: with less, it ends at once, and comes back once
            there is twice as much. None for a tenth of what is free now.
        patience_s: Seconds that leaving may take.
        preempt: True if the kernel stops and continues the guest. Otherwise the guest begins no quantum that a bubble
            is too short for: the forward pass of a step, or the rest of it. None for the choice that fits the host's
            device: on a GPU, work that has begun cannot be stopped. That has not been run on GPUs yet.

    Yields:
        The state of the guest; see `Guest`.

    Raises:
        ValueError: for an argument that cannot be.
        RuntimeError: on other systems than Linux.
        Unsafe: if others own `source` or can write to it: what guests are to train is unpickled from where it says. Set
            HYDRO_RASDA_TRUST_SHARED_FOLDERS=1 if you trust them with your account.
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
            guest.start()
            yield guest
    finally:
        guest.leave(patience_s)


def _device(schedule: Any) -> torch.device:
    stages = getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]
    return torch.device(getattr(stages[0], "device", "cpu"))


class Guest:
    """The process that trains in a rank's bubbles.

    Attributes:
        steps: Of the host so far.
        waited: Seconds that the host waited while there was something to train: the bubbles, whoever used them.
        open: The part of them in which the guest was let run.
        paused: True if it is let run no more, until the host says otherwise.
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
        """Of its process; None where it has none now."""
        return None if self._process is None else self._process.pid

    @property
    def working(self) -> bool:
        """Return whether it has something to train."""
        return self._process is not None and self._process.page.working

    @property
    def used(self) -> float:
        """Seconds of CPU time that it has taken, its own start included."""
        return self._used_before + (0.0 if self._process is None else self._process.used)

    @property
    def cost(self) -> float:
        """Share by which it makes the host's steps longer, as measured lately; NaN before that is known."""
        return self._guard.cost

    def start(self) -> None:
        """Start its process, where memory allows."""
        self._looked = time.monotonic()
        if self._free() < self._enough:
            return
        self._process = GuestProcess(self._source, str(self._device), self._preempt, self._before)
        self._process.tie(_TIE_S)

    def _free(self) -> float:
        free = available_memory(self._device)
        return float("inf") if free is None else free

    def begin_step(self) -> None:
        """Look after the process: a step of the host begins."""
        now = time.monotonic()
        if self.steps > 1 and not self.paused:  # the first step sets the pipeline up
            self._guard.saw(now - self._began)
        self._began = now
        self.steps += 1
        if now - self._looked >= LOOK_S:
            self._looked = now
            process = self._process
            if process is None:
                if self._failures < _FAILURES:
                    self._start_again()
            elif self._free() < self._leave_free:
                self._end()
                self._enough = 2 * self._leave_free
            elif (status := process.over) is not None:
                # Its sweep is over, which is no failure; or what it trained has ended it, which the tuner counts.
                self._failures = 0 if status == 0 or process.page.working else self._failures + 1
                self._end()

    def _start_again(self) -> None:
        try:
            self.start()
        except OSError as error:  # no more processes, memory or files now
            self._failures += 1
            told = f"no guest could be started in the host's bubbles, which goes on without: {error}"
            warnings.warn(told, stacklevel=4)

    def _end(self) -> None:
        if self._process is not None:
            self._before = self._process.name, self._process.end()
            self._used_before += self._process.used
            self._process = None

    def wait(self, position: object, plain: Callable[[], None]) -> None:
        """Call `plain`, which waits; `position` is the same for the same wait of another step."""
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
        """Have it hand over what it trained, and end."""
        if self._process is not None and self._process.over is None:
            self._process.leave(patience_s)
        self._end()


_WAIT = "_wait_batch_p2p"
"""Every schedule calls it in its own module, for receives and for sends that it has no time left to put off."""


@contextmanager
def watched(schedule: Any, guest: Guest) -> Iterator[None]:
    """Tell a guest of the steps of a schedule, and of all that they wait for: it computes while the neighbours do."""
    known = callable(getattr(schedule, "step", None)) and hasattr(schedule, "_step_microbatches")
    require(known, "schedule", schedule, "one of torch.distributed.pipelining, such as Schedule1F1B")
    before = getattr(torch_schedules, _WAIT, None)
    if before is None:
        raise RuntimeError(
            f"torch {torch.__version__} has no {_WAIT} in {torch_schedules.__name__}: it waits elsewhere"
        )
    inside, position = None, 0  # the thread that a step is under way in; waits of it so far

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

    plain_step = schedule.step
    schedule.step = step
    setattr(torch_schedules, _WAIT, wait)
    try:
        yield
    finally:
        setattr(torch_schedules, _WAIT, before)
        del schedule.step
