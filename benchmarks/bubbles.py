"""Trials in the bubbles of a pipeline, really run: what they cost the host, and what share of the bubbles they use.

    python -m benchmarks.bubbles 4 | 8 | sweep | page

The host is a transformer in 2 stages on 2 processes of one thread each, over gloo, under 1F1B. `4` and `8` say how many
micro-batches its steps have: there, steps with guests and without take turns within one run, and are
compared; then the same host trains without this library, and its losses must be the same.
`sweep` tunes an MLP on digits, 64 trials, wholly in the bubbles, and once more alone.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

import hydro_rasda
import hydro_rasda.bubbles
from benchmarks.result_files import Row, columns, environment, options, read, save, texts, versions

FILE = "bubbles.json"
WIDTH, TOKENS, LENGTH, EXAMPLES = 256, 64, 128, 4
PAIRS, WARM_UP, RUN, SECONDS = 5, 12, 4, 22.0


class Stage(nn.Module):
    """Two layers of a language model, and the embedding or the head."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        layers = [nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, batch_first=True) for _ in range(2)]
        self.embed = nn.Embedding(TOKENS, WIDTH) if rank == 0 else nn.Identity()
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(WIDTH, TOKENS) if rank == 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.layers(self.embed(x)))
        return y


class Host:
    """One rank of the host."""

    def __init__(self, rank: int, port: int, micro_batches: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        torch.manual_seed(rank)
        self.rank, self.losses = rank, list[float]()
        model = Stage(rank)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        stage = PipelineStage(model, rank, 2, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, micro_batches, lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten()))
        self._x = torch.randint(TOKENS, (micro_batches * EXAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))

    def step(self) -> float:
        """Do a step and its update, and return the seconds that they took."""
        began, losses = time.perf_counter(), list[Tensor]()
        self.schedule.step(*[self._x] if self.rank == 0 else [], target=self._x, losses=losses)
        self._optimizer.step()
        self._optimizer.zero_grad()
        seconds = time.perf_counter() - began
        self.losses += [loss.item() for loss in losses]
        return seconds

    def agree(self, value: float, operation: Any = dist.ReduceOp.MIN) -> float:
        """Reduce a value over the ranks, by default to the least."""
        values = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(values, operation)
        return float(values)


def compared(rank: int, port: int, micro_batches: int, source: Path, out: Path) -> None:
    """Train a host in blocks of steps, in turn with guests and without, and write the times of both."""
    host, rows = Host(rank, port, micro_batches), list[Row]()
    with hydro_rasda.bubbles.bubbles(host.schedule, source) as guest:
        while not host.agree(guest.working):
            host.step()
        seconds = [host.step() for _ in range(WARM_UP)]
        runs = 4 * round(host.agree(SECONDS / (4 * RUN * median(seconds))))
        for _ in range(PAIRS):
            pair = {beside: {"seconds": [], "waited": 0.0, "open": 0.0, "used": 0.0} for beside in ("with", "without")}
            for run in range(runs):
                guest.paused = run % 4 in (1, 2)  # with, without, without, with guests: neither is always first
                row: Row = pair["without" if guest.paused else "with"]
                before = guest.waited, guest.open, guest.used
                row["seconds"] += [host.step() for _ in range(RUN)]
                for name, now, earlier in zip(
                    ("waited", "open", "used"), (guest.waited, guest.open, guest.used), before
                ):
                    row[name] += now - earlier
            rows.append(pair)
    (out / f"{rank}.json").write_text(json.dumps({"rows": rows, "losses": host.losses}))
    dist.destroy_process_group()


def plain(rank: int, port: int, micro_batches: int, steps: int, out: Path) -> None:
    """Train the same host without this library, and write its losses."""
    host = Host(rank, port, micro_batches)
    for _ in range(steps):
        host.step()
    (out / f"{rank}.json").write_text(json.dumps({"losses": host.losses}))
    dist.destroy_process_group()


def until_over(rank: int, port: int, source: Path, over: Event) -> None:
    """Train a host until the sweep is over."""
    host = Host(rank, port, 4)
    with hydro_rasda.bubbles.bubbles(host.schedule, source):
        while host.agree(not over.is_set()):
            host.step()
    dist.destroy_process_group()


def ranks(target: Callable[..., None], *arguments: Any) -> list[Any]:
    """Start `target` in two processes, the ranks of a host."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    started = [spawn.Process(target=target, args=(rank, port, *arguments)) for rank in range(2)]
    for process in started:
        process.start()
    return started


def model_fn(config: dict[str, Any], width_ratio: float = 1.0) -> nn.Module:
    """Build an MLP for images of 8 x 8 pixels."""
    width = round(512 * width_ratio)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def tune(folder: str | Path, name: str, **arguments: Any) -> hydro_rasda.TuneResult:
    """Sweep classifiers of digits, in fused groups of 16."""
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    torch.set_num_threads(2)
    defaults: dict[str, Any] = {
        "space": {
            "lr": hydro_rasda.loguniform(1e-3, 1.0),
            "momentum": hydro_rasda.uniform(0.5, 0.95),
            "optimizer": "sgd",
            "batch_size": 64,
        },
        "train_data": (x[:1200], y[:1200]),
        "val_data": (x[1200:1500], y[1200:1500]),
        "num_samples": 64,
        "max_t": 9,
        "sweep": hydro_rasda.SweepConfig(fusion=16),
        "race": hydro_rasda.RaceConfig(top_k=2),
        "full_trainings": 0,
        "progress": False,
    }
    return hydro_rasda.tune(model_fn, storage_path=folder, name=name, **{**defaults, **arguments})


def for_ever(source: str, folder: str) -> None:
    """Sweep in the bubbles of the hosts that come to `source`, in a process of the lowest priority."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    rungs = hydro_rasda.SweepConfig(grace_period=3000, fusion=16)
    tune(folder, "sweep", max_t=9000, sweep=rungs, backend=hydro_rasda.bubbles.BubbleBackend(source))


