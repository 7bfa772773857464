"""How many trials of a kind to train as one: measured once on a machine, then remembered.

A measurement differs from run to run, and with the width of a group the last digits of its results. What was measured
is therefore kept for all later runs of this machine, so that the same call gives the same result.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fusion.probe import plan_fusion

from .data import Batch
from .problem import Problem, Trial, outline
from .store import write_atomically

SECONDS_PER_WIDTH = 0.03
"""Time to measure each width, but no less than a few steps: to be small beside what a sweep takes."""


@dataclass(frozen=True)
class Widths:
    """How to group the trials of one kind.

    Attributes:
        most: Members of the largest group; 1 where fusing never pays.
        least: Members from which a group trains faster as one than one after another.
        rate: Steps of a trial per second, at `most`.
    """

    most: int
    least: int = 2
    rate: float = 1.0


def cache_file() -> Path:
    """Where measurements are kept: below HYDRO_RASDA_CACHE, or the user's cache folder."""
    root = os.environ.get("HYDRO_RASDA_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "hydro_rasda" / "fusion.json"


def planned_widths(problem: Problem, trial: Trial, kind: str, count: int) -> Widths:
    """The width at which a group trains fastest and fits memory, and from which it pays at all.

    Args:
        problem: What is tuned.
        trial: One of the kind.
        kind: Digest of what the trials share.
        count: How many trials of the kind there are.
    """
    if count == 1:
        return Widths(1)
    batch = next(problem.train_data.epoch(trial.batch_size, 0))
    key = "/".join([kind, outline(batch), machine(problem.device), f"{count} trials"])
    known = _read()
    if key not in known:
        known = _read() | {key: _measure(problem, trial, batch, count)}
        cache_file().parent.mkdir(parents=True, exist_ok=True)
        write_atomically(cache_file(), json.dumps(known, indent=1).encode())
    return widths_from({int(k): rate for k, rate in known[key]["throughput"].items()}, known[key]["width"])


def widths_from(throughput: Mapping[int, float], most: int) -> Widths:
    """Read widths off measured throughputs (steps of a trial per second by width; at 1: one after another).

    >>> widths_from({1: 100.0, 2: 70.0, 4: 120.0, 8: 240.0}, most=8)
    Widths(most=8, least=4, rate=240.0)
    """
    pays = [width for width, rate in throughput.items() if width > 1 and rate > throughput[1]]
    return Widths(most, min(pays, default=2), throughput[most])


def _measure(problem: Problem, trial: Trial, batch: Batch, count: int) -> dict[str, Any]:
    def loss(model: nn.Module, part: Batch) -> Tensor:
        return problem.objective(model, part)["loss"]

    surrogates = [problem.surrogate(trial)] * count
    plan = plan_fusion(surrogates, [trial.config] * count, loss, batch, seconds=SECONDS_PER_WIDTH)
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
