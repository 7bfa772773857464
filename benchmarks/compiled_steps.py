"""Compiled fused steps against the same steps as they are written: forward, backward and update on one core.

    python -m benchmarks.compiled_steps [--trials 8 32] [--seconds 5] [--out FOLDER]

Timings are taken in turns in one process; a speedup is the median of the pairs' ratios. Compiling is measured with an
empty cache of torch's compiler, then with what that left there, as another process of the same search finds it.
It rewrites `compiled_steps.{json,md}` in `benchmarks/results`, or in another folder.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Sequence

import torch

from benchmarks.fusion_cases import CASES, Case
from benchmarks.result_files import Row, columns, environment, options, save
from fusion.graph import GraphWarning
from fusion.width import keep_freed_memory
from fusion.width.probe import compiled_speedup

FILE = "compiled_steps.json"
SEED = 0


def measure(case: Case, trials: int, seconds: float) -> Row:
    """One group: how much faster it is once compiled, what that takes, and from how many steps on it is less."""
    modules, configs = case.trials(trials, SEED)
    batch = case.batch(torch.Generator().manual_seed(SEED))
    row: Row = {"case": case.name, "trials": trials}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", GraphWarning)
        first = compiled_speedup(modules, configs, case.loss, batch, seconds=seconds)
        if told:
            return {**row, "refusal": str(told[0].message)}
        again = compiled_speedup(modules, configs, case.loss, batch, seconds=seconds)
    won = first.seconds * (1 - 1 / first.speedup)
    return {
        **row,
        "speedup": first.speedup,
        "speedup_again": again.speedup,
        "ms_as_written": 1e3 * first.seconds,
        "compile_seconds": [first.compile_seconds, again.compile_seconds],
        "pays_from_steps": round(first.compile_seconds / won) if won > 0 else None,
    }


def markdown(result: Row) -> str:
    """A table with a line for each group."""
    where, titles = result["environment"], {case.name: case.title for case in CASES}
    rows = []
    for row in result["rows"]:
        cells = [titles[row["case"]], row["trials"]]
        if "refusal" in row:
            rows.append([*cells, "", f"not compiled: {row['refusal']}", "", ""])
            continue
        (first, again), steps = row["compile_seconds"], row["pays_from_steps"]
        cells += [f"{row['ms_as_written']:.1f}", f"{row['speedup']:.2f}x, {row['speedup_again']:.2f}x"]
        rows.append([*cells, f"{first:.0f}, {again:.0f}", f"{steps:,} steps" if steps else "never"])
    compiling = "seconds to compile, and again from torch's cache"
    names = ["model (batch)", "trials", "ms as written", "speedup", compiling, "takes less time from"]
    return f"""# Compiled steps

{where["cpu"]}, one core, torch {where["torch"]}, {where["date"]}, load {where["load"]}. Rerun: \
`{where["command"]}`. A step is forward, backward and update of a fused group; a speedup is of the compiled \
step over the same as it is written, measured twice. `tune` compiles where this wins twice the time that it \
takes by a group's next milestone.

{columns(names, rows)}
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all cases and write the files."""
    parser = options(__doc__)
    parser.add_argument("--cases", nargs="+", default=["mlp", "transformer", "conv", "resnet18"])
    parser.add_argument("--trials", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--seconds", type=float, default=5.0)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    keep_freed_memory()
    where, rows = environment("torch", command="python -m benchmarks.compiled_steps"), []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        for case in CASES:
            for trials in asked.trials if case.name in asked.cases else ():
                rows.append(measure(case, trials, asked.seconds))
                print(rows[-1], flush=True)
    result = {"environment": where, "rows": rows}
    save(asked.out / FILE, result, markdown(result))


if __name__ == "__main__":
    main()
