"""Profiles of jobs and machines like HyperSack's: what its slides state, and what is assumed beside that."""

from __future__ import annotations

import random
from dataclasses import dataclass

from benchmarks.packing_virtual import Machine
from hydro_rasda.schedulers import Interference, Job

MODELS = ("ViT-Tiny", "DeiT-Tiny", "ResNet-18", "ResNet-34", "ShuffleNet", "MobileNet")
LOWEST, HIGHEST = 0.22, 0.50
"""Utilization of an A100 by one training alone."""

BATCHES = (64, 128, 256, 512)
MEMORY = 40.0
"""GB of an A100."""

SECONDS = 126 * 60 * 4 / 384
"""Mean of a job alone on an A100: 384 of them took 2.1 h on four, one a GPU."""

NEIGHBOUR = 0.06
"""A neighbour slows a job by 0 to so much, drawn for each pair of kinds."""

ROOM = 3.95 / 2.65
"""By how much more a GPU of the second system has room for: its gain from packing on 4 H100 over the first one's."""

H100_SPEED = 126 / 102
"""Of a job alone on an H100, over an A100 of the first system: 2.1 h and 1.7 h for the same jobs on four."""

A100_SPEED = 4 / 6 * (126 / 49.5 - H100_SPEED)
"""Of a job alone on an A100 of the second system: 49.5 minutes on 4 H100 and 6 A100."""

ORIGINS = (
    ("share of an A100 that a job keeps busy alone", "22 to 50 %, six models evenly spaced", "slides"),
    ("the same by batch size (64, 128, 256, 512)", "times 0.9, 0.97, 1.03, 1.1; within 22 to 50 %", "assumed"),
    ("mean seconds of a job alone", f"{SECONDS:.1f}", "slides: 384 jobs, 4 A100, 2.1 h"),
    ("seconds by model; by batch size", "lognormal, 0.5 and 0.2; times 1.3, 1.1, 0.9, 0.8", "assumed"),
    ("seconds within a kind", "lognormal, 0.05", "assumed"),
    ("memory", "1.5, 2.5, 4, 7 GB by batch size, times 1 to 2 by model; 40 GB a GPU", "assumed"),
    ("slowdown by each neighbour, beyond what shares explain", "0 to 6 %, by pair of kinds", "assumed"),
    ("H100: speed alone; room over an A100", f"{H100_SPEED:.2f}; {ROOM:.2f}", "fitted to the slides' 4 H100"),
    (
        "A100 beside them: speed alone; room",
        f"{A100_SPEED:.2f}; {ROOM:.2f}",
        "fitted to the slides' 4 H100 + 6 A100, unpacked; room as for the H100, on whose system they are",
    ),
)
"""What is assumed, its value and where it is from."""


@dataclass(frozen=True)
class Problem:
    """Jobs, and how they slow each other."""

    jobs: list[Job]
    interference: Interference


def problem(jobs: int, seed: int, neighbour: float = NEIGHBOUR) -> Problem:
    """A grid of six models, four batch sizes and as many learning rates as make up the jobs.

    Args:
        jobs: A multiple of 24.
        neighbour: By how much one neighbour slows a job at most.
    """
    rng = random.Random(seed)
    kinds = []
    for m, model in enumerate(MODELS):
        share = LOWEST + (HIGHEST - LOWEST) * m / (len(MODELS) - 1)
        slow = rng.lognormvariate(0, 0.5)
        for b, batch in enumerate(BATCHES):
            compute = min(HIGHEST, max(LOWEST, share * (0.9, 0.97, 1.03, 1.1)[b]))
            memory = (1.5, 2.5, 4.0, 7.0)[b] * (1 + m / 5)
            seconds = slow * (1.3, 1.1, 0.9, 0.8)[b] * rng.lognormvariate(0, 0.2)
            kinds.append(Job("", memory, compute, seconds, f"{model}/{batch}"))
    found = [
        kind._replace(name=f"{kind.kind}/{i}", seconds=kind.seconds * rng.lognormvariate(0, 0.05))
        for kind in kinds
        for i in range(jobs // len(kinds))
    ]
    scale = SECONDS * len(found) / sum(job.seconds for job in found)
    beside = {(a.kind, b.kind): 1 + rng.uniform(0, neighbour) for a in kinds for b in kinds}
    return Problem([job._replace(seconds=job.seconds * scale) for job in found], Interference(beside))


def a100s(count: int) -> list[Machine]:
    """GPUs of the first system."""
    return [Machine(f"A100-{i}", MEMORY) for i in range(count)]


def h100s_and_a100s(h100s: int, a100s: int) -> list[Machine]:
    """GPUs of the second system."""
    return [
        *(Machine(f"H100-{i}", 2 * MEMORY, ROOM, H100_SPEED) for i in range(h100s)),
        *(Machine(f"A100-{i}", MEMORY, ROOM, A100_SPEED) for i in range(a100s)),
    ]
