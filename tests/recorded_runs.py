"""Fourteen searches, written down to the last digit: run them before and after you move code that decides.

    python -m tests.recorded_runs before.json                     on the code as it was
    python -m tests.recorded_runs after.json --like before.json   on the code as it is; exit status 1 if a run differs

Both files must come from one machine: processors differ in the last digit. Each run has a process of its own, one
thread, one device and groups of four, unless its entry in `runs` says otherwise. A run is written down as users see it:
configurations, scores by epoch, decisions, the winner. Journals may look different.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hydro_rasda import Worker
    from hydro_rasda.contracts import Event

ALONE = {"HYDRO_RASDA_ONE_PROCESS": "1", "OMP_NUM_THREADS": "1"}
"""Environment variables of a run: it has one process and one thread."""

PLACE = {"heat", "trial", "epoch"}
TIMED = ("seconds", "seconds_left", "efficiency")
"""Words in the names of metrics that depend on the clock."""


def runs() -> dict[str, dict[str, Any]]:
    """Map the name of each run to the arguments of `tune` that differ from those in `search`."""
    from sklearn.model_selection import KFold
    from torch.nn.functional import cross_entropy

    from hydro_rasda import LocalBackend, RaceConfig, SweepConfig, choice, loguniform, uniform

    def sweep(**more: Any) -> SweepConfig:
        return SweepConfig(**{"reduction_factor": 2, "surrogate": 1 / 2, "fusion": 4, **more})

    branches = choice(
        [
            {"optimizer": "sgd", "lr": loguniform(1e-2, 0.3), "momentum": uniform(0.5, 0.95)},
            {"optimizer": "adamw", "lr": loguniform(1e-3, 3e-2)},
        ]
    )
    return {
        "halving": {"sweep": sweep()},
        "hyperband": {"sweep": sweep(rule="hyperband")},
        "median": {"sweep": sweep(rule="median")},
        "pbt": {"sweep": sweep(rule="pbt"), "num_samples": 6},
        "tpe": {"sweep": sweep(searcher="tpe")},
        "folds": {"sweep": sweep(), "val_data": KFold(3), "num_samples": 6},
        "several-metrics": {"sweep": sweep(), "metric": ["val_loss", "params"], "mode": ["min", "min"]},
        "branches": {"sweep": sweep(), "space": {"of": branches, "batch_size": choice([32, 64])}},
        "full-width": {"sweep": sweep(surrogate=1)},
        "grown": {"sweep": sweep()},
        "two-workers": {"sweep": sweep(), "race": RaceConfig(top_k=2, workers=2), "backend": LocalBackend(["cpu"] * 2)},
        "own-loop": {"sweep": sweep(), "train": train, "loss_fn": cross_entropy},
        "out-of-time": {"sweep": sweep(), "time_budget_s": 30.0},
        "ray": {"sweep": sweep(), "race": RaceConfig(top_k=2, max_workers=1)},
    }


def train(worker: Worker) -> None:
    """Train as a user's own training loop does."""
    import torch
    from torch import nn

    from tests.hydro_rasda.models import mlp

    (x, y), (x_val, y_val) = worker.data
    torch.manual_seed(0)
    model = worker.prepare(mlp(dict(worker.config)))
    optimizer = torch.optim.SGD(model.parameters(), lr=worker.config["lr"])
    if worker.checkpoint is not None:
        worker.plain(model).load_state_dict(worker.checkpoint["model"])
    for _ in range(worker.iteration, 4):
        for start in range(0, len(x), 32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[start : start + 32]), y[start : start + 32]).backward()
            optimizer.step()
        with torch.no_grad():
            loss = nn.functional.cross_entropy(model(x_val), y_val).item()
        worker.report({"val_loss": loss}, {"model": worker.plain(model).state_dict()})


