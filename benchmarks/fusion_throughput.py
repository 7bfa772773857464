"""Fused trials against the same trials one after another: forward, backward and update on one CPU.

    python -m benchmarks.fusion_throughput --threads 2 --trials 1 8 32 128

Each pair of timings is taken in turns in one process: a group's trials one after another in eager mode under
`torch.optim`, then the group fused. A speedup is the median of the pairs' ratios, so a machine that is busy with
other work slows both sides of a pair.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks.fusion_cases import CASES, Case
from fusion import fuse, fused_optimizer, optimizer
from fusion.memory import keep_freed_memory
from fusion.plan import FusionPlan
from fusion.probe import plan_fusion

RESULTS = Path(__file__).parent / "results"
SEED = 0
MIN_PAIRS = 5
# Each trial, and each group, takes its steps in a row, as it would in training: its weights are then in cache.
STEPS = 2

Pass = Callable[[], None]


@dataclass
class Row:
    """A case at a number of trials: the plan, and medians over pairs; times in milliseconds per trial and step."""

    case: str
    trials: int
    groups: list[int]
    planned: dict[int, float]
    pairs: int
    speedup: float
    quartiles: tuple[float, float]
    ms_alone: float
    ms_fused: float
    load: float
    jax: str = "not installed"
    ratios: list[float] = field(default_factory=list, repr=False)


def measure(case: Case, trials: int, seconds: float, threads: int) -> Row:
    """Plan the groups, then time pairs of passes for about `seconds`."""
    modules, configs = case.trials(trials, SEED)
    batch = case.batch(torch.Generator().manual_seed(SEED))
    plan = plan_fusion(modules, configs, case.loss, batch, max_width=64, seconds=seconds / 5)
    sizes = plan.groups(trials)
    pairs = list(_pairs(case, modules, configs, batch, sizes))
    alone, fused = _race(pairs, seconds)
    ratios = [a / f for a, f in zip(alone, fused)]
    at = [sizes[i % len(sizes)] * STEPS for i in range(len(ratios))]
    return Row(
        case=case.name,
        trials=trials,
        groups=sizes,
        planned=_speedups(plan),
        pairs=len(ratios),
        speedup=statistics.median(ratios),
        quartiles=_quartiles(ratios),
        ms_alone=1e3 * statistics.median(t / n for t, n in zip(alone, at)),
        ms_fused=1e3 * statistics.median(t / n for t, n in zip(fused, at)),
        load=os.getloadavg()[0],
        jax=jax_speedup(case, trials, alone, at, threads),
        ratios=[round(r, 3) for r in ratios],
    )


def _speedups(plan: FusionPlan) -> dict[int, float]:
    return {K: round(rate / plan.throughput[1], 2) for K, rate in plan.throughput.items()}


def _quartiles(ratios: Sequence[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(ratios, n=4)
    return low, high


def _pairs(
    case: Case, modules: Sequence[Any], configs: Sequence[dict[str, Any]], batch: Any, sizes: Sequence[int]
) -> list[tuple[Pass, Pass]]:
    """For each group: its trials one after another, and the group at once (which is the same at size 1)."""
    pairs, start = [], 0
    for size in sizes:
        at = slice(start, start + size)
        alone = _one_after_another(case, modules[at], configs[at], batch)
        pairs.append((alone, _fused(case, modules[at], configs[at], batch) if size > 1 else alone))
        start += size
    return pairs


def _one_after_another(case: Case, modules: Sequence[Any], configs: Sequence[dict[str, Any]], batch: Any) -> Pass:
    trials = [(module, optimizer(module, config)) for module, config in zip(modules, configs)]

    def run() -> None:
        for module, update in trials:
            for _ in range(STEPS):
                update.zero_grad()
                case.loss(module, batch).backward()
                update.step()

    return run


def _fused(case: Case, modules: Sequence[Any], configs: Sequence[dict[str, Any]], batch: Any) -> Pass:
    fused = fuse(modules)
    update = fused_optimizer(fused, configs)

    def run() -> None:
        for _ in range(STEPS):
            update.zero_grad()
            fused.map(case.loss, batch).sum().backward()
            update.step()

    return run


def _race(pairs: Sequence[tuple[Pass, Pass]], seconds: float) -> tuple[list[float], list[float]]:
    for alone, fused in pairs:
        alone(), fused()
    times: tuple[list[float], list[float]] = ([], [])
    start = time.perf_counter()
    while len(times[0]) < MIN_PAIRS or time.perf_counter() - start < seconds:
        for run, out in zip(pairs[len(times[0]) % len(pairs)], times):
            begin = time.perf_counter()
            run()
            out.append(time.perf_counter() - begin)
    return times


def jax_speedup(case: Case, trials: int, alone: Sequence[float], at: Sequence[int], threads: int) -> str:
    """What `jax.jit(jax.vmap(...))` makes of all trials at once, against the same eager torch; the MLP only."""
    if case.name != "mlp":
        return "not written"
    try:
        from benchmarks.fusion_jax import seconds_per_step
    except ImportError:
        return "not installed"
    alone_per_trial = statistics.median(t / n for t, n in zip(alone, at))
    return f"{alone_per_trial * trials / seconds_per_step(trials):.1f}"


def environment(threads: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """What a reader needs to judge or repeat the numbers."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seed": SEED,
        "steps_in_a_row": STEPS,
        "keep_freed_memory": True,
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "default"),
        "arguments": {name: value for name, value in vars(arguments).items() if name != "out"},
        "cases": {case.name: case.config for case in CASES},
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")


