"""Seconds from the report at which a trial on Ray is paused to its next one, on twice the workers: on GPUs, by NCCL.

    python -m benchmarks.resizes [--repeats 3]

A worker is a GPU. NCCL takes one worker a GPU, so that a machine of one shows nothing: then, as without a GPU, two
workers on CPUs meet by gloo, and the result says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import tempfile
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
import torch

from benchmarks.ray_overhead import SIZES, Clock, fit, warm
from hydro_rasda import RASDAScheduler, elastic

RESULTS = Path(__file__).parent / "results"


def resize(workers: int, resources: dict[str, float], folder: str) -> dict[str, float]:
    """One trial that grows from 1 worker to so many."""
    sizes = [size for size in SIZES if size <= workers]
    last = 2 ** (len(sizes) - 2)
    scheduler = RASDAScheduler(max_t=last + 1, grace_period=1, max_workers=workers, resources_per_worker=resources)
    clock = Clock()
    fit(elastic(warm, scheduler), folder, scheduler, 1, {"iterations": last + 1}, callbacks=[clock])
    times = clock.seen
    return {f"{a}->{b}": times[2**k + 1] - times[2**k] for k, (a, b) in enumerate(pairwise(sizes))}


def render(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    rows = [f"| {what} | {median(taken):.1f} | {len(taken)} |" for what, taken in result["seconds"].items()]
    return "\n".join(
        [
            "# Resizes of a trial on Ray",
            "",
            f"{result['date']}; {result['device']}, {result['through']}; torch {result['torch']}, Ray {result['ray']}.",
            "",
            "| workers | median, s | repeats |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> None:
    """Measure, and write `resizes.json` and `.md`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    gpus = torch.cuda.device_count()
    by_nccl = gpus > 1
    workers = min(gpus, SIZES[-1]) if by_nccl else 2
    resources: dict[str, float] = {"CPU": 1, "GPU": 1} if by_nccl else {"CPU": 1}
    ray.init(
        address="local",
        num_cpus=workers,
        num_gpus=gpus if by_nccl else 0,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
    )
    folder = tempfile.mkdtemp(prefix="resizes-")
    seconds: dict[str, list[float]] = {}
    try:
        for _ in range(given.repeats):
            for what, took in resize(workers, resources, folder).items():
                seconds.setdefault(what, []).append(round(took, 2))
    finally:
        ray.shutdown()
        shutil.rmtree(folder)
    result = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": f"{gpus} x {torch.cuda.get_device_name()}" if by_nccl else f"{workers} workers on CPUs",
        "through": "NCCL" if by_nccl else "gloo",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ray": ray.__version__,
        "seconds": seconds,
    }
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "resizes.json").write_text(json.dumps(result, indent=1) + "\n")
    (given.out / "resizes.md").write_text(render(result))


if __name__ == "__main__":
    main()