def slowdown(micro_batches: int) -> Row:
    """Measure by how much guests slow a host, and which share of its bubbles they use."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        code = f"from benchmarks.bubbles import for_ever; for_ever({str(folder / 's')!r}, {name!r})"
        tuner = subprocess.Popen([sys.executable, "-c", code])
        try:
            for process in ranks(compared, micro_batches, folder / "s", folder):
                process.join()
        finally:
            tuner.kill()
            tuner.wait()
        found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    # Take the times of the first rank. Its backward pass comes last, so a step is over when it is over there.
    first: list[Row] = found[0]["rows"]
    pairs = [median(pair["with"]["seconds"]) / median(pair["without"]["seconds"]) for pair in first]
    means = [sum(pair["with"]["seconds"]) / sum(pair["without"]["seconds"]) for pair in first]
    kept = [pair["with"] for of in found for pair in of["rows"]]
    total = {name: sum(row[name] for row in kept) for name in ("waited", "open", "used")}
    return {
        "micro_batches": micro_batches,
        "steps": sum(len(row["seconds"]) for pair in first for row in pair.values()),
        "step_seconds": median(s for pair in first for s in pair["without"]["seconds"]),
        "pairs": pairs,
        "by_means": means,
        "bubble_share": total["waited"] / sum(sum(row["seconds"]) for row in kept),
        "open": total["open"] / total["waited"],
        "used": total["used"] / total["waited"],
        "losses": found[1]["losses"],
    }


def identical(row: Row) -> Row:
    """Replace the losses of a row by a flag: True if the host alone has the same losses, to the last bit."""
    losses = row.pop("losses")
    with tempfile.TemporaryDirectory() as name:
        for process in ranks(plain, row["micro_batches"], 60, Path(name)):
            process.join()
        alone = json.loads((Path(name) / "1.json").read_text())["losses"]
    return {**row, "compared_losses": len(alone), "identical": losses[: len(alone)] == alone}


def wholly_in_bubbles() -> Row:
    """Run a sweep of 64 trials alone, then in the bubbles, and compare times and results."""
    with tempfile.TemporaryDirectory() as name:
        folder, found = Path(name), {}
        over = multiprocessing.get_context("spawn").Event()
        for where in ("alone", "in bubbles"):
            hosts = ranks(until_over, folder / "s", over) if where == "in bubbles" else []
            began = time.perf_counter()
            with contextlib.ExitStack() as stack:
                stack.callback(over.set)
                backend = hydro_rasda.bubbles.BubbleBackend(folder / "s") if hosts else "local"
                result = tune(folder, where.replace(" ", "-"), backend=backend)
            found[where] = (time.perf_counter() - began, result.curves(), result.best_config, result.best_metric)
            if not hosts:
                over.clear()
            for host in hosts:
                host.join()
    (seconds, curves, *best), (seconds_there, curves_there, *best_there) = found.values()
    same = best == best_there and curves.equals(curves_there)
    return {"trials": 64, "alone_seconds": seconds, "bubbles_seconds": seconds_there, "identical": same}


def page(result: dict[str, Any]) -> str:
    """Return the tables as Markdown."""
    rows = []
    for part in (part for key, part in sorted(result.items()) if key != "sweep"):
        pairs = ", ".join(f"{100 * (pair - 1):+.1f}" for pair in part["pairs"])
        shares = f"{part['bubble_share']:.0%}", f"{1 / (part['micro_batches'] + 1):.0%}", f"{part['used']:.0%}"
        slower = f"{100 * (median(part['pairs']) - 1):+.1f} % ({pairs})"
        same = f"{'yes' if part['identical'] else 'no'}, {part['compared_losses']}"
        rows.append([part["micro_batches"], f"{1e3 * part['step_seconds']:.0f} ms", *shares, slower, same])
    names = ["micro-batches", "host's step", "bubbles", "in theory", "used", "host slower by (median, pairs)"]
    told = texts("bubbles")
    parts = [told["head"], columns([*names, "same losses"], rows)]
    if sweep := result.get("sweep"):
        alike = "yes" if sweep["identical"] else "no"
        parts.append(told["sweep"].format(**sweep, alike=alike))
    machines = [f"- {key}: {part['environment']}" for key, part in sorted(result.items())]
    return "\n\n".join([*parts, "Machines:", "\n".join(machines)]) + "\n"


def main() -> None:
    """Measure a part, and write the page."""
    parser = options(__doc__)
    parser.add_argument("part", choices=["4", "8", "sweep", "page"])
    arguments = parser.parse_args()
    file = arguments.out / FILE
    result = read(file, {})
    where = environment(versions=versions("torch", "ray", "numpy"))
    if arguments.part == "sweep":
        result["sweep"] = {**wholly_in_bubbles(), "environment": where}
    elif arguments.part != "page":
        result[arguments.part] = {**identical(slowdown(int(arguments.part))), "environment": where}
    save(file, result, page(result))
    print(page(result))


if __name__ == "__main__":
    from benchmarks.bubbles import main as importable  # guests cannot import a model from `__main__`

    importable()
