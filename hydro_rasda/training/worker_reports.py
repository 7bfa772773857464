"""Keys of a worker's reports, and the step times of a trial for each number of workers that it has had."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from hydro_rasda.schedulers import parallel_efficiency
from hydro_rasda.settings.config import GLOBAL_BATCH, NOISE_SCALE

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

EPOCH_SECONDS = "epoch_seconds"
"""Key of a report: the seconds of its epoch, without the start of the worker, waits, and work after the epoch."""


def noise_in_workers(report: Mapping[str, Any], workers: int) -> float:
    """Return the gradient noise scale of a report in units of one worker's batch; inf if the report lacks it."""
    examples, batch = report.get(NOISE_SCALE), report.get(GLOBAL_BATCH)
    return float(examples) * workers / batch if examples is not None and batch else math.inf


_STEPS, _ITERATIONS = 1000, 32
"""Only the last `_STEPS` steps of an iteration count, and the last `_ITERATIONS` iterations of a number of workers."""


class StepTimes:
    """Measure the times between an optimizer's steps, and from them the parallel efficiency of more workers.

    Time between iterations (validation, a checkpoint, a pause) does not count. Stalls count little, because times are
    medians over the steps of an iteration, and over the iterations with the same number of workers.

    Args:
        device: The device that trains. Steps on a GPU are timed by CUDA events.
    """

    def __init__(
        self, optimizer: Optimizer, workers: int, device: torch.device, state: Mapping[str, Any] | None = None
    ) -> None:
        self._workers, self._on_gpu = workers, device.type == "cuda"
        self._marks: deque[Any] = deque(maxlen=_STEPS)
        self._seconds: dict[int, list[float]] = {int(size): list(of) for size, of in (state or {}).items()}
        optimizer.register_step_post_hook(self._mark)

    @property
    def efficiency(self) -> float | None:
        """Parallel efficiency, compared with the fewest workers so far; None before two steps of one iteration.

        The seconds per example are multiplied by the number of workers. This product with the fewest workers is divided
        by the product now. The efficiency is 1 if twice the workers take half as long.
        """
        if self._workers not in self._seconds:
            return None
        return parallel_efficiency({size: median(of) for size, of in self._seconds.items()}, self._workers)

    def settle(self, global_batch_size: float | None) -> None:
        """End an iteration, and add its seconds per example to those measured with this number of workers.

        `global_batch_size` may be None if the batch of each worker never changes.
        """
        times = self._between()
        self._marks.clear()
        if times:
            per_example = median(times) / (global_batch_size or self._workers)
            self._seconds[self._workers] = [*self._seconds.get(self._workers, []), per_example][-_ITERATIONS:]

    def state(self) -> dict[str, list[float]]:
        """Return plain values, from which another `StepTimes` continues with any number of workers."""
        return {str(size): of for size, of in self._seconds.items()}

    def _mark(self, *_: Any) -> None:
        if self._on_gpu:
            import torch  # imported here, because the keys above are read without torch

            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def _between(self) -> list[float]:
        if self._on_gpu and self._marks:
            self._marks[-1].synchronize()
            return [a.elapsed_time(b) / 1000 for a, b in pairwise(self._marks)]
        return [b - a for a, b in pairwise(self._marks)]
