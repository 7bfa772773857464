"""The code that Ray's workers run for Ray Tune's ASHA, in plain torch. It does not import `hydro_rasda`."""

from __future__ import annotations

import math
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.tasks.task import Config, Task
from benchmarks.vs_asha.training import Seeds, build, train

DIVERGED = 1e9
"""ASHA cannot rank NaN, so a score that is not finite is reported as this, or as its negative if more is better."""


_HERE: dict[str, Task] = {}
"""The task of this worker, with its data on the device. Later trials in the same actor use it again."""


def ray_trial(
    config: Mapping[str, int],
    task: Task,
    arrays: Mapping[str, Sequence[Any]],
    configs: Sequence[Config],
    seeds: Sequence[Seeds],
) -> None:
    """Train one configuration, and report after every epoch.

    Args:
        config: Has the number of the configuration as "trial".
    """
    from ray.tune import Checkpoint, report

    began = time.time()
    if task.name not in _HERE:
        with warnings.catch_warnings():
            # Torch warns that arrays of the object store are read-only. This is harmless, as nothing here writes to
            # them.
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            held, examples = (tuple(torch.from_numpy(a) for a in arrays[part]) for part in ("held", "train"))
        _HERE[task.name] = replace(task, train=examples, held=held).on_device()
    task = _HERE[task.name]
    number = config["trial"]
    model = build(task, configs[number], seeds[number])
    worst = -DIVERGED if task.mode == "max" else DIVERGED
    for epoch, measured in enumerate(train(task, configs[number], seeds[number], model), start=1):
        told = {"score": measured["score"] if math.isfinite(measured["score"]) else worst}
        told |= {"test": measured["test"], "epoch": epoch, "began": began}
        if epoch < task.max_t:
            report(told)
            continue
        with tempfile.TemporaryDirectory() as folder:
            torch.save(model.state_dict(), Path(folder, "model.pt"))
            report(told, checkpoint=Checkpoint.from_directory(folder))
