"""Population based training: 32 narrow members in one fused group against Ray Tune's at full size with 32 trials.

    python -m benchmarks.population [--pairs 3] [--epochs 3] [--trials 32] [--data FOLDER]

Both train as many epochs with as many trials, decide after each epoch, and copy the best quarter over the worst. The
model is the CNN of `benchmarks.tasks` on a part of CIFAR-10; Ray trains it as it is, `tune` at an eighth of its width,
up to the choice of its finalists. Ray's decides asynchronously, its default: with `synch=True`, 4 trials on 2 slots
waited for ever. Runs are timed in pairs, one after the other. Of `tune`, an arm keeps all members in one process, where
copies are made in place; the other is the default, a group on each core. The share of an interval that its copies take
is of the first. It rewrites `population.{json,md}` in `benchmarks/results`, or in another folder.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.population_member import ray_member
from benchmarks.result_files import Row, columns, environment, options, save
from benchmarks.tasks.load import load_task
from benchmarks.tasks.task import Task, held
from benchmarks.tasks.tuned import tuned
from benchmarks.vs_asha.search import seeds
from hydro_rasda import SweepConfig, loguniform, uniform
from hydro_rasda.contracts import Event
from hydro_rasda.processes.child_count import ONE_PROCESS
from hydro_rasda.run.events import FinalistsChosen
from hydro_rasda.schedulers import PopulationBasedTraining, Range
from hydro_rasda.training.device import Device
from hydro_rasda.training.fused import LiveGroup

FILE = "population.json"
EXPLORED = {"lr": Range(1e-3, 1.0, log=True), "momentum": Range(0.5, 0.99)}
FIXED = {"optimizer": "sgd", "batch_size": 64}


def part_of_cifar10(data: Path, max_t: int) -> Task:
    """400 images to train on, 200 to validate and 200 to test."""
    whole = load_task("cifar10", data)
    (x, y, _), half = whole.held, len(whole.held[0]) // 2
    parts = [(x[start : start + 200], y[start : start + 200]) for start in (0, half)]
    return replace(whole, train=tuple(part[:400] for part in whole.train), held=held(*parts), max_t=max_t)


def ours(task: Task, trials: int, seed: int, one_process: bool) -> Row:
    """Train a narrow population with `tune`, to the choice of its finalists."""
    ended: list[float] = []

    def over(event: Event) -> None:
        if isinstance(event, FinalistsChosen):
            ended.append(time.perf_counter())
            raise KeyboardInterrupt

    with tempfile.TemporaryDirectory(prefix="population-") as folder, _timed() as spent:
        os.environ |= {"HYDRO_RASDA_CACHE": folder, ONE_PROCESS: "1" if one_process else ""}
        began = time.perf_counter()
        with suppress(KeyboardInterrupt):
            tuned(
                task,
                folder,
                {**FIXED, "lr": loguniform(1e-3, 1.0), "momentum": uniform(0.5, 0.99)},
                num_samples=trials,
                sweep=SweepConfig(rule=PopulationBasedTraining(EXPLORED, task.max_t), fusion=trials),
                seed=seed,
                callbacks=[over],
            )
    return {"seconds": ended[0] - began, **(spent if one_process else {})}


@contextmanager
def _timed() -> Iterator[dict[str, float]]:
    """Measure the seconds of groups, and those in which they make their members' copies."""
    spent = {"interval_seconds": 0.0, "copy_seconds": 0.0}

    def measured(method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*arguments)
            finally:
                spent[name] += time.perf_counter() - began

        return timed

    before = LiveGroup.take, Device.train_groups
    changed: Any = measured(LiveGroup.take, "copy_seconds"), measured(Device.train_groups, "interval_seconds")
    LiveGroup.take, Device.train_groups = changed  # type: ignore[method-assign]
    try:
        yield spent
    finally:
        LiveGroup.take, Device.train_groups = before  # type: ignore[method-assign]


