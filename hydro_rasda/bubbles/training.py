"""The training of a guest: that of any device's process, within bubbles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from hydro_rasda.backends.process_pool import answer_all, read_shared, report
from hydro_rasda.bubbles.quanta import Quanta
from hydro_rasda.bubbles.shared_memory import Page
from hydro_rasda.contracts import FullSizeOutcome, FullSizeTask, GroupOutcome, GroupTask
from hydro_rasda.training.trainer import Given, Trainer


class GuestTrainer(Trainer):
    """Trains on what a bubble leaves: one group, or one full-size model, at a time, in the guest's own process."""

    def train_part(self, task: GroupTask, given: Given, threads: int) -> tuple[GroupOutcome, float]:
        """Train a group on as many threads as it has elsewhere, since on these its last digits depend."""
        torch.set_num_threads(threads)
        return self.train_groups(task, given)

    def train_full_size_trial(self, task: FullSizeTask, given: Given, threads: int) -> FullSizeOutcome:
        """Train a full-size model."""
        torch.set_num_threads(threads)
        (outcome,) = self.train_full_size([task], given)
        return outcome


def train(connection: Connection, page: Page, device: str, preempt: bool, more: Callable[[], bool]) -> None:
    """Train what a sweep sends, until it is over.

    Args:
        preempt: True if the host stops this process; otherwise it stops itself, between quanta.
        more: Waits for the next that the tuner says; False where there is nothing to wait for.
    """
    where = torch.device(device)
    torch.set_num_threads(1)  # one group at a time: other cores are other ranks'
    answer_all(connection, partial(_opened, page, where, preempt, partial(report, connection)), more)


def _opened(page: Page, where: torch.device, preempt: bool, notify: Callable[..., None], problem: Path) -> Trainer:
    given = read_shared(problem)
    if where.type == "cuda":
        torch.cuda.set_device(where)
        free, total = torch.cuda.mem_get_info(where)
        torch.cuda.set_per_process_memory_fraction(0.8 * free / total, where)
        # Where MPS has both processes share the device at once, the host's kernels go first.
        torch.cuda.set_stream(torch.cuda.Stream(where, priority=0))
    if not preempt:
        given = replace(given, objective=Quanta(page, where).objective(given.objective))
    return GuestTrainer(given, where, 1, notify, lambda: page.leaving)
