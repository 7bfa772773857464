"""Keys of reports, among them the measurements that tell whether growth pays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hydro_rasda.config import GLOBAL_BATCH

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