def render(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    env, rows = result["environment"], result["rows"]
    lines = [
        "# Fused trials against one after another, CPU",
        "",
        f"{env['date']}; {env['cpu']}, {env['cores']} cores, {env['threads']} threads; "
        f"Python {env['python']}, torch {env['torch']}; seed {env['seed']}.",
        "",
        "Speedup: median over pairs of (time of a group's trials one after another) / (time of the group fused), "
        "whole steps, in groups of the planner's choice; quartiles in brackets. Load: of the machine while measured, "
        f"1-minute average; above {env['threads']} other work ran beside it.",
        "",
        "| model (batch) | trials | groups | speedup | to reach at 32 | ms alone | ms fused | pairs | load | JAX |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    cases = {case.name: case for case in CASES}
    for row in rows:
        low, high = row["quartiles"]
        case, groups = cases[row["case"]], row["groups"]
        target = f"{case.target}" if row["trials"] == 32 else ""
        lines.append(
            f"| {case.title} | {row['trials']} | {len(groups)} of {max(groups)} | {row['speedup']:.2f} "
            f"[{low:.2f}, {high:.2f}] | {target} | {row['ms_alone']:.2f} | {row['ms_fused']:.2f} | "
            f"{row['pairs']} | {row['load']:.1f} | {row['jax']} |"
        )
    lines += ["", "What the planner measured, speedup by width:", ""]
    lines += [f"- {row['case']}, {row['trials']} trials: {row['planned']}" for row in rows]
    return "\n".join([*lines, "", *result.get("notes", [])]).rstrip() + "\n"


def main() -> None:
    """Measure, and write `fusion_throughput.json` and `.md`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=[case.name for case in CASES])
    parser.add_argument("--trials", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="for each row")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    rows: list[dict[str, Any]] = []
    for case in (case for case in CASES if case.name in arguments.cases):
        for trials in arguments.trials:
            row = measure(case, trials, arguments.seconds, arguments.threads)
            print(row, flush=True)
            rows.append(asdict(row))
    result = {"environment": environment(arguments.threads, arguments), "rows": rows}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "fusion_throughput.json").write_text(json.dumps(result, indent=1) + "\n")
    (arguments.out / "fusion_throughput.md").write_text(render(result))


if __name__ == "__main__":
    main()
