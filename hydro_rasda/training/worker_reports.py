"""A worker's reports: their keys, and the time of a trial's steps at each size that it has had."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from hydro_rasda.schedulers import parallel_efficiency
from hydro_rasda.settings.config import GLOBAL_BATCH

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

EPOCH_SECONDS = "epoch_seconds"
"""In a report, its epoch's own time: without starts and waits, and without what follows the epoch."""

NOISE_SCALE = "gradient_noise_scale"
"""In a report, the trial's gradient noise scale, in examples; `GLOBAL_BATCH` must be beside it."""

SCALING_EFFICIENCY = "scaling_efficiency"
"""In a report, the trial's parallel efficiency, compared with the fewest workers that it has had."""

HISTORY = ("workers", GLOBAL_BATCH, "lr_multiplier", NOISE_SCALE, SCALING_EFFICIENCY)
"""Keys of a report that a trial's history keeps besides the metrics "train_*" and "val_*"."""


def noise_in_workers(report: Mapping[str, Any], workers: int) -> float:
    """The gradient noise scale of a report, in batches of one of its workers; inf where it does not tell."""
    examples, batch = report.get(NOISE_SCALE), report.get(GLOBAL_BATCH)
    return float(examples) * workers / batch if examples is not None and batch else math.inf


_STEPS, _ITERATIONS = 1000, 32
"""Of an iteration, so many steps count, and of a size so many iterations: the last."""


class StepTimes:
    """Measure the times between an optimizer's steps, and from them the efficiency of more workers.

    Time between iterations (validation, a checkpoint, a pause) does not count. Stalls count little: the time of an
    iteration is the median of its steps, and that of a number of workers the median of its iterations.

    Args:
        device: The device that trains: steps on a GPU are timed there.
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

        Seconds per example, times workers, there over here: 1 where twice the workers take half as long.
        """
        if self._workers not in self._seconds:
            return None
        return parallel_efficiency({size: median(of) for size, of in self._seconds.items()}, self._workers)

    def settle(self, global_batch_size: float | None) -> None:
        """End an iteration; `global_batch_size` is None if a worker's batch never changes."""
        times = self._between()
        self._marks.clear()
        if times:
            per_example = median(times) / (global_batch_size or self._workers)
            self._seconds[self._workers] = [*self._seconds.get(self._workers, []), per_example][-_ITERATIONS:]

    def state(self) -> dict[str, list[float]]:
        """Plain values to go on from, at whatever size."""
        return {str(size): of for size, of in self._seconds.items()}

    def _mark(self, *_: Any) -> None:
        if self._on_gpu:
            import torch  # the keys above are read without it

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
