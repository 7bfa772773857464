"""Everything that waits for a GPU, by one command that goes on where it was.

    python -m benchmarks.bench_gpu --minutes 30

Each piece takes 8 minutes at most and is done once a device: `results/gpu.json` says which are, when and on what. A
call ends after its minutes, and what it was at is begun again by the next: several short calls do what one long one
does (`--again` forgets). Result files are those of each benchmark, with hardware and date. Without a GPU its stand-in
runs to the end: the same code on small cases on the CPU, into `results/quick/gpu/`, which git ignores.
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
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.result_files import DEFAULT_DATA, RESULTS
from benchmarks.results_page import main as write_page

PIECE_MINUTES = 8.0


@dataclass(frozen=True)
class Piece:
    """A benchmark in part.

    Attributes:
        command: Module and options; `{out}` is the folder of results.
        needs: A file below the folder of data sets, without which it is left out; "" where it needs none.
    """

    name: str
    command: str
    needs: str = ""
    gpus: int = 1


_FUSION = [
    Piece(f"fused {case}, {precision}", f"fusion_cuda --cases {case} --precisions {precision} --out {{out}}")
    for case in ("mlp", "transformer", "resnet18")
    for precision in ("tf32", "bf16")
]
_TASKS = {"cifar10_resnet18": "cifar10/cifar10_jpeg.npz", "shakespeare_gpt": "tinyshakespeare/input.txt"}
_AGAINST_ASHA = [
    Piece(f"{task}, {method}", f"vs_asha --tasks {task} --methods {method} --seeds 0 --out {{out}}/vs_asha", needs)
    for task, needs in _TASKS.items()
    for method in ("tune", "ray_asha")
]
PIECES = (*_FUSION, *_AGAINST_ASHA)
"""Those that say most in the least time come first."""

STAND_IN = (
    Piece(
        "fused mlp, stand-in", "fusion_cuda --device cpu --cases mlp --precisions fp32 --widths 1 8 --out {out}", gpus=0
    ),
    Piece(
        "digits, stand-in",
        "vs_asha --quick --tasks digits --methods tune ray_asha --seeds 0 --data {out} --out {out}/vs_asha",
        gpus=0,
    ),
)
"""The same code where there is no GPU."""


def run(
    pieces: Sequence[Piece],
    device: str,
    gpus: int,
    log: Path,
    do: Callable[[Piece], str],
    may_begin: Callable[[], bool],
    missing: Callable[[str], bool],
) -> list[str]:
    """Do what is not done yet.

    Args:
        device: What they run on; on another one they are done anew.
        do: Does a piece, and says how that ended; "" where it is to be done again.

    Returns:
        Names of the pieces that wait for the next call.
    """
    done: dict[str, Any] = json.loads(log.read_text()) if log.exists() else {}
    waiting = []
    for piece in pieces:
        if done.get(piece.name, {}).get("device") == device:
            continue
        if not may_begin():
            waiting.append(piece.name)
            continue
        began = time.monotonic()
        if piece.gpus > gpus:
            ended = f"left out: it needs {piece.gpus} GPUs"
        elif piece.needs and missing(piece.needs):
            ended = f"left out: {piece.needs} is missing"
        else:
            ended = do(piece)
        if not ended:
            waiting.append(piece.name)
            continue
        date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        seconds = round(time.monotonic() - began)
        done[piece.name] = {"device": device, "date": date, "seconds": seconds, "ended": ended}
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(json.dumps(done, indent=1) + "\n")
        print(f"{seconds} s: {piece.name}: {ended}", flush=True)
    return waiting


def _stop(child: subprocess.Popen[bytes]) -> None:
    """End a benchmark and its own processes; as by Ctrl-C, so that Ray's end, too."""
    os.killpg(child.pid, signal.SIGINT)
    try:
        child.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def main() -> None:
    """Run what is left, and draw the page of results again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="after which no piece begins, nor any goes on")
    parser.add_argument("--again", action="store_true", help="do also what is done")
    parser.add_argument("--data", type=Path, default=Path(DEFAULT_DATA))
    given = parser.parse_args()
    ends = time.monotonic() + 60 * given.minutes
    gpus = torch.cuda.device_count()
    device = f"{gpus} x {torch.cuda.get_device_name()}" if gpus else "no GPU"
    out = RESULTS if gpus else RESULTS / "quick" / "gpu"
    log = out / "gpu.json"
    if given.again or not gpus:
        log.unlink(missing_ok=True)
    if not gpus:
        print("There is no GPU: a stand-in runs on the CPU, to show that everything does. Its numbers say nothing.")

    def do(piece: Piece) -> str:
        module, *options = piece.command.format(out=out).split()
        environment = {**os.environ, "HYDRO_RASDA_DATA": str(given.data.resolve())}
        seconds = max(1.0, min(60 * PIECE_MINUTES, ends - time.monotonic()))
        command = [sys.executable, "-m", f"benchmarks.{module}", *options]
        child = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            status = child.wait(seconds)
        except subprocess.TimeoutExpired:
            _stop(child)  # what it has written so far stays
            return f"cut short after {seconds:.0f} s" if seconds >= 60 * PIECE_MINUTES else ""
        return "done" if status == 0 else f"failed with status {status}"

    waiting = run(
        PIECES if gpus else STAND_IN,
        device,
        gpus,
        log,
        do,
        lambda: time.monotonic() < ends,
        lambda name: not (given.data / name).exists(),
    )
    if gpus:
        write_page()
    if waiting:
        print(f"waiting for the next call: {', '.join(waiting)}")


if __name__ == "__main__":
    main()
