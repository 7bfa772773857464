"""The waits of a host: the one place at which `torch.distributed.pipelining` waits for its neighbours."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed.pipelining.schedules as torch_schedules

from hydro_rasda.checks import require

_WAIT = "_wait_batch_p2p"
"""Every schedule calls it in its own module, for receives and for sends that it has no time left to put off."""


class Watcher(Protocol):
    """Is told of a host's steps and waits, in the host's thread."""

    def begin_step(self) -> None:
        """A step begins."""
        ...

    def wait(self, position: object, plain: Callable[[], None]) -> None:
        """Call `plain`, which waits; `position` is the same for the same wait of another step."""
        ...

    def end_step(self) -> None:
        """A step is over."""
        ...


@contextmanager
def watched(schedule: Any, watcher: Watcher) -> Iterator[None]:
    """Tell a watcher of all that a schedule's steps wait for inside.

    Args:
        schedule: Any of `torch.distributed.pipelining`: it, and what it computes, stay as they are.

    Raises:
        ValueError: if `schedule` is none.
        RuntimeError: if this version of torch waits in another way.
    """
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
        watcher.wait((schedule._has_backward, position), lambda: before(works))

    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside, position
        inside, position = threading.get_ident(), 0
        watcher.begin_step()
        try:
            return plain_step(*args, **kwargs)
        finally:
            inside = None
            watcher.end_step()

    plain_step = schedule.step
    schedule.step = step
    setattr(torch_schedules, _WAIT, wait)
    try:
        yield
    finally:
        setattr(torch_schedules, _WAIT, before)
        del schedule.step
