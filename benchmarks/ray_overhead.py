"""What Ray costs a trial: a resize from pause to next report, and the start of many short trials.

    python -m benchmarks.ray_overhead [--repeats 5]

Each measurement is made twice in turn, cold and warm, so that a busy machine slows both. Cold is Ray Tune
as it comes, with one actor for each further rank, each of which imports torch, as a plain script would do
it. Warm is `hydro_rasda.elastic`. The result goes to
`benchmarks/results/ray_overhead.json` and, as a table, to `ray_overhead.md` beside it.
"""

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
import torch
from ray import tune
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import nn

from benchmarks.result_files import columns, cpu_model, options, save, texts
from hydro_rasda import RASDAScheduler, Worker, elastic

SIZES = (1, 2, 4, 8)
"""Numbers of workers through which a trial grows."""

QUIET = 1.5
"""If the load average at the start is above this, other work is assumed to disturb the measurement."""


class Clock(tune.Callback):  # type: ignore[misc]
    """Notes when the driver sees each report."""

    def __init__(self) -> None:
        self.seen: dict[int, float] = {}

    def on_trial_result(self, iteration: int, trials: list, trial: Any, result: dict, **info: Any) -> None:
        """Note the time of a report."""
        self.seen[result["training_iteration"]] = time.monotonic()

    def between(self) -> dict[str, float]:
        """Return, for each resize, the seconds from the report that paused the trial to the next report."""
        steps = zip((1, 2, 4), SIZES, SIZES[1:])
        return {f"{small}->{large}": self.seen[t + 1] - self.seen[t] for t, small, large in steps}


def warm(worker: Worker) -> None:
    """Train a model that is so small that training takes no time."""
    model = nn.Linear(8, 1)
    if worker.checkpoint is not None:
        model.load_state_dict(worker.checkpoint["model"])
    trained = worker.prepare(model)
    for _ in range(worker.iteration, worker.config["iterations"]):
        trained(torch.ones(4, 8, device=worker.device)).sum().backward()
        worker.report({"loss": 0.0}, {"model": model.state_dict()})


class ColdRank:
    """One rank of a trial, in an actor of its own."""

    def join(self, rank: int, world_size: int, store: str) -> None:
        """Join the other ranks."""
        if world_size > 1:
            torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
        self.model: nn.Module = nn.Linear(8, 1)
        if world_size > 1:
            self.model = nn.parallel.DistributedDataParallel(self.model)

    def epoch(self) -> None:
        """Do one step."""
        self.model(torch.ones(4, 8)).sum().backward()


def cold(config: dict[str, Any]) -> None:
    """Train the model of `warm` with plain actors of Ray, as a script would do by hand."""
    checkpoint, done = tune.get_checkpoint(), 0
    if checkpoint:
        with checkpoint.as_directory() as folder:
            done = torch.load(Path(folder, "state.pt"), weights_only=True)["iteration"]
    world_size = len(tune.get_context().get_trial_resources().bundles)
    group = ray.util.get_current_placement_group()
    peers = [
        ray.remote(num_cpus=1)(ColdRank)
        .options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank))
        .remote()
        for rank in range(1, world_size)
    ]
    with tempfile.TemporaryDirectory() as meeting:
        store = f"file://{meeting}/store"
        joined = [peer.join.remote(rank, world_size, store) for rank, peer in enumerate(peers, start=1)]
        head = ColdRank()
        head.join(0, world_size, store)
        ray.get(joined)
        for iteration in range(done + 1, config["iterations"] + 1):
            steps = [peer.epoch.remote() for peer in peers]
            head.epoch()
            ray.get(steps)
            with tempfile.TemporaryDirectory() as folder:
                torch.save({"iteration": iteration}, Path(folder, "state.pt"))
                tune.report({"loss": 0.0}, checkpoint=tune.Checkpoint.from_directory(folder))
        if world_size > 1:
            torch.distributed.destroy_process_group()


def resize(make: Callable[[RASDAScheduler], Any], folder: str) -> dict[str, float]:
    """Run one trial that grows from 1 to 8 workers, and return the seconds of each resize."""
    scheduler, clock = RASDAScheduler(max_t=5, grace_period=1), Clock()
    fit(make(scheduler), folder, scheduler, 1, {"iterations": 5}, callbacks=[clock])
    return clock.between()


