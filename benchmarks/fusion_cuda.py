"""ResNet-18 of width 1/8 on CIFAR-sized images, batch 256, on a GPU: K fused trials against the full width alone.

    python -m benchmarks.fusion_cuda
    python -m benchmarks.fusion_cuda --ways compile --widths 32    compiling takes about a minute a width

Hydro (Hu et al. 2023) reports 8.3x at K = 25 and 16.6x at K = 220 on an RTX 3090. Beside each time stand the achieved
FLOP/s and bytes/s, and what the same card reaches in a large matrix product and a large copy. The operators' inputs
and outputs are counted as bytes: what caches save and what kernels reread is not in them.

A run that was cut short goes on where it was: rows of the same device and torch stay in the result file.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.fusion_cases import CASES, SGD, Case, classify, images, resnet18
from benchmarks.result_files import Row, columns, environment, options, read, save
from fusion import FusedModel, GraphedStep, fuse, fused_optimizer
from fusion.optim import optimizer

SEED = 0
BATCH = 256
NARROW = ("mlp", "transformer", "resnet18")
"""The cases that are fused, by name."""
HOW = {"eager": "eager", "graph": "whole step as a CUDA graph", "compile": "torch.compile of the objective"}

WARM_UP = 5
"""Steps before the measurement. By then, a step is recorded as a CUDA graph if it can be."""


@dataclass
class TimedStep:
    """A step on one batch. If there is a `graph`, it runs the step as a recorded CUDA graph."""

    learn: Callable[[Any], None]
    batch: Any
    graph: GraphedStep | None

    def __call__(self) -> None:
        (self.graph or self.learn)(self.batch)


class WorkCounter(TorchDispatchMode):
    """Sum up the FLOP of all operators, and the sizes of their inputs and outputs.

    Torch's `FlopCounterMode` also tracks modules, which fails inside `torch.func.vmap`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (formula := flop_registry.get(func._overloadpacket)) is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        if not func.is_view:
            tensors = (t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor))
            self.bytes += sum(t.nbytes for t in tensors)
        return result


def cases() -> list[tuple[Case, Case]]:
    """Return pairs of the case that is fused and the case that trains alone; for small models, both are the same."""
    resnet = Case("resnet18", "ResNet-18", resnet18, images(BATCH, 3, 32, 32), classify, SGD)
    others = [case for case in CASES if case.name in ("mlp", "transformer")]
    return [(resnet, replace(resnet, make=lambda: resnet18(64))), *((case, case) for case in others)]


def measure(
    narrow: Case, wide: Case, plan: Sequence[tuple[int, str]], precision: str, device: torch.device, before: list[Row]
) -> Iterator[Row]:
    """Measure the full-width model alone, then K fused models, for each (K, way to run a step) of `plan`.

    Rows that were measured `before` are not measured again. Seconds are those of a step of all members. `gain` is the
    time of the full-width model alone over the time per fused trial.
    """
    batch, name = _to(narrow.batch(torch.Generator().manual_seed(SEED)), device), f"{narrow.name}, full width alone"
    known = {(row["case"], row["K"], row["how"]): row for row in before if row["precision"] == precision}
    alone = known.get((name, 1, "eager"))
    if alone is None:
        flops = _flops(wide, precision, device, batch)
        alone = {**_row(wide, 1, precision, "eager", device, batch, flops, fused=False), "case": name, "gain": 1.0}
        yield alone
    if missing := [(K, how) for K, how in plan if (narrow.name, K, how) not in known]:
        flops = _flops(narrow, precision, device, batch)
        for K, how in missing:
            row = _row(narrow, K, precision, how, device, batch, flops, fused=True)
            yield {**row, "gain": alone["seconds"] / (row["seconds"] / K) if row["seconds"] else 0.0}


def _flops(case: Case, precision: str, device: torch.device, batch: Any) -> int:
    """Count the operations of one member's step alone, because torch's formula overcounts grouped convolutions."""
    return _work(_step(case, 1, precision, "eager", device, batch, fused=False))[0]