def rays(task: Task, trials: int, seed: int) -> Row:
    """Train a population at full size with Ray Tune, on a cluster that is there."""
    from ray import tune as ray_tune
    from ray.tune import RunConfig, Tuner, with_parameters
    from ray.tune import TuneConfig as RayTuneConfig
    from ray.tune.schedulers import PopulationBasedTraining as RaysOwn

    drawn = {"lr": ray_tune.loguniform(1e-3, 1.0), "momentum": ray_tune.uniform(0.5, 0.99)}
    scheduler = RaysOwn(perturbation_interval=1, hyperparam_mutations=drawn)
    arrays = {"train": [t.numpy() for t in task.train], "held": [t.numpy() for t in task.held]}
    own, folder, began = seeds(task, 0, seed), tempfile.mkdtemp(prefix="population-ray-"), time.perf_counter()
    try:
        results = Tuner(
            with_parameters(ray_member, task=replace(task, train=(), held=()), arrays=arrays, seeds=own),
            param_space={**FIXED, **drawn},
            tune_config=RayTuneConfig(metric="score", mode=task.mode, num_samples=trials, scheduler=scheduler),
            run_config=RunConfig(storage_path=folder, verbose=0, stop={"training_iteration": task.max_t}),
        ).fit()
        if results.num_errors:
            raise RuntimeError(f"{results.num_errors} of Ray's trials failed; the first said: {results.errors[0]}")
        return {"seconds": time.perf_counter() - began}
    finally:
        shutil.rmtree(folder)


def ratios(result: Row, arm: str) -> list[float]:
    """Return how many times as fast an arm was as Ray, in each pair."""
    return [pair["ray"]["seconds"] / pair[arm]["seconds"] for pair in result["pairs"]]


def copy_share(result: Row) -> float:
    """Return the share of the intervals' time that copies took, in the arm of one group."""
    groups = [pair["one group"] for pair in result["pairs"]]
    return float(median(group["copy_seconds"] / group["interval_seconds"] for group in groups))


ARMS = {"one group": "32 narrow members in one fused group", "default": "a fused group on each core, the default"}


def markdown(result: Row) -> str:
    """A table with a line for each arm."""
    where, pairs = result["environment"], result["pairs"]
    arms = {"ray": "Ray Tune's `PopulationBasedTraining`, full size", **ARMS}
    rows = []
    for arm, title in arms.items():
        fast = "" if arm == "ray" else ", ".join(f"{ratio:.1f}" for ratio in ratios(result, arm))
        rows.append((title, ", ".join(f"{pair[arm]['seconds']:.1f}" for pair in pairs), fast))
    return f"""# Population based training

{where["cpu"]}, {where["cores"]} cores, torch {where["torch"]}, Ray {where["ray"]}, {where["date"]}, load \
{where["load"]}. Rerun: `{where["command"]}`. {where["trials"]} trials train for {where["epochs"]} epochs \
each, and are compared after each epoch. Ray Tune's train at full size. Those of `tune` have an eighth of the \
width, and train until its finalists are chosen. Ray's start-up is left out. A ratio is of one pair of runs.

{columns(["", "seconds", "times as fast as Ray, by pair"], rows)}

Copies of members took {copy_share(result):.2%} of the intervals' time in the fused group.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the pairs and write the files."""
    parser = options(__doc__, data=True)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--trials", type=int, default=32)
    asked = parser.parse_args(arguments)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    task = part_of_cifar10(asked.data, asked.epochs)
    result: Row = {
        "environment": environment(
            "torch", "ray", trials=asked.trials, epochs=asked.epochs, command="python -m benchmarks.population"
        ),
        "pairs": [],
    }
    for seed in range(asked.pairs):
        pair = {
            "one group": ours(task, asked.trials, seed, one_process=True),
            "default": ours(task, asked.trials, seed, one_process=False),
        }
        ray.init(
            address="local",
            num_cpus=os.cpu_count(),
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
        )
        try:
            pair["ray"] = rays(task, asked.trials, seed)
        finally:
            ray.shutdown()
        result["pairs"].append(pair)
        print(pair, flush=True)
        save(asked.out / FILE, result, markdown(result))


if __name__ == "__main__":
    main()
