"""A short version of every benchmark, about ten minutes on 2 cores; then `RESULTS.md` is drawn again.

    python -m benchmarks.bench

Its result files go to `results/quick/`, which git ignores; what they say goes to `results/quick.json`, a section of its
own of `RESULTS.md`. The full results are left as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from benchmarks.result_files import DEFAULT_DATA, RESULTS
from benchmarks.results_page import QUICK, claims
from benchmarks.results_page import main as write_page


class Step(NamedTuple):
    """A benchmark in short.

    Attributes:
        needs: A file below the folder of data sets, without which it is left out; "" where it needs none.
    """

    command: str
    needs: str = ""


STEPS = (
    Step("vs_asha --quick --again --tasks digits --seeds 0 1"),
    Step("vs_asha --quick --again --tasks turbulence --methods ray_asha tune --seeds 0"),
    Step("vs_asha --quick --again --tasks shakespeare --methods ray_asha tune --seeds 0", "tinyshakespeare/input.txt"),
    Step("vs_asha --quick --again --tasks cifar10 --methods ray_asha tune --seeds 0", "cifar10/cifar10_jpeg.npz"),
    Step("fusion_throughput --trials 32 --seconds 5 --out {out}"),
    Step("transfer_quality digits --configs 12 --ratios 0.125 --seeds 3 --out {out}"),
    Step("rasda_paper --quick --out {out}", "lcbench/model.onnx"),
    Step("packing --quick --out {out}"),
    Step("scale imports traces dispatch scheduler simulator events examples_read --out {out}"),
)


def run(steps: Sequence[Step], data: Path, out: Path) -> list[str]:
    """Run steps one after another; say which were left out, and why."""
    left_out = []
    for step in steps:
        if step.needs and not (data / step.needs).exists():
            left_out.append(f"`{step.command.split(' --')[0]}`, {step.needs} is missing")
            print(f"left out: {left_out[-1]}; HYDRO_RASDA_DATA says where data sets are", flush=True)
            continue
        module, *options = step.command.format(out=out).split()
        began = time.perf_counter()
        environment = {**os.environ, "HYDRO_RASDA_DATA": str(data.resolve())}
        subprocess.run([sys.executable, "-m", f"benchmarks.{module}", *options], check=True, env=environment)
        print(f"{time.perf_counter() - began:.0f} s: {step.command}", flush=True)
    return left_out


def main() -> None:
    """Run everything in short and rewrite the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(DEFAULT_DATA))
    data = parser.parse_args().data
    load, began = os.getloadavg()[0], time.perf_counter()
    left_out = run(STEPS, data, RESULTS / "quick")
    summary = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "minutes": round((time.perf_counter() - began) / 60, 1),
        "load": round(load, 2),
        "left_out": left_out,
        "claims": claims(RESULTS / "quick"),
    }
    (RESULTS / QUICK).write_text(json.dumps(summary, indent=1) + "\n")
    write_page()


if __name__ == "__main__":
    main()
