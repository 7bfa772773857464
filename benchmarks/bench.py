"""Every benchmark by one command, and a page of what it gave.

    python -m benchmarks.bench                      a short version of each, about ten minutes on 2 cores
    python -m benchmarks.bench --gpu --minutes 30   all that waits for a GPU; goes on where it was

Result files of the short version go to `results/quick/`, which git ignores, and so does their page, `RESULTS.md` there.
It has fewer seeds and shorter measurements: it shows that everything runs. The full results are left as they are.

On a GPU, each piece takes 8 minutes at most and is done once a device: `results/gpu.json` says which are, when and on
what. A call ends after its minutes, and the next one begins the piece again that it was at (`--again` forgets all).
Result files are those of each benchmark, with hardware and date. Without a GPU a stand-in runs to the end: the same
code on small cases on the CPU, into `results/quick/gpu/`, which git ignores.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.result_files import DEFAULT_DATA, RESULTS, read
from benchmarks.results_page import main as write_page
from benchmarks.results_page import render

PIECE_SECONDS = 480.0


class Bench(NamedTuple):
    """A short version or a part of a benchmark.

    Attributes:
        command: Module and options; `{out}` is the folder of results.
        needs: A file below the folder of data sets, without which the benchmark is left out; "" if it needs none.
    """

    command: str
    needs: str = ""


STEPS = (
    Bench("vs_asha --quick --again --tasks digits --seeds 0 1"),
    Bench("vs_asha --quick --again --tasks turbulence --methods ray_asha tune --seeds 0"),
    Bench("vs_asha --quick --again --tasks shakespeare --methods ray_asha tune --seeds 0", "tinyshakespeare/input.txt"),
    Bench("vs_asha --quick --again --tasks cifar10 --methods ray_asha tune --seeds 0", "cifar10/cifar10_jpeg.npz"),
    Bench("fusion_throughput --trials 32 --seconds 5 --out {out}"),
    Bench("transfer_quality digits --configs 12 --ratios 0.125 --seeds 3 --out {out}"),
    Bench("rasda_paper --quick --out {out}", "lcbench/model.onnx"),
    Bench("packing --quick --out {out}"),
    Bench("scale imports traces dispatch scheduler simulator events examples_read --out {out}"),
)
_TASKS = {"cifar10_resnet18": "cifar10/cifar10_jpeg.npz", "shakespeare_gpt": "tinyshakespeare/input.txt"}
ON_GPU = (
    *(
        Bench(f"fusion_cuda --cases {case} --precisions {precision} --out {{out}}")
        for case in ("mlp", "transformer", "resnet18")
        for precision in ("tf32", "bf16")
    ),
    Bench(
        "vs_asha --gpu --tasks wide_transformer --methods tune asha --seeds 0 --out {out}/vs_asha_gpu",
        "tinyshakespeare/input.txt",
    ),
    *(
        Bench(f"vs_asha --tasks {task} --methods {method} --seeds 0 --out {{out}}/vs_asha", needs)
        for task, needs in _TASKS.items()
        for method in ("tune", "ray_asha")
    ),
)
"""Benchmarks that say most in the least time come first."""
STAND_IN = (
    Bench("fusion_cuda --device cpu --cases mlp --precisions fp32 --widths 1 8 --out {out}"),
    Bench("vs_asha --quick --tasks digits --methods tune ray_asha --seeds 0 --data {out} --out {out}/vs_asha"),
)
"""Small cases that run the same code if there is no GPU."""


def _how(step: Bench, data: Path, out: Path) -> dict[str, Any]:
    """Return the arguments with which `subprocess` runs a step."""
    module, *options = step.command.format(out=out).split()
    environment = {**os.environ, "HYDRO_RASDA_DATA": str(data.resolve())}
    return {"args": [sys.executable, "-m", f"benchmarks.{module}", *options], "env": environment}


def run(steps: Sequence[Bench], data: Path, out: Path) -> list[str]:
    """Run steps one after another. Return the steps that were left out, with the reasons."""
    left_out = []
    for step in steps:
        if step.needs and not (data / step.needs).exists():
            left_out.append(f"`{step.command.split(' --')[0]}`, {step.needs} is missing")
            print(f"left out: {left_out[-1]}; HYDRO_RASDA_DATA says where data sets are", flush=True)
            continue
        began = time.perf_counter()
        subprocess.run(**_how(step, data, out), check=True)
        print(f"{time.perf_counter() - began:.0f} s: {step.command}", flush=True)
    return left_out


def resume(
    steps: Sequence[Bench],
    device: str,
    log: Path,
    do: Callable[[Bench], str],
    may_begin: Callable[[], bool],
    missing: Callable[[str], bool],
) -> list[str]:
    """Do the steps that are not done yet.

    Args:
        device: The device on which steps run. Steps that were done on another device are done again.
        log: The file that says which steps are done.
        do: Does a step, and returns how it ended; "" if the step must be done again.
        may_begin: Returns whether there is time to begin a step.
        missing: Returns whether this file is missing from the folder of data sets.

    Returns:
        Commands that wait for the next call.
    """
    done, waiting = read(log, {}), []
    for step in steps:
        if done.get(step.command, {}).get("device") == device:
            continue
        began, ended = time.monotonic(), ""
        if may_begin():
            ended = f"left out: {step.needs} is missing" if step.needs and missing(step.needs) else do(step)
        if not ended:
            waiting.append(step.command)
            continue
        date, seconds = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), round(time.monotonic() - began)
        done[step.command] = {"device": device, "date": date, "seconds": seconds, "ended": ended}
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(json.dumps(done, indent=1) + "\n")
        print(f"{seconds} s: {step.command}: {ended}", flush=True)
    return waiting


def _stop(child: subprocess.Popen[bytes]) -> None:
    """End a benchmark and its processes as Ctrl-C does, so that Ray's processes end, too."""
    os.killpg(child.pid, signal.SIGINT)
    try:
        child.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _on_gpu(data: Path, minutes: float, again: bool) -> None:
    import torch

    gpus, ends = torch.cuda.device_count(), time.monotonic() + 60 * minutes
    out = RESULTS if gpus else RESULTS / "quick" / "gpu"
    if again or not gpus:
        (out / "gpu.json").unlink(missing_ok=True)
    if not gpus:
        print("There is no GPU: a stand-in runs on the CPU, to show that everything does. Its numbers say nothing.")

    def do(step: Bench) -> str:
        seconds = max(1.0, min(PIECE_SECONDS, ends - time.monotonic()))
        child = subprocess.Popen(**_how(step, data, out), start_new_session=True)
        try:
            status = child.wait(seconds)
        except subprocess.TimeoutExpired:
            _stop(child)  # the rows written so far are kept
            return f"cut short after {seconds:.0f} s" if seconds >= PIECE_SECONDS else ""
        return "done" if status == 0 else f"failed with status {status}"

    device = f"{gpus} x {torch.cuda.get_device_name()}" if gpus else "no GPU"
    steps, log = ON_GPU if gpus else STAND_IN, out / "gpu.json"
    waiting = resume(steps, device, log, do, lambda: time.monotonic() < ends, lambda name: not (data / name).exists())
    if gpus:
        write_page()
    if waiting:
        print(f"waiting for the next call: {', '.join(waiting)}")


def main() -> None:
    """Run everything and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(DEFAULT_DATA))
    parser.add_argument("--gpu", action="store_true", help="all that waits for a GPU")
    parser.add_argument("--minutes", type=float, default=30.0, help="on a GPU, after which nothing begins or goes on")
    parser.add_argument("--again", action="store_true", help="on a GPU, do also what is done")
    given = parser.parse_args()
    if given.gpu:
        _on_gpu(given.data, given.minutes, given.again)
        return
    out = RESULTS / "quick"
    run(STEPS, given.data, out)
    page = out / "RESULTS.md"
    page.write_text(render(out, "."))
    print(f"wrote {page}")


if __name__ == "__main__":
    main()