def _row(
    case: Case, K: int, precision: str, how: str, device: torch.device, batch: Any, flops: int, *, fused: bool
) -> Row:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    start, numbers = time.perf_counter(), ("seconds", "gain", "flops_per_second", "bytes_per_second", "peak_bytes")
    row: Row = {"case": case.name, "precision": precision, "how": how, "K": K}
    row |= dict.fromkeys((*numbers, "setup_seconds"), 0.0) | {"error": ""}
    try:
        step = _step(case, K, precision, how, device, batch, fused=fused)
        for _ in range(WARM_UP):
            _synchronized(step, device)
        if step.graph is not None and not step.graph.recorded:
            return {**row, "error": f"not recorded: {step.graph.refusal}"}
    except Exception as error:  # a width or mode that the card refuses is a result; others still count
        return {**row, "error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    row["setup_seconds"] = time.perf_counter() - start
    row["seconds"] = seconds = _median_seconds(step, device)
    if device.type == "cuda":
        row["peak_bytes"] = torch.cuda.max_memory_reserved(device)  # this includes the memory of a recorded graph
    _, moved = _work(_step(case, K, precision, "eager", device, batch, fused=fused))
    return {**row, "flops_per_second": K * flops / seconds, "bytes_per_second": moved / seconds}


def _step(case: Case, K: int, precision: str, how: str, device: torch.device, batch: Any, *, fused: bool) -> TimedStep:
    modules, configs = case.trials(K, SEED)
    modules = [module.to(device) for module in modules]
    group: FusedModel | None = fuse(modules) if fused else None
    update: Any = fused_optimizer(group, configs) if group else optimizer(modules[0], configs[0])

    def losses(batch: Any) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            return group.map(case.loss, batch).sum() if group else case.loss(modules[0], batch)

    forward = torch.compile(losses) if how == "compile" else losses

    def learn(batch: Any) -> None:
        update.zero_grad()
        forward(batch).backward()
        update.step()

    return TimedStep(learn, batch, GraphedStep(learn, group, update) if how == "graph" and group else None)


def _work(step: Callable[[], None]) -> tuple[int, int]:
    """Count FLOP and bytes of one step, after a first step, which makes the optimizer's state."""
    step()
    with WorkCounter() as counted:
        step()
    return counted.flops, counted.bytes


def _synchronized(step: Callable[[], Any], device: torch.device) -> float:
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _median_seconds(step: Callable[[], Any], device: torch.device, repeats: int = 10) -> float:
    for _ in range(3):
        _synchronized(step, device)
    return statistics.median(_synchronized(step, device) for _ in range(repeats))


def _to(batch: Any, device: torch.device) -> Any:
    return tuple(t.to(device) for t in batch) if isinstance(batch, tuple) else batch.to(device)


def ceilings(device: torch.device, size: int = 8192) -> dict[str, float]:
    """Measure the FLOP/s that the card reaches in a large matrix product, by precision, and the bytes/s of a copy."""
    found = {}
    for name, dtype in (("fp32 or TF32", torch.float32), ("bf16", torch.bfloat16)):
        a = torch.randn(size, size, device=device, dtype=dtype)
        found[f"FLOP/s, {name}"] = 2 * size**3 / _median_seconds(partial(torch.mm, a, a), device)
    block = torch.empty(2**28, device=device)
    target = torch.empty_like(block)
    found["bytes/s, copy"] = 2 * block.nbytes / _median_seconds(partial(target.copy_, block), device)
    return found


def render(result: Row) -> str:
    """Return the result as Markdown."""
    env, rows = result["environment"], []
    parts = [
        "# Fused trials on a GPU",
        f"{env['date']}; {env['device']}; Python {env['python']}, torch {env['torch']}.",
    ]
    if not result["rows"]:
        return "\n\n".join([*parts, "**Not run: no GPU was at hand.** To run: `make bench-gpu`."]) + "\n"
    for row in result["rows"]:
        cells = [row["case"], row["precision"], row["how"], row["K"]]
        numbers = [f"{1e3 * row['seconds'] / row['K']:.3f}", f"{row['gain']:.1f}"]
        numbers += [f"{row['flops_per_second']:.3g}", f"{row['bytes_per_second']:.3g}"]
        numbers += [f"{row['peak_bytes'] / 2**30:.2f}", f"{row['setup_seconds']:.1f}"]
        rows.append([*cells, *([row["error"], *[""] * 5] if row["error"] else numbers)])
    names = ["case", "precision", "step", "K", "ms per trial", "gain", "FLOP/s", "bytes/s", "peak GiB", "set-up s"]
    parts.append(
        "Alone, a step runs as it is written: the host starts each kernel, and small kernels wait for it. The row of "
        "one fused trial as a CUDA graph shows what recording alone gains."
    )
    if measured := result["ceilings"]:
        parts.append("\n".join(f"- measured ceiling, {name}: {value:.3g}" for name, value in measured.items()))
    return "\n\n".join([*parts, columns(names, rows)]) + "\n"


def main() -> None:
    """Measure if there is a GPU, and write `fusion_cuda.json` and `.md` in any case."""
    parser = options(__doc__)
    parser.add_argument("--widths", nargs="+", type=int, default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--cases", nargs="+", default=list(NARROW))
    parser.add_argument("--precisions", nargs="+", default=["tf32", "bf16"], choices=["fp32", "tf32", "bf16"])
    parser.add_argument("--ways", nargs="+", default=["eager", "graph"], choices=list(HOW), help="to run a step")
    parser.add_argument("--device", default="cuda", help="cpu runs the same code, for a check of it")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    missing = device.type == "cuda" and not torch.cuda.is_available()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" and not missing else arguments.device
    device_name = "no GPU" if missing else name
    where = environment("torch", device=device_name, seed=SEED, batch=BATCH)
    path = arguments.out / "fusion_cuda.json"
    before = read(path)
    if before is None or any(before["environment"].get(key) != where[key] for key in ("device", "torch")):
        before = {"ceilings": {}, "rows": []}
    result: dict[str, Any] = {**before, "environment": where}
    save(path, result, render(result))
    if missing:
        return
    if device.type == "cuda" and not result["ceilings"]:
        result["ceilings"] = ceilings(device)
    ways = arguments.ways if device.type == "cuda" else ["eager"]
    plan = [(K, how) for K in arguments.widths for how in ways]
    for precision in arguments.precisions:
        torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
        torch.backends.cudnn.allow_tf32 = precision != "fp32"
        torch.backends.cudnn.benchmark = True
        for narrow, wide in (pair for pair in cases() if pair[0].name in arguments.cases):
            for row in measure(narrow, wide, plan, precision, device, list(result["rows"])):
                result["rows"].append(row)
                save(path, result, render(result))


if __name__ == "__main__":
    main()
