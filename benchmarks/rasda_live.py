"""RASDA really run: 40 trials on 8 slots of Ray Tune, against Ray's ASHA and the paper's rule.

    python -m benchmarks.rasda_live

Trials are small trainings (a CNN on digits, AdamW), the same configurations for each rule, one rule after another
within a seed, on one Ray session. It goes on where it was, and rewrites `rasda_live.{json,md}` in `benchmarks/results`,
or elsewhere (`--out`). Slots are Ray's: where they are more than cores, workers of a trial share these, and growth
makes no trial faster. Then waiting, idling and restarts are compared, not speed-ups.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.setdefault("TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S", "0")

import ray
import torch
from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import ASHAScheduler, TrialScheduler
from ray.tune.search import BasicVariantGenerator
from torch import nn
from torch.nn import functional as F

from benchmarks.result_files import Row, environment, options, read, save, spread, table
from benchmarks.tasks.images import shuffled_digits
from hydro_rasda import RASDAScheduler, Worker, elastic

FILE = "rasda_live.json"
SLOTS, TRIALS, SEEDS, MAX_T, BATCH, PASSES = 8, 40, range(5), 8, 16, 2
"""An epoch here has `PASSES` passes over the training examples."""

ASHA, PAPER, OURS = "ASHA", "RASDA as published", "RASDA, waiting, efficient growth"
RULES: dict[str, Callable[[], TrialScheduler]] = {
    ASHA: lambda: ASHAScheduler(max_t=MAX_T, grace_period=1, reduction_factor=2),
    PAPER: lambda: RASDAScheduler(max_t=MAX_T),
    OURS: lambda: RASDAScheduler(max_t=MAX_T, wait=0.1, grow="efficient"),
}


def train(worker: Worker) -> None:
    """Train a trial, on each of its ranks."""
    x, y = worker.data
    x, y, x_val, y_val = x[:597], y[:597], x[597:1197], y[597:1197]
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)),
    )
    config = worker.config
    betas = (config["beta1"], 0.999)
    optimizer = torch.optim.AdamW(model.parameters(), config["lr"], betas, weight_decay=config["decay"])
    if worker.checkpoint is not None:
        model.load_state_dict(worker.checkpoint["model"])
        optimizer.load_state_dict(worker.checkpoint["optimizer"])
    trained = worker.prepare(model)
    worker.measure(trained, optimizer)
    worker.rescale(optimizer, warmup_steps=len(x) * PASSES // (BATCH * worker.world_size))
    while worker.iteration < MAX_T:
        for passed in range(PASSES):
            for batch, weight in worker.batches(len(x), BATCH, seed=passed):
                optimizer.zero_grad()
                (F.cross_entropy(trained(x[batch]), y[batch]) * weight).backward()
                optimizer.step()
        with torch.no_grad():
            loss = F.cross_entropy(model(x_val), y_val)
        worker.report({"loss": loss}, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})


class Watch(tune.Callback):  # type: ignore[misc]
    """Measures the slots that trials hold, and how long trials pause, in each turn of the driver's loop."""

    def __init__(self) -> None:
        self.slot_seconds = 0.0
        self.longest_pause = 0.0
        self.began: float | None = None
        self._last = math.nan
        self._held = 0
        self._paused: dict[str, float] = {}

    def on_step_end(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        """Count held slots and paused trials."""
        now = time.monotonic()
        running = [trial for trial in trials if trial.status == Trial.RUNNING]
        if self.began is None and running:
            self.began = self._last = now
        if self.began is None:
            return
        self.slot_seconds += self._held * (now - self._last)
        self._last, self._held = now, sum(len(trial.placement_group_factory.bundles) for trial in running)
        for trial in trials:
            if trial.status == Trial.PAUSED:
                self._paused.setdefault(trial.trial_id, now)
            elif trial.trial_id in self._paused:
                self.longest_pause = max(self.longest_pause, now - self._paused.pop(trial.trial_id))


def search(rule: str, trials: int, seed: int, data: Any) -> Row:
    """Run a search under one rule."""
    scheduler, watch, folder = RULES[rule](), Watch(), tempfile.mkdtemp(prefix="rasda-live-")
    began = time.monotonic()
    try:
        results = tune.Tuner(
            elastic(train, scheduler, data=data),
            param_space={
                "lr": tune.loguniform(1e-4, 1e-1),
                "beta1": tune.uniform(0.5, 0.99),
                "decay": tune.loguniform(1e-4, 1e-1),
            },
            tune_config=tune.TuneConfig(
                metric="loss",
                mode="min",
                num_samples=trials,
                search_alg=BasicVariantGenerator(random_state=seed),
                scheduler=scheduler,
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(storage_path=folder, verbose=0, callbacks=[watch]),
        ).fit()
        seconds = time.monotonic() - began
    finally:
        shutil.rmtree(folder)
    assert results.num_errors == 0
    ended = [result.metrics for result in results if result.metrics and result.metrics["training_iteration"] == MAX_T]
    if not ended:
        raise RuntimeError(f"no trial under {rule} trained to the end: the search was interrupted")
    return {
        "rule": rule,
        "seed": seed,
        "trials": trials,
        "seconds": round(seconds, 2),
        "idle": round(1 - watch.slot_seconds / (SLOTS * seconds), 4),
        "slot_seconds": round(watch.slot_seconds, 1),
        "longest_pause": round(watch.longest_pause, 2),
        "to_the_end": len(ended),
        "epochs": sum(result.metrics["training_iteration"] for result in results if result.metrics),
        "loss": min(metrics["loss"] for metrics in ended),
        "load": round(os.getloadavg()[0], 1),
    }


def pairs(rows: Sequence[Row], number: str, rule: str, than: str) -> list[float]:
    """Return the ratios of a number under two rules, seed by seed."""
    of = {(row["rule"], row["seed"]): row[number] for row in rows}
    return [of[rule, seed] / of[than, seed] for r, seed in of if r == rule and (than, seed) in of]


def markdown(results: Row) -> str:
    """Return a page of the tables."""
    where, rows = results["environment"], results["rows"]
    epoch = median(row["slot_seconds"] / row["epochs"] for row in rows if row["rule"] == ASHA)
    found = []
    for rule in RULES:
        own = [row for row in rows if row["rule"] == rule]
        faster = [1 / ratio for ratio in pairs(rows, "seconds", rule, ASHA)]
        found.append(
            {
                "rule": rule,
                "seeds": len(own),
                "seconds": spread([row["seconds"] for row in own], ".1f"),
                "times as fast as ASHA": spread(faster, ".2f"),
                "slot seconds over ASHA's": spread(pairs(rows, "slot_seconds", rule, ASHA), ".2f"),
                "idle slots": spread([row["idle"] for row in own], ".0%"),
                "longest pause, s": spread([row["longest_pause"] for row in own], ".1f"),
                "to the end": spread([row["to_the_end"] for row in own], ".0f"),
                "best loss": spread([row["loss"] for row in own], ".4f"),
            }
        )
    trials = ", ".join(str(count) for count in sorted({row["trials"] for row in rows}))
    parts = [
        "# RASDA, really run on Ray Tune",
        f"{where['date']}, {where['cpu']}, {where['cores']} cores under {SLOTS} slots, Python {where['python']}, "
        f"torch {where['torch']}, Ray {where['ray']}. Rerun: `python -m benchmarks.rasda_live`.",
        f"{trials} trials a search: a CNN on digits with AdamW, up to {MAX_T} epochs of {PASSES} passes; the first "
        "milestone after one epoch; rf = sf = 2. The same configurations for each rule, one rule after another within "
        "a seed. Medians, with the least and the most in brackets; ratios are of pairs. A pause is from where a trial "
        "gave its slots back to where it trains again.",
        f"**{SLOTS} slots share {where['cores']} cores**: more workers make no trial faster here. These times "
        "contain the cost of restarts, but not the gain of growth on a machine with a GPU for each worker.",
        f"**Epochs are short**: {epoch:.1f} s of a slot each under ASHA, where a resize takes seconds. There RASDA as "
        'published does not pay; `grow="efficient"` sees that more workers bring nothing, and hardly resizes.',
        table(found),
        "## Searches",
        table(rows),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Run the searches that are missing, and write the results."""
    path = options(__doc__).parse_args().out / FILE
    fresh: Row = {"environment": environment("torch", "ray"), "rows": []}
    results = read(path, fresh)
    x, y = shuffled_digits()
    data = (x.view(-1, 1, 8, 8), y)
    ray.init(address="local", num_cpus=SLOTS, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        # The fork servers start once in a session. This first search pays for that, so that no measured one does.
        search(PAPER, 2, 0, data)
        for seed in sorted({*SEEDS} - {row["seed"] for row in results["rows"]}):
            rows = []
            for rule in RULES:
                rows.append(search(rule, TRIALS, seed, data))
                print(*(f"{name} {value}" for name, value in rows[-1].items()), sep="  ", flush=True)
            results["rows"] += rows
            save(path, results, markdown(results))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
