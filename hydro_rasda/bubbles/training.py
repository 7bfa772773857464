"""The training of a guest: that of any device's process, within bubbles."""

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
from hydro_rasda.training.device_process import Given, Trainer

_LOOK_S = 2e-4


class Quanta:
    """Parts a fused step in two: its forward pass, and what follows until the next one (backward, update).

    A step that trains in micro-batches has so many quanta of each.
    """

    def __init__(self, page: SharedPage, where: torch.device) -> None:
        self._page, self._where, self._margin = page, where, Margin()
        self._under_way: tuple[str, float] | None = None

    def objective(self, of: Objective) -> Objective:
        """The same objective, each call of which is a quantum, and begins the next one."""

        def measured(model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
            self.begin("forward")
            metrics = of(model, batch)
            self.begin("backward and update")
            return metrics

        return measured

    def begin(self, kind: str) -> None:
        """End the quantum that is under way, and wait for a bubble that one of this kind fits."""
        if self._where.type == "cuda":
            torch.cuda.synchronize(self._where)
        if self._under_way is not None:
            before, began = self._under_way
            self._margin.saw(before, time.monotonic() - began, in_time=self._page.until > 0)
        while not self._margin.fits(kind, self._page.until - time.monotonic()) and not self._page.leaving:
            time.sleep(_LOOK_S)
        self._under_way = kind, time.monotonic()


class GuestTrainer(Trainer):
    """Trains on what a bubble leaves: one group, or one full-size model, at a time, in the guest's own process."""

    def train_piece(self, task: Task, given: Given, threads: int) -> Outcome:
        """Train on as many threads as the task has elsewhere, since on these its last digits depend."""
        torch.set_num_threads(threads)
        (finished,) = self.train([task], given)
        return finished.outcome


def train(connection: Connection, page: SharedPage, device: str, preempt: bool, more: Callable[[], bool]) -> None:
    """Train what a sweep sends, until it is over.

    Args:
        preempt: True if the host stops this process; otherwise it stops itself, between quanta.
        more: Waits for the next that the tuner says; False where there is nothing to wait for.
    """
    where = torch.device(device)
    torch.set_num_threads(1)  # one group at a time: other cores are other ranks'
    answer_all(connection, partial(_opened, page, where, preempt, partial(report, connection)), more)


def _opened(
    page: SharedPage, where: torch.device, preempt: bool, notify: Callable[..., None], problem: Path
) -> Trainer:
    given = read_shared(problem)
    if where.type == "cuda":
        torch.cuda.set_device(where)
        free, total = torch.cuda.mem_get_info(where)
        torch.cuda.set_per_process_memory_fraction(0.8 * free / total, where)
        # Where MPS has both processes share the device at once, the host's kernels go first.
        torch.cuda.set_stream(torch.cuda.Stream(where, priority=0))
    if not preempt:
        # A recorded step would call no quantum.
        given = replace(given, objective=Quanta(page, where).objective(given.objective)).with_settings(graph=False)
    return GuestTrainer(given, where, 1, notify, lambda: page.leaving)
