"""The training of a guest. It is the same as in any process of a device, but takes place within bubbles."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor, nn

from hydro_rasda.backends.process_pool import answer_all, read_shared, report
from hydro_rasda.bubbles.guest_handle import SharedPage
from hydro_rasda.contracts import Outcome, Task
from hydro_rasda.data import Batch
from hydro_rasda.problem.objective import Objective
from hydro_rasda.schedulers.bubble_policy import Margin
from hydro_rasda.training.device import Given, Trainer

_LOOK_S = 2e-4


class Quanta:
    """Splits a training step into two quanta: the forward pass, and the work until the next one (backward, update).

    A quantum cannot be stopped, so it begins only in a bubble that is long enough. A step in micro-batches has two
    quanta for each micro-batch.
    """

    def __init__(self, page: SharedPage, where: torch.device) -> None:
        self._page, self._where, self._margin = page, where, Margin()
        self._under_way: tuple[str, float] | None = None

    def objective(self, of: Objective) -> Objective:
        """Wrap an objective: each call is a forward quantum, and the quantum "backward and update" begins after it."""

        def measured(model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
            self.begin("forward")
            metrics = of(model, batch)
            self.begin("backward and update")
            return metrics

        return measured

    def begin(self, kind: str) -> None:
        """End the current quantum, and wait for a bubble that is long enough for a quantum of this kind."""
        if self._where.type == "cuda":
            torch.cuda.synchronize(self._where)
        if self._under_way is not None:
            before, began = self._under_way
            self._margin.saw(before, time.monotonic() - began, in_time=self._page.until > 0)
        while not self._margin.fits(kind, self._page.until - time.monotonic()) and not self._page.leaving:
            time.sleep(_LOOK_S)
        self._under_way = kind, time.monotonic()


class GuestTrainer(Trainer):
    """Trains one group or one full-size model at a time, in the guest's own process."""

    def train_piece(self, task: Task, given: Given, threads: int) -> Outcome:
        """Train `task` in `threads` threads, as many as other backends use: the last digits depend on that number."""
        torch.set_num_threads(threads)
        (finished,) = self.train([task], given)
        return finished.outcome


def train(connection: Connection, page: SharedPage, device: str, preempt: bool, more: Callable[[], bool]) -> None:
    """Train what a sweep sends, until it is over.

    Args:
        preempt: True if the host stops this process after a bubble. If False, this process waits by itself between
            quanta.
        more: Waits for the tuner's next message; returns False if the guest is to leave.
    """
    answer_all(connection, partial(_opened, page, torch.device(device), preempt, partial(report, connection)), more)


def _opened(
    page: SharedPage, where: torch.device, preempt: bool, notify: Callable[..., None], problem: Path
) -> Trainer:
    given = read_shared(problem)
    if where.type == "cuda":
        torch.cuda.set_device(where)
        free, total = torch.cuda.mem_get_info(where)
        torch.cuda.set_per_process_memory_fraction(0.8 * free / total, where)
        # Use a stream of the lowest priority: under MPS, kernels of the host that have a higher priority run first.
        torch.cuda.set_stream(torch.cuda.Stream(where, priority=0))
    if not preempt:
        if given.own_loop is not None:
            raise ValueError(
                "`train` cannot train in bubbles with `preempt=False`, as on GPUs: the library cannot see where its "
                "steps begin, so they would outlast a bubble. Use another backend"
            )
        # Record no graph: it would not call the objective, so that no quantum would begin.
        given = replace(given, objective=Quanta(page, where).objective(given.objective)).with_settings(graph=False)
    # With one thread, one group trains at a time, because the other cores belong to other ranks. `train_piece` sets the
    # number of threads in which that group computes.
    return GuestTrainer(given, where, 1, notify, lambda: page.leaving)
