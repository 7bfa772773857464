"""Fused trials against the same trials one after another: forward, backward and update on one CPU.

    python -m benchmarks.fusion_throughput --threads 2 --trials 32 8 1 128

Each pair of timings is taken in turns in one process: a group's trials one after another in eager mode under
`torch.optim`, then the group fused. A speedup is the median of the pairs' ratios, so a machine that is busy with
other work slows both sides of a pair. It is given twice: of wall time, and of CPU time over all threads, which waiting
for a busy core does not lengthen. OMP_WAIT_POLICY=passive keeps waiting threads from spinning, and out of CPU time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.fusion_cases import CASES, Case
from benchmarks.result_files import environment, options, save
from fusion import fuse, fused_optimizer, plan_fusion
from fusion.optim import optimizer
from fusion.width import FusionPlan, keep_freed_memory

SEED = 0
MIN_PAIRS = 5
IN_JAX = ("mlp", "transformer", "conv")
# Each trial, and each group, takes its steps in a row, as it would in training: its weights are then in cache.
STEPS = 5
COLUMNS = [
    "model (batch)",
    "trials",
    "groups",
    "speedup, wall",
    "speedup, CPU",
    "to reach at 32",
    "ms alone",
    "ms fused",
    "pairs",
    "load",
    "JAX",
]

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
    cpu_speedup: float
    cpu_quartiles: tuple[float, float]
    load: float
    jax: str = "not measured"
    ratios: list[float] = field(default_factory=list, repr=False)


def measure(case: Case, trials: int, seconds: float, jax: str | None) -> Row:
    """Plan the groups, then time pairs of passes for about `seconds`."""
    modules, configs = case.trials(trials, SEED)
    batch = case.batch(torch.Generator().manual_seed(SEED))
    plan = plan_fusion(modules, configs, case.loss, batch, max_width=64, seconds=seconds / 5)
    sizes = plan.groups(trials)
    pairs = list(_pairs(case, modules, configs, batch, sizes))
    alone, fused = _race(pairs, seconds)
    ratios = [a.wall / f.wall for a, f in zip(alone, fused)]
    cpu_ratios = [a.cpu / f.cpu for a, f in zip(alone, fused)]
    at = [sizes[i % len(sizes)] * STEPS for i in range(len(ratios))]
    return Row(
        case=case.name,
        trials=trials,
        groups=sizes,
        planned=_speedups(plan),
        pairs=len(ratios),
        speedup=statistics.median(ratios),
        quartiles=quartiles(ratios),
        ms_alone=1e3 * statistics.median(t.wall / n for t, n in zip(alone, at)),
        ms_fused=1e3 * statistics.median(t.wall / n for t, n in zip(fused, at)),
        cpu_speedup=statistics.median(cpu_ratios),
        cpu_quartiles=quartiles(cpu_ratios),
        load=os.getloadavg()[0],
        jax=jax_speedup(case, trials, alone, at, jax),
        ratios=[round(r, 3) for r in ratios],
    )


def _speedups(plan: FusionPlan) -> dict[int, float]:
    return {K: round(rate / plan.throughput[1], 2) for K, rate in plan.throughput.items()}


def quartiles(ratios: Sequence[float]) -> tuple[float, float]:
    """The first and the third."""
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
        pairs.append((alone, _all_at_once(case, modules[at], configs[at], batch) if size > 1 else alone))
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


def _all_at_once(case: Case, modules: Sequence[Any], configs: Sequence[dict[str, Any]], batch: Any) -> Pass:
    fused = fuse(modules)
    update = fused_optimizer(fused, configs)

    def run() -> None:
        for _ in range(STEPS):
            update.zero_grad()
            fused.map(case.loss, batch).sum().backward()
            update.step()

    return run


class Times(NamedTuple):
    """Seconds of one pass: on the clock, and of CPU time over all threads."""

    wall: float
    cpu: float


def _race(pairs: Sequence[tuple[Pass, Pass]], seconds: float) -> tuple[list[Times], list[Times]]:
    for alone, fused in pairs:
        alone(), fused()
    times: tuple[list[Times], list[Times]] = ([], [])
    start = time.perf_counter()
    while len(times[0]) < MIN_PAIRS or time.perf_counter() - start < seconds:
        for run, out in zip(pairs[len(times[0]) % len(pairs)], times):
            out.append(timed(run))
    return times


def timed(run: Pass) -> Times:
    """What one pass takes."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return Times(time.perf_counter() - wall, time.process_time() - cpu)


