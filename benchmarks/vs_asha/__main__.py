"""`tune` against plain ASHA, really run: on tasks of seconds to minutes, two more on a GPU, six methods, several seeds.

    python -m benchmarks.vs_asha --tasks digits cifar10 --methods ray_asha tune --seeds 0 1 2

Each cell (task, method, seed) runs in a fresh process and is kept in `results/vs_asha/`; what is there is not run again
(`--again` does), so that a long study can go on later. For each seed the methods run in turn. Then, and with `--render`
alone, `results/vs_asha.md` and `.png` are drawn from all cells that are there. Data sets are read from
`$HYDRO_RASDA_DATA` (default `../shared/data`); a task whose data are missing is left out, and said so; so is
one that needs a GPU where there is none.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.result_files import DEFAULT_DATA, RESULTS
from benchmarks.tasks.load import NEEDS, ON_GPU
from benchmarks.vs_asha.report import METHOD_NAMES, TASK_NAMES, write


def study(
    tasks: Sequence[str],
    methods: Sequence[str],
    seeds: Sequence[int],
    data: Path,
    out: Path,
    *,
    again: bool = False,
    flags: Sequence[str] = (),
) -> None:
    """Run the cells that are missing. The methods of a seed run one after another."""
    for task in tasks:
        if task in ON_GPU and not torch.cuda.is_available():
            print(f"{task} is left out: it needs a CUDA GPU, and torch finds none here", flush=True)
            continue
        needed = data / NEEDS.get(task, ".")
        if not needed.exists():
            print(f"{task} is left out: {needed} is missing; point --data to the folder that holds it", flush=True)
            continue
        for seed, method in itertools.product(seeds, methods):
            path = out / f"{task}-{method}-{seed}.json"
            if again or not path.exists():
                began = time.perf_counter()
                _run(task, method, seed, data, path, flags)
                print(f"{task} {method} {seed}: {time.perf_counter() - began:.0f} s", flush=True)


def _run(task: str, method: str, seed: int, data: Path, path: Path, flags: Sequence[str]) -> None:
    command = [sys.executable, "-m", "benchmarks.vs_asha.cell", task, method, str(seed), "--data", str(data)]
    subprocess.run([*command, "--out", str(path), *flags], check=True)


def main() -> None:
    """Run the study and render it."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.vs_asha", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default_tasks = [task for task in TASK_NAMES if task not in ON_GPU or torch.cuda.is_available()]
    parser.add_argument("--tasks", nargs="+", choices=list(TASK_NAMES), default=default_tasks)
    parser.add_argument("--methods", nargs="+", choices=list(METHOD_NAMES), default=list(METHOD_NAMES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--again", action="store_true", help="run cells that are there, too")
    parser.add_argument("--quick", action="store_true", help="reduced tasks, into results/quick/")
    parser.add_argument("--untimed", action="store_true", help="other work shares the machine: times do not count")
    parser.add_argument("--gpu", action="store_true", help="all on the GPU, into results/vs_asha_gpu/")
    parser.add_argument("--render", action="store_true", help="run nothing")
    parser.add_argument("--data", type=Path, default=Path(DEFAULT_DATA))
    parser.add_argument("--out", type=Path, help="folder of the cells; the page and the figure go beside it")
    given = parser.parse_args()
    out = given.out or (RESULTS / "quick" if given.quick else RESULTS) / ("vs_asha_gpu" if given.gpu else "vs_asha")
    if not given.render:
        flags = ["--reduced"] * given.quick + ["--untimed"] * given.untimed + ["--device", "cuda"] * given.gpu
        study(given.tasks, given.methods, given.seeds, given.data, out, again=given.again, flags=flags)
    write(out)
    print(f"wrote {out}.md")


if __name__ == "__main__":
    main()