def search(name: str, folder: Path) -> dict[str, Any]:
    """Do one run, and return it as plain values."""
    decisions: list[list[Any]] = []
    epochs = [0]

    def noted(event: Event) -> None:
        kind = type(event).__name__
        if kind in ("RungDecided", "FinalistsChosen") and not event.recalled:
            at = f"{getattr(event, 'heat', 'sweep')} {getattr(event, 'epoch', 'end')}"
            decisions.append([at, sorted(vars(event)["candidates"]), list(vars(event)["kept"])])
        epochs[0] += vars(event).get("epochs", 0) if kind == "EpochsTrained" else 0

    if name == "out-of-time":  # a clock on which each epoch takes a second; modules imported later use it
        time.perf_counter = time.monotonic = lambda: float(epochs[0])

    import torch
    from sklearn.datasets import load_digits

    from hydro_rasda import RaceConfig, choice, loguniform, tune, uniform
    from hydro_rasda.heats import middle_heat
    from tests.hydro_rasda.models import mlp

    middle_heat.LEAST_STEP = 0  # otherwise, models as small as these have no middle heat

    torch.set_num_threads(1)
    data = load_digits()
    x, y = torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)
    asked: dict[str, Any] = {
        "model_fn": mlp,
        "space": {
            "lr": loguniform(1e-3, 0.3),
            "momentum": uniform(0.5, 0.95),
            "optimizer": choice(["sgd", "adamw"]),
            "activation": choice(["relu", "tanh"]),
            "dropout": uniform(0.0, 0.3),
            "batch_size": choice([32, 64]),
        },
        "train_data": (x[:320], y[:320]),
        "val_data": (x[320:480], y[320:480]),
        "num_samples": 12,
        "max_t": 4,
        "race": RaceConfig(top_k=2),
        "full_trainings": 2,
        "storage_path": folder,
        "name": name,
        "progress": False,
        "callbacks": [noted],
    } | runs()[name]
    with two_nodes() if name == "ray" else contextlib.nullcontext(asked.get("backend", "local")) as backend:
        for samples in (8, 16) if name == "grown" else (asked["num_samples"],):
            result = tune(**asked | {"num_samples": samples, "backend": backend})
    trials = [
        {
            "config": dict(trial.config),
            "status": trial.status,
            "epochs": [trial.sweep_epochs, trial.epochs, trial.kept_epoch],
            "scores": [
                [line["heat"], line["epoch"], *sorted((k, v) for k, v in line.items() if is_score(k))]
                for line in trial.history
            ],
        }
        for trial in result.trials
    ]
    found = {"best_trial": result.best_trial, "best_metric": result.best_metric, "best_config": result.best_config}
    plain: dict[str, Any] = json.loads(json.dumps({**found, "decisions": decisions, "trials": trials}))
    return plain


def is_score(name: str) -> bool:
    """Tell whether an entry of a trial's history is a score. Heat, trial, epoch and `TIMED` metrics are no scores."""
    return name not in PLACE and not any(word in name for word in TIMED)


@contextlib.contextmanager
def two_nodes() -> Iterator[Any]:
    """Yield a backend of a Ray cluster of two nodes, a device on each."""
    import ray
    from ray.cluster_utils import Cluster

    from hydro_rasda import RayBackend

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False)
        yield RayBackend(resources_per_worker={"CPU": 1})
    finally:
        ray.shutdown()
        cluster.shutdown()


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each part of a run that differs."""
    for part in before:
        if part != "trials" and before[part] != after.get(part):
            yield f"{part}: {before[part]} became {after.get(part)}"
    pairs = list(zip(before["trials"], after["trials"], strict=False))
    if len(before["trials"]) != len(after["trials"]):
        yield f"{len(before['trials'])} trials became {len(after['trials'])}"
    for number, (old, new) in enumerate(pairs):
        for part in old:
            if old[part] != new[part]:
                yield f"trial {number}, {part}: {old[part]} became {new[part]}"


def main() -> int:
    """Write the runs down, and compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="JSON file that is written")
    parser.add_argument("--like", type=Path, help="JSON file to compare with")
    parser.add_argument("--only", nargs="+", help="names of runs")
    parser.add_argument("--here", help=argparse.SUPPRESS)  # one run, in this process
    asked = parser.parse_args()
    if asked.here:
        with tempfile.TemporaryDirectory() as folder:
            asked.out.write_text(json.dumps(search(asked.here, Path(folder))))
        return 0
    done: dict[str, Any] = {}
    for name in asked.only or runs():
        with tempfile.TemporaryDirectory() as folder:
            part = Path(folder, "run.json")
            again = [sys.executable, "-m", "tests.recorded_runs", str(part), "--here", name]
            subprocess.run(again, check=True, env={**os.environ, **ALONE, "HYDRO_RASDA_CACHE": folder})
            done[name] = json.loads(part.read_text())
        print(f"{name}: trial {done[name]['best_trial']} wins with {done[name]['best_metric']}", flush=True)
    asked.out.write_text(json.dumps(done, indent=1) + "\n")
    before = json.loads(asked.like.read_text()) if asked.like else {}
    found = [(name, line) for name in done.keys() & before.keys() for line in differences(before[name], done[name])]
    for name, line in found:
        print(f"{name}: {line}"[:400])
    print(f"{len(done)} runs, {len({name for name, _ in found})} of which differ")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
