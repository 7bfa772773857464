"""What a search ten times as large costs: each row of the table before and after the work on it.

    python -m benchmarks.scale [row ...]

Rows that are named are measured again, all of them by default; the others stay as they were measured. "Before" is the
column of the code before this work. Result files: `results/scale.json` and, as a table, `scale.md`; then `python -m
benchmarks.results_page` draws `RESULTS.md` again. Each row has a function, which takes its sizes and returns numbers.
A row counts instead of timing if the time would drown in noise.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from benchmarks.fixed_costs import Numbers, imports, of_script, script
from benchmarks.ray_stand_in import StandInController
from benchmarks.result_files import columns, environment, options, read, save, texts, versions
from benchmarks.virtual_cluster import engine
from hydro_rasda import RaceConfig, SweepConfig, loguniform, tune
from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import Group, Span, Task, Widths
from hydro_rasda.data import Shard, make_batches
from hydro_rasda.heats.choose_groups import WaitingKind, next_groups
from hydro_rasda.history.history import History
from hydro_rasda.history.lines import JournalLine, metric_lines
from hydro_rasda.problem.objective import supervised
from hydro_rasda.problem.problem import Problem
from hydro_rasda.processes.child_count import ONE_PROCESS
from hydro_rasda.run.journal import JOURNAL, UNIT, encoded, read_units
from hydro_rasda.schedulers import RASDA
from hydro_rasda.settings.config import TuneConfig
from hydro_rasda.simulator import Cluster, CostModel, Plan, power_law, simulate
from hydro_rasda.training.group_training import train_group

FILE = "scale.json"
VERSIONS = versions("torch", "ray", "numpy")
CPU = torch.device("cpu")


def traces(trials: int) -> Numbers:
    """Count the symbolic traces that `tune` makes of a model without a width argument, if all trials are alike."""
    from torch.fx.experimental import symbolic_shapes

    init = symbolic_shapes.ShapeEnv.__init__
    with (
        mock.patch.object(symbolic_shapes.ShapeEnv, "__init__", autospec=True, side_effect=init) as made,
        mock.patch.dict(os.environ, {ONE_PROCESS: "1"}),  # traces can be counted only in this process
    ):
        _tune(_no_width_argument, trials, sweep=SweepConfig(surrogate=0.5, fusion=8))
    return {"traces": made.call_count}


def _no_width_argument(config: Mapping[str, Any]) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))


def dispatch(waiting: int, each: int = 4, repeats: int = 3) -> Numbers:
    """Measure the CPU milliseconds in which a device of 8 cores gets its next groups; `each` trials of a kind wait."""
    widths, count = Widths(4, 2, {1: 100.0, 4: 250.0}), waiting // each
    # Each repeat gets new objects, as a dispatch does, because the objects remember earlier answers.
    asked = [
        {f"kind-{k}": WaitingKind(range(k, waiting, count), widths, steps=10.0 + k) for k in range(count)}
        for _ in range(repeats)
    ]
    return {"ms": 1e3 * median(_cpu_seconds(partial(next_groups, kinds, cores=8)) for kinds in asked)}


def _tune(model_fn: Any, trials: int, **settings: Any) -> None:
    """Run a search whose data are one batch."""
    x, y = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2
    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, Any] = {
            "max_t": 2,
            "race": RaceConfig(top_k=2),
            "sweep": SweepConfig(fusion=8),
            "storage_path": folder,
            "name": "run",
            "progress": False,
        }
        space = {"lr": loguniform(1e-3, 1e-1), "batch_size": 8}
        tune(model_fn, space, train_data=(x, y), val_data=(x, y), num_samples=trials, **(given | settings))


def resume(members: int, kept: int, repeats: int = 3) -> Numbers:
    """Measure the CPU seconds of members of a fused group that go on from its checkpoint, and of those that start anew.

    They do one step of a model of 20 layers, so nearly all of the time is spent on building and loading it.
    """
    trials = {number: Trial(number, {"lr": 0.1, "batch_size": 4}) for number in range(members)}
    first = _group_task(range(members), 0)
    whole = train_group(_problem(_deep), trials, first, lambda key: {})
    saved = {first.key: {"parts": whole.checkpoint}}
    few = range(kept)
    again, anew = [], []
    for _ in range(repeats):
        again.append(_cpu_seconds(lambda: train_group(_problem(_deep), trials, _group_task(few, 1), saved.__getitem__)))
        anew.append(_cpu_seconds(lambda: train_group(_problem(_deep), trials, _group_task(few, 0), saved.__getitem__)))
    return {"s": median(again), "s from scratch": median(anew)}


def _group_task(members: range, start: int) -> Task:
    sources = ("from-0",) if start else ()
    return Task(f"from-{start}", (Group("kind", tuple(members), fused=True),), sources, Span(start, start + 1))


def _deep(config: Mapping[str, Any]) -> nn.Module:
    return nn.Sequential(*(layer for _ in range(10) for layer in (nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU())))


def _problem(model_fn: Any) -> Problem:
    data = (torch.zeros(4, 16), torch.zeros(4, dtype=torch.int64))
    batches = make_batches(data, "train_data", CPU, 0)
    return Problem(
        model_fn=model_fn,
        objective=supervised(),
        train_data=batches,
        val_data=batches,
        settings=TuneConfig(sweep=SweepConfig(surrogate=1), max_t=2),
        device=CPU,
    )


def examples_read(ranks: int, examples: int) -> Numbers:
    """Return the number of examples that all ranks together read in an epoch of a Dataset, over its length."""

    class Counted(Dataset):
        read = 0

        def __len__(self) -> int:
            return examples

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            Counted.read += 1
            return torch.zeros(1), 0

    batches = make_batches(Counted(), "train_data", CPU, 0)
    for rank in range(ranks):
        for _ in batches.shares(32, 0, Shard(rank, ranks)):
            pass
    return {"times": Counted.read / examples}


def scheduler(trials: int) -> Numbers:
    """Measure the CPU seconds of `RASDAScheduler` itself in a search on 64 workers, without those of Ray."""
    from hydro_rasda import RASDAScheduler

    rule = RASDAScheduler(max_t=8, metric="loss", mode="min")
    scores = np.random.default_rng(0).random((trials, 8)).tolist()
    nodes = [{"Alive": True, "Resources": {"CPU": 64.0}}]
    with tempfile.TemporaryDirectory() as folder, mock.patch("ray.nodes", return_value=nodes):
        return {"s": _cpu_seconds(lambda: StandInController(rule, scores, folder).run())}


def simulator(gpus: int, trials: int, max_t: int = 81, repeats: int = 3) -> Numbers:
    """Measure the CPU time for each event of a simulated search, and events a minute. Half of them are decisions."""
    plan = Plan(RASDA(max_t, 1))
    workload, cluster = power_law(trials, max_t, 0), Cluster.uniform(gpus)
    cost = CostModel(step_seconds=0.1, steps=100, restart_seconds=10.0, epoch_noise=0.05)
    events = simulate(plan, workload, cluster, cost).events
    spent = median(_cpu_seconds(lambda: simulate(plan, workload, cluster, cost)) for _ in range(repeats))
    return {"us": 1e6 * spent / events, "million a minute": 60e-6 * events / spent}


def fold(lines: int, stops: Sequence[int], trials: int, group: int, repeats: int = 3) -> Numbers:
    """Measure the CPU seconds in which a journal of `lines` lines is read and folded into a history; the least counts.

    Args:
        stops: Epochs after which a decision lets the better half of the trials train on.
        trials: Number of trials that are admitted at once.
        group: Number of trials that train as one.
    """
    settings = TuneConfig(num_samples=lines, max_t=stops[-1])

    def read_and_fold() -> None:
        history = History(settings)
        for key, unit in read_units(path).units.items():
            history.take(key, unit)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, JOURNAL)
        _write_journal(path, lines, stops, trials, group)
        return {"s of CPU": min(_cpu_seconds(read_and_fold) for _ in range(repeats))}


def _write_journal(path: Path, lines: int, stops: Sequence[int], trials: int, group: int) -> None:
    """Write the journal of a sweep, with at least `lines` lines."""
    rng, total, written, decisions = np.random.default_rng(0), 0, 0, 0

    def unit(key: str, value: Any, told: Sequence[JournalLine] = ()) -> None:
        nonlocal total, written
        own = {
            "event": UNIT,
            "key": f"sweep/{key}",
            "value": value,
            "seconds": 1.0,
            "at": written,
            "swept": written,
        }
        raw, total = encoded(told, own, total)
        file.write(raw)
        written += len(told) + 1

    def decide(key: str, moves: Mapping[int, int | None]) -> None:
        nonlocal decisions
        decisions += 1
        unit(f"{key}/of-{len(moves)}-{decisions}", [[number, to] for number, to in moves.items()])

    def epochs(number: int, start: int, stop: int) -> list[JournalLine]:
        names = ("train_loss", "train_accuracy", "val_loss", "val_accuracy")
        scores = enumerate(rng.random((stop - start, len(names))).tolist(), start + 1)
        return metric_lines("sweep", number, [(epoch, dict(zip(names, row))) for epoch, row in scores])

    with path.open("wb") as file:
        for first in range(0, lines, trials):
            if written >= lines:
                return
            left, start = range(first, first + trials), 0
            configs = ({"lr": rng.random(), "momentum": rng.random()} for _ in left)
            told = [{"event": "trial", "trial": n, "config": config} for n, config in zip(left, configs)]
            unit(f"kinds-from-{first}", {str(n): "kind" for n in left}, told)
            unit(f"admitted-from-{first}", {"trials": [*left], "samples": lines})
            decide("begin", dict.fromkeys(left, stops[0]))
            for stop, later in zip(stops, [*stops[1:], None]):
                for at in range(0, len(left), group):
                    members = left[at : at + group]
                    made = [line for n in members for line in epochs(n, start, stop)]
                    unit(f"to-{stop}/from-{start}/group-{members[0]}", {"members": [*members], "stop": stop}, made)
                kept = left[: -(-len(left) // 2)]
                decide(f"to-{stop}/kept", {n: later if n in kept else None for n in left})
                left, start = kept, stop


def _cpu_seconds(work: Any) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


class Measure(NamedTuple):
    """A line of the table.

    Attributes:
        measure: Returns numbers by name. The line shows the number that is named `unit`.
    """

    what: str
    measure: Callable[[], Numbers]
    unit: str


_LARGE, _READ = partial(simulator, 12_500, 25_000, repeats=1), "examples that 4 ranks read, over those of a Dataset"
_ENGINE = "the engine of `tune` for each finished task, without waiting for the disk"

ROWS = {
    "imports": Measure("`from hydro_rasda import tune`, beyond `import torch`", imports, "s of CPU"),
    "script": Measure("the first program of the guides, from `python` to its end", script, "s of CPU"),
    "script_torch": Measure("... of which `import torch` alone", partial(of_script, "torch"), "s of CPU"),
    "script_own": Measure("... of which the program's other imports", partial(of_script, "own imports"), "s of CPU"),
    "script_training": Measure("... of which training and validation", partial(of_script, "training"), "s of CPU"),
    "script_rest": Measure("... of which all else", partial(of_script, "rest"), "s of CPU"),
    "traces": Measure("`tune`, 9 trials of a model without a width argument", partial(traces, 9), "traces"),
    "dispatch": Measure("the next groups of a device, 2,000 trials waiting", partial(dispatch, 2000), "ms"),
    "scheduler": Measure("`RASDAScheduler` alone, 400 trials", partial(scheduler, 400), "s"),
    "scheduler_large": Measure("... 10,000 trials", partial(scheduler, 10_000), "s"),
    "resume": Measure("8 of a group of 256 go on from its checkpoint", partial(resume, 256, 8), "s"),
    "simulator": Measure("simulator, 1,250 GPUs: an event", partial(simulator, 1250, 2500), "us"),
    "simulator_large": Measure("... 12,500 GPUs", _LARGE, "us"),
    "events": Measure("... 256 GPUs: events", partial(simulator, 256, 2000), "million a minute"),
    "fold": Measure("a journal of a million lines, halving", partial(fold, 10**6, (1, 3, 9, 27), 1000, 50), "s of CPU"),
    "fold_long": Measure("... each epoch a unit of its own", partial(fold, 10**6, range(1, 1001), 1, 1), "s of CPU"),
    "engine": Measure(f"{_ENGINE}, 10,000 trials on 1,000 devices", partial(engine, 10_000, 1000), "ms"),
    "engine_large": Measure("... 100,000 trials on 10,000 devices", partial(engine, 100_000, 10_000), "ms"),
    "examples_read": Measure(_READ, partial(examples_read, 4, 1024), "times"),
}


def measured(row: Measure) -> dict[str, Any]:
    """Measure a row's number, and return it with the date, the load and the processor."""
    before = environment()
    number = row.measure()[row.unit]
    return {"number": number} | {name: before[name] for name in ("date", "load", "cpu")}