def jax_speedup(case: Case, trials: int, alone: Sequence[Times], at: Sequence[int], python: str | None) -> str:
    """What `jax.jit(jax.vmap(...))` makes of all trials at once, against the same eager torch.

    Args:
        python: An interpreter with JAX, which runs `fusion_jax.py` on as many cores as torch has threads.
    """
    if case.name not in IN_JAX:
        return "not written"
    if python is None:
        return "not measured"
    script = [Path(__file__).parent / "fusion_jax.py", case.name, str(trials), "--threads", torch.get_num_threads()]
    done = subprocess.run([python, *map(str, script)], capture_output=True, text=True, check=True)
    alone_per_trial = statistics.median(t.wall / n for t, n in zip(alone, at))
    return f"{alone_per_trial * trials / float(done.stdout):.2f}"


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
        "whole steps, in groups of the planner's choice; quartiles in brackets. JAX: the time one after another over "
        "that of `jax.jit(jax.vmap(...))` of all trials in a process of its own. Load: of the machine while measured, "
        f"1-minute average; above {env['threads']} other work ran beside it.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
    ]
    cases = {case.name: case for case in CASES}
    for row in rows:
        case, groups = cases[row["case"]], row["groups"]
        cells = [case.title, row["trials"], f"{len(groups)} of {max(groups)}"]
        cells += [spread(row["speedup"], row["quartiles"]), spread(row["cpu_speedup"], row["cpu_quartiles"])]
        cells += [case.target if row["trials"] == 32 else "", f"{row['ms_alone']:.2f}", f"{row['ms_fused']:.2f}"]
        cells += [row["pairs"], f"{row['load']:.1f}", row["jax"]]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "Speedup by width, as the planner measured it:", ""]
    for row in rows:
        planned = ", ".join(f"{width}: {speedup}" for width, speedup in row["planned"].items())
        lines.append(f"- {row['case']}, {row['trials']} trials: {planned}")
    return "\n".join([*lines, "", *result.get("notes", [])]).rstrip() + "\n"


def spread(median: float, quartiles: Sequence[float]) -> str:
    """A median with its quartiles."""
    return f"{median:.2f} [{quartiles[0]:.2f}, {quartiles[1]:.2f}]"


def _write(rows: Sequence[Row], arguments: argparse.Namespace) -> None:
    order = [case.name for case in CASES]
    ordered = sorted(rows, key=lambda row: (order.index(row.case), row.trials))
    where = environment(
        "torch",
        threads=arguments.threads,
        seed=SEED,
        steps_in_a_row=STEPS,
        keep_freed_memory=True,
        OMP_WAIT_POLICY=os.environ.get("OMP_WAIT_POLICY", "default"),
        arguments={name: value for name, value in vars(arguments).items() if name not in ("out", "jax")},
        cases={case.name: case.config for case in CASES},
    )
    result = {"environment": where, "rows": [asdict(row) for row in ordered]}
    save(arguments.out / "fusion_throughput.json", result, render(result))


def main() -> None:
    """Measure, and write `fusion_throughput.json` and `.md`."""
    parser = options(__doc__)
    parser.add_argument("--cases", nargs="+", default=[case.name for case in CASES])
    parser.add_argument("--trials", nargs="+", type=int, default=[32, 8, 1, 128])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="for each row")
    parser.add_argument("--jax", metavar="PYTHON", help="an interpreter with JAX, to train the same models there")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    rows: list[Row] = []
    for trials in arguments.trials:
        for case in (case for case in CASES if case.name in arguments.cases):
            rows.append(measure(case, trials, arguments.seconds, arguments.jax))
            print(rows[-1], flush=True)
            _write(rows, arguments)


if __name__ == "__main__":
    main()