def start(make: Callable[[RASDAScheduler], Any], folder: str) -> dict[str, float]:
    """Run 32 trials of one short iteration on 8 slots, and return the seconds."""
    scheduler = RASDAScheduler(max_t=1)
    began = time.monotonic()
    fit(make(scheduler), folder, scheduler, 32, {"iterations": 1})
    return {"32 short trials": time.monotonic() - began}


def fit(trainable: Any, folder: str, scheduler: RASDAScheduler, trials: int, config: dict, **run: Any) -> None:
    """Run an experiment, and check that nothing failed."""
    results = tune.Tuner(
        trainable,
        param_space={**config, "x": tune.uniform(0, 1)},
        tune_config=tune.TuneConfig(
            metric="loss", mode="min", num_samples=trials, scheduler=scheduler, reuse_actors=trials > 1
        ),
        run_config=tune.RunConfig(storage_path=folder, verbose=0, **run),
    ).fit()
    assert results.num_errors == 0
    assert len(results) == trials


def main() -> None:
    """Measure, print and write the result files."""
    parser = options(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    makers: dict[str, Callable[[RASDAScheduler], Any]] = {"cold": lambda s: cold, "warm": lambda s: elastic(warm, s)}
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in makers}
    loads = [os.getloadavg()[0]]
    if loads[0] > QUIET:
        print(f"load average {loads[0]:.1f}: other work will be measured, too")
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, configure_logging=False)
    folder = tempfile.mkdtemp(prefix="ray-overhead-")
    # The fork servers start once in a session. This first search pays for that, so that no measured resize does.
    start(makers["warm"], folder)
    for _ in range(given.repeats):
        for measure in (resize, start):
            for name, make in makers.items():
                for what, took in measure(make, folder).items():
                    seconds[name].setdefault(what, []).append(round(took, 2))
                    loads.append(os.getloadavg()[0])
                    print(f"{name:5} {what:16} {took:6.2f} s   load {loads[-1]:.1f}", flush=True)
            result = summary(seconds, loads)
            save(given.out / "ray_overhead.json", result, markdown(result))
    ray.shutdown()
    shutil.rmtree(folder)


def summary(seconds: dict[str, dict[str, list[float]]], loads: list[float]) -> dict[str, Any]:
    """Summarize the measurements so far and the machine.

    Args:
        seconds: `seconds["cold"][what]` and `seconds["warm"][what]` are the seconds of each repeat of a measurement.
        loads: Load averages, the first one before the start.
    """
    both = [what for what in seconds["cold"] if len(seconds["cold"][what]) == len(seconds["warm"].get(what, ()))]
    pairs = {what: zip(seconds["cold"][what], seconds["warm"][what]) for what in both}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cores": os.cpu_count(), "processor": cpu_model()},
        "load average": {"start": round(loads[0], 1), "least": round(min(loads), 1), "most": round(max(loads), 1)},
        "versions": {"python": platform.python_version(), "ray": ray.__version__, "torch": torch.__version__},
        "configuration": {"logical CPUs": SIZES[-1], "sizes": SIZES},
        "seconds": seconds,
        "median seconds": {name: {what: median(taken[what]) for what in both} for name, taken in seconds.items()},
        "median of cold / warm": {what: round(median(c / w for c, w in pair), 2) for what, pair in pairs.items()},
    }


def markdown(result: dict[str, Any]) -> str:
    """Return a page with the result as a table."""
    load, machine, rows = result["load average"], result["machine"], []
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    where = f"{result['date'][:10]}, {machine['processor']}, {machine['cores']} cores under "
    where += f"{result['configuration']['logical CPUs']} logical CPUs, {versions}. Load average {load['start']} at the "
    where += f"start, {load['least']} to {load['most']} during the run, which loads the machine itself."
    for what, ratio in result["median of cold / warm"].items():
        cold, warm = (result["seconds"][name][what] for name in ("cold", "warm"))
        rows.append([what, len(warm), _spread(cold), _spread(warm), f"{ratio:.1f}"])
    parts = ["# What Ray costs a trial", where, texts("ray_overhead")["head"]]
    parts += [f"**Other work was running: at the start the load average was above {QUIET}.**"] * busy(result)
    drawn = columns(["", "repeats", "cold, s", "warm, s", "cold / warm"], rows)
    return "\n\n".join([*parts, drawn]) + "\n"


def busy(result: dict[str, Any]) -> bool:
    """Tell whether other work was running when the measurement began."""
    return bool(result["load average"]["start"] > QUIET)


def _spread(seconds: list[float]) -> str:
    return f"{median(seconds):.1f} ({min(seconds):.1f}-{max(seconds):.1f})"


if __name__ == "__main__":
    main()
