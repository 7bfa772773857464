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
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from benchmarks.fusion_cases import CASES, Case
from benchmarks.result_files import Row, columns, environment, options, read, save, texts
from fusion import fuse, fused_optimizer, plan_fusion
from fusion.optim import optimizer
from fusion.width import keep_freed_memory

FILE = "fusion_throughput.json"
SEED = 0
MIN_PAIRS = 5
# A trial or group takes this number of steps in a row, as in training, so that its weights are in the cache.
STEPS = 5
COLUMNS = ["model (batch)", "trials", "groups", "speedup, wall", "speedup, CPU", "ms alone", "ms fused"]
COLUMNS += ["pairs", "load", "JAX"]

Pass = Callable[[], None]


def measure(case: Case, trials: int, seconds: float, jax: str) -> Row:
    """Plan the groups, then time pairs of passes for about `seconds`. Milliseconds are per trial and step."""
    modules, configs = case.trials(trials, SEED)
    batch = case.batch(torch.Generator().manual_seed(SEED))
    plan = plan_fusion(modules, configs, case.loss, batch, max_width=64, seconds=seconds / 5)
    sizes = plan.groups(trials)
    alone, fused = _race(list(_pairs(case, modules, configs, batch, sizes)), seconds)
    ratios, cpu_ratios = ([a[clock] / f[clock] for a, f in zip(alone, fused)] for clock in range(2))
    at = [sizes[i % len(sizes)] * STEPS for i in range(len(ratios))]
    return {
        "case": case.name,
        "trials": trials,
        "groups": sizes,
        "planned": {K: round(rate / plan.throughput[1], 2) for K, rate in plan.throughput.items()},
        "pairs": len(ratios),
        "speedup": statistics.median(ratios),
        "quartiles": statistics.quantiles(ratios, n=4)[::2],
        "ms_alone": 1e3 * statistics.median(t.wall / n for t, n in zip(alone, at)),
        "ms_fused": 1e3 * statistics.median(t.wall / n for t, n in zip(fused, at)),
        "cpu_speedup": statistics.median(cpu_ratios),
        "cpu_quartiles": statistics.quantiles(cpu_ratios, n=4)[::2],
        "load": os.getloadavg()[0],
        "jax": jax,
        "ratios": [round(r, 3) for r in ratios],
    }


def _pairs(
    case: Case, modules: Sequence[Any], configs: Sequence[dict[str, Any]], batch: Any, sizes: Sequence[int]
) -> list[tuple[Pass, Pass]]:
    """Return, for each group, a pass of its trials one after another and a fused pass. At size 1, both are the same."""
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
    """Seconds of one pass: wall time, and CPU time over all threads."""

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
    """Run one pass, and return its times."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return Times(time.perf_counter() - wall, time.process_time() - cpu)


def render(result: Row) -> str:
    """Return the result as Markdown."""
    env, rows, cases = result["environment"], [], {case.name: case for case in CASES}
    for row in result["rows"]:
        case, groups = cases[row["case"]], row["groups"]
        cells = [case.title, row["trials"], f"{len(groups)} of {max(groups)}"]
        for clock in ("", "cpu_"):
            low, high = row[f"{clock}quartiles"]
            cells.append(f"{row[f'{clock}speedup']:.2f} [{low:.2f}, {high:.2f}]")
        cells += [f"{row['ms_alone']:.2f}", f"{row['ms_fused']:.2f}"]
        rows.append([*cells, row["pairs"], f"{row['load']:.1f}", row["jax"]])
    planned = []
    for row in result["rows"]:
        speedups = ", ".join(f"{width}: {speedup}" for width, speedup in row["planned"].items())
        planned.append(f"- {row['case']}, {row['trials']} trials: {speedups}")
    where = f"{env['date']}; {env['cpu']}, {env['cores']} cores, {env['threads']} threads; "
    where += f"Python {env['python']}, torch {env['torch']}; seed {env['seed']}."
    told = texts("fusion_throughput")["head"].replace("{threads}", str(env["threads"]))
    parts = ["# Fused trials against one after another, CPU", where, told, columns(COLUMNS, rows)]
    return "\n\n".join([*parts, "Speedup by width, as the planner measured it:", "\n".join(planned)]) + "\n"


def _write(rows: Sequence[Row], arguments: argparse.Namespace) -> None:
    order = [case.name for case in CASES]
    where = environment(
        "torch",
        threads=arguments.threads,
        seed=SEED,
        steps_in_a_row=STEPS,
        keep_freed_memory=True,
        OMP_WAIT_POLICY=os.environ.get("OMP_WAIT_POLICY", "default"),
        arguments={name: value for name, value in vars(arguments).items() if name != "out"},
        cases={case.name: case.config for case in CASES},
    )
    ordered = sorted(rows, key=lambda row: (order.index(row["case"]), row["trials"]))
    result = {"environment": where, "rows": ordered}
    save(arguments.out / FILE, result, render(result))


def main() -> None:
    """Measure, and write `fusion_throughput.json` and `.md`."""
    parser = options(__doc__)
    parser.add_argument("--cases", nargs="+", default=[case.name for case in CASES])
    parser.add_argument("--trials", nargs="+", type=int, default=[32, 8, 1, 128])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="for each row")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    earlier = read(arguments.out / FILE, {"rows": []})["rows"]
    by_jax = {(row["case"], row["trials"]): row["jax"] for row in earlier}  # JAX times are kept
    rows: list[Row] = []
    for trials in arguments.trials:
        for case in (case for case in CASES if case.name in arguments.cases):
            rows.append(measure(case, trials, arguments.seconds, by_jax.get((case.name, trials), "not measured")))
            print(rows[-1], flush=True)
            _write(rows, arguments)


if __name__ == "__main__":
    main()