def markdown(result: dict[str, Any]) -> str:
    """Return a page with the result as a table."""
    machine, rows = result["environment"], []
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    where = f"{machine['cpu']}, where a row names no other, {machine['cores']} cores, Python {machine['python']}, "
    for name, row in ROWS.items():
        before, now = (result[column].get(name) for column in ("before", "now"))
        when = ", ".join(_when(cell, machine["cpu"]) for cell in (before, now) if cell)
        rows.append([f"`{name}`", row.what, shown(before, row), shown(now, row), when])
    drawn = columns(["row", "what", "before", "now", "measured (load)"], rows)
    return f"# Ten times the size\n\n{where}{versions}. {texts('scale')['head']}\n\n{drawn}\n"


def _when(cell: dict[str, Any], cpu: str) -> str:
    elsewhere = "" if cell.get("cpu", cpu) == cpu else f", {cell['cpu']}"
    return f"{cell['date']} ({cell['load']}{elsewhere})"


def shown(cell: dict[str, Any] | None, row: Measure) -> str:
    """Return a number with its unit; "-" if it was not measured."""
    if cell is None:
        return "-"
    number = cell["number"]
    if number < 0:  # the difference of two times is smaller than their noise
        return f"about 0 {row.unit}"
    return f"{number:,.0f} {row.unit}" if abs(number) >= 100 else f"{number:.3g} {row.unit}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the result files."""
    parser = options(__doc__)
    parser.add_argument("rows", nargs="*", metavar="row", help=", ".join(ROWS))
    given = parser.parse_args(arguments)
    unknown = set(given.rows) - ROWS.keys()
    if unknown:
        parser.error(f"`row` is {min(unknown)!r}, but must be one of {', '.join(ROWS)}")
    for name in given.rows or ROWS:
        cell = measured(ROWS[name])
        print(f"{name}: {shown(cell, ROWS[name])}   load {cell['load']}", flush=True)
        # Read the file again for each row, because a measurement beside this one may have written another row.
        result = {"environment": environment(versions=VERSIONS), **read(given.out / FILE, {"before": {}, "now": {}})}
        result["now"][name] = cell
        save(given.out / FILE, result, markdown(result))


if __name__ == "__main__":
    main()
