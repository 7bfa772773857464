"""How many trials of a kind to train as one: measured once on a machine, then remembered.

A measurement differs from run to run, and with the width of a group the last digits of its results. What was measured
is therefore kept for all later runs of this machine, so that the same call gives the same result.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fusion.probe import plan_fusion, usable_memory

from .data import Batch
from .forks import Died, each
from .grouping import Widths
from .problem import Problem, Trial, outline
from .store import write_atomically

SECONDS_PER_WIDTH = 0.03
"""Time to measure each width, but no less than a few steps: to be small beside what a sweep takes."""


Example = tuple[Trial, int]
"""A trial of some kind, and how many of that kind there are."""


def cache_file() -> Path:
    """Where measurements are kept: below HYDRO_RASDA_CACHE, or the user's cache folder."""
    root = os.environ.get("HYDRO_RASDA_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "hydro_rasda" / "fusion.json"


def planned_widths(problem: Problem, kinds: Mapping[str, Example], cores: int = 1) -> dict[str, Widths]:
    """For each kind, the width at which a group trains fastest and fits memory, and from which it pays at all.

    Args:
        problem: What is tuned.
        kinds: By digest, an example of the kind, and how many trials of it there are.
        cores: Of the device, each of which trains a part of a group on one thread; they share the memory.
    """
    keys, work = dict[str, str](), dict[str, Callable[[], dict[str, Any]]]()
    known = _read()
    for kind, (trial, count) in kinds.items():
        of_part = -(-count // cores)
        batch = next(problem.train_data.epoch(trial.batch_size, 0))
        where = f"{machine(problem.device)} of {cores}"
        keys[kind] = "/".join([kind, outline(batch), where, f"{of_part} trials"])
        if of_part > 1 and keys[kind] not in known:
            work[keys[kind]] = partial(_measure, problem, trial, batch, of_part, cores)
    measured = dict(zip(work, each(list(work.values()), cores)))
    if found := {key: value for key, value in measured.items() if not isinstance(value, Died)}:
        known = _read() | found
        cache_file().parent.mkdir(parents=True, exist_ok=True)
        write_atomically(cache_file(), json.dumps(known, indent=1).encode())
    return {kind: _widths(known.get(key)) for kind, key in keys.items()}


def _widths(measured: Mapping[str, Any] | None) -> Widths:
    """Of a kind; where there was nothing to measure, or that cannot be survived, of single trials."""
    if measured is None:
        return Widths(1)
    return widths_from({int(k): rate for k, rate in measured["throughput"].items()}, measured["width"])


def widths_from(throughput: Mapping[int, float], most: int) -> Widths:
    """Read widths off measured throughputs (steps of a trial per second by width; at 1: one after another).

    >>> widths_from({1: 100.0, 2: 70.0, 4: 120.0, 8: 240.0}, most=8).least
    4
    """
    pays = [width for width, rate in throughput.items() if width > 1 and rate > throughput[1]]
    return Widths(most, min(pays, default=2), throughput)


def _measure(problem: Problem, trial: Trial, batch: Batch, count: int, cores: int) -> dict[str, Any]:
    def loss(model: nn.Module, part: Batch) -> Tensor:
        return problem.objective(model, part)["loss"]

    surrogates = [problem.surrogate(trial)] * count
    memory = usable_memory(problem.device, cores)
    plan = plan_fusion(surrogates, [trial.config] * count, loss, batch, memory=memory, seconds=SECONDS_PER_WIDTH)
    return {"width": plan.width, "bytes_per_trial": plan.bytes_per_trial, "throughput": dict(plan.throughput)}


def _read() -> dict[str, Any]:
    try:
        known: dict[str, Any] = json.loads(cache_file().read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return known


def machine(device: torch.device) -> str:
    """Equal for devices on which the same widths are fastest."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu x {torch.get_num_threads()}"
    return f"{name} torch {torch.__version__}"
