"""Full-size training on ranks against one process with the same global batches."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from ray import tune
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hydro_rasda import RaceConfig, RASDAScheduler, SweepConfig, elastic
from hydro_rasda.backends.ray import RescaledLR
from hydro_rasda.backends.ray.rank_worker import RankWorker
from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import Span
from hydro_rasda.data import Batch, Data, make_batches
from hydro_rasda.problem.problem import Problem
from hydro_rasda.settings.config import TuneConfig
from hydro_rasda.training.full_size import full_size_learner, train_full_size
from hydro_rasda.training.loop import keep_best, train_epochs
from tests.hydro_rasda.backends.ray.trainables import job
from tests.hydro_rasda.ranks import on_ranks

CPU = torch.device("cpu")
MAX_T = 4
Reports = list[dict[str, Any]]


class Model(nn.Module):
    """Doubles, so that ranks and one process differ by rounding alone; a parameter that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out, self.unused = nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(2, 2)
        self.register_buffer("mask", torch.tensor([True, True, False]))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(torch.tanh(self.hidden(x))) * self.mask
        return y


def model_fn(config: dict[str, Any]) -> nn.Module:
    return Model()


def objective(model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
    x, y = batch
    output = model(x)
    return {"loss": F.cross_entropy(output, y), "size": output.square().mean()}


def examples(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, 5, dtype=torch.float64, generator=generator)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def shuffling_loader(count: int, batch_size: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*examples(count)), batch_size, shuffle=True)


def form(name: str, count: int) -> Data:
    if name == "loader":
        return partial(shuffling_loader, count)
    return examples(count) if name == "tensors" else TensorDataset(*examples(count))


def problem(train: int = 103, kind: str = "tensors") -> Problem:
    return Problem(
        model_fn=model_fn,
        objective=objective,
        train_data=make_batches(form(kind, train), "train_data", CPU, 0),
        val_data=make_batches(form(kind, 37), "val_data", CPU, 0),
        settings=TuneConfig(sweep=SweepConfig(surrogate=1), max_t=MAX_T),
        device=CPU,
    )


SGD = {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "batch_size": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "sgd": SGD,
    "adamw": {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1, "batch_size": 8},
    **{kind: {"optimizer": kind, "lr": 0.02, "weight_decay": 0.1, "batch_size": 8} for kind in ("lion", "adafactor")},
    "prodigy": {"optimizer": "prodigy", "lr": 0.5, "d0": 0.05, "eps": 1e-3, "batch_size": 8},
    "schedule-free": {"optimizer": "schedule_free_adamw", "lr": 0.02, "weight_decay": 0.1, "batch_size": 8},
    "clipped": {**SGD, "grad_clip": 0.2},
    "scheduled": {**SGD, "schedule": "cosine", "warmup_epochs": 1.5},
    "in parts": {**SGD, "accumulate": 3},
    "one by one": {**SGD, "batch_size": 1},
    "uneven": {**SGD, "batch_size": 9},
}


def rank_reports(rank: int, world: int, what: Problem, config: dict[str, Any], more: dict[str, Any]) -> Any:
    """Rank 0's reports, and the last state that it saved; the other ranks have none."""
    ours, theirs = Pipe()
    for _ in range(MAX_T):
        theirs.send(None)
    asked = {"config": {"trial": 5, "config": config}, "rank": rank, "world_size": world, "workers": world, **more}
    train_full_size(RankWorker(job(**asked), what, ours))
    reports, saved = [], []
    while theirs.poll():
        _, (metrics, folder) = theirs.recv()
        reports.append(metrics)
        if folder is not None:
            saved.append(torch.load(Path(folder, "worker.pt"), weights_only=True))
            shutil.rmtree(folder)
    return reports, saved


def one_process(
    what: Problem, config: dict[str, Any], sizes: Sequence[tuple[Span, int]], warmup: float = 1, number: int = 5
) -> tuple[list[dict[str, float]], Mapping[str, Tensor]]:
    """Every epoch's metrics and the last weights of one process that trains spans of epochs with so many times the
    batch size, its learning rate following."""
    state: Any = None
    rescaled: Any = None
    history = []
    for span, growth in sizes:
        batch_size = config["batch_size"] * growth
        trial = Trial(number, config)
        learner = full_size_learner(what, trial)
        if state is not None:
            learner.load(state)
        steps = round(warmup * (what.train_data.steps(batch_size) or 0))
        rescaled = RescaledLR(learner.optimizer, growth, "auto", steps, rescaled.state_dict() if rescaled else None)
        for epoch, metrics in train_epochs(learner, what, span, batch_size, [number]):
            metrics = keep_best([learner], what, epoch, metrics)
            history.append({name: values[0] for name, values in metrics.items()})
        state = learner.state()
    return history, state["model"]


def ending_at(max_t: int, what: Problem) -> Problem:
    """A shorter training, whose weights are averaged over as many steps."""
    race = what.settings.race
    return what.with_settings(max_t=max_t, race=replace(race, ema=race.ema * what.settings.max_t / max_t))


def assert_same(reports: Reports, history: list[dict[str, float]]) -> None:
    assert [report["epoch"] for report in reports] == list(range(1, len(history) + 1))
    for report, metrics in zip(reports, history):
        others = {"val_loss_unaveraged", "val_loss_averaged"}
        assert set(metrics) - others == {"train_loss", "train_size", "val_loss", "val_size"}
        if "val_loss_averaged" in report.keys() ^ metrics.keys():
            report, metrics = with_averages(report), with_averages(metrics)
        for name, value in metrics.items():
            assert report[name] == pytest.approx(value, rel=1e-11)


def with_averages(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Have averaged weights count, as they do before the end: the end of a part is not that of the whole training.

    The size is left out, which is then of the other weights.
    """
    found = {name: value for name, value in metrics.items() if name != "val_size"}
    if "val_loss_averaged" in found:
        found |= {"val_loss_unaveraged": found["val_loss"], "val_loss": found.pop("val_loss_averaged")}
    return found


CASES: list[tuple[int, str, str]] = [
    *((103, "tensors", name) for name in CONFIGS),
    (128, "tensors", "sgd"),  # divides evenly
    (65, "tensors", "sgd"),  # a last batch of one joins the batch before it
    (66, "dataset", "sgd"),  # of two, for one of the ranks
    (103, "dataset", "sgd"),
    (103, "loader", "sgd"),
    (3, "tensors", "sgd"),  # fewer examples than ranks
]
"""Training examples, the form of the data and the configuration."""


def reports_of_cases(rank: int, world: int) -> list[Any]:
    """One set of ranks for all cases: to start it takes longer than they do."""
    return [rank_reports(rank, world, problem(train, kind), CONFIGS[name], {}) for train, kind, name in CASES]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_the_first_ranks_train_as_one_process_with_the_batch_that_was_tuned(world: int) -> None:
    first, *others = on_ranks(world, reports_of_cases)
    assert len(first) == len(CASES)
    for (train, kind, name), (reports, saved) in zip(CASES, first):
        print(f"{train} examples, {kind}, {name}")
        history, weights = one_process(problem(train, kind), CONFIGS[name], [(Span(0, MAX_T), 1)])
        assert_same(reports, history)
        assert {(r["workers"], r["global_batch_size"], r["lr_multiplier"]) for r in reports} == {
            (world, CONFIGS[name]["batch_size"], 1.0)
        }
        assert all(0 < report["epoch_seconds"] < 60 for report in reports)
        scales = [report.get("gradient_noise_scale") for report in reports]
        unknown = name == "one by one" or train == 3  # all of a step is with one rank
        assert all(scale is None if unknown else scale >= 0 for scale in scales)
        (last,) = saved
        assert last["iteration"] == MAX_T
        for parameter, value in weights.items():
            torch.testing.assert_close(last["state"]["model"][parameter], value, rtol=1e-11, atol=1e-13)
    assert others == [[([], [])] * len(CASES)] * (world - 1)


def test_one_rank_trains_as_the_local_backend_bit_for_bit() -> None:
    what, config = problem(), CONFIGS["scheduled"]
    reports, (last,) = rank_reports(0, 1, what, config, {})
    history, weights = one_process(what, config, [(Span(0, MAX_T), 1)])
    for report, metrics in zip(reports, history):
        assert metrics.items() <= report.items()
    assert all(torch.equal(last["state"]["model"][name], value) for name, value in weights.items())


def test_the_best_epochs_weights_are_kept_over_restarts(tmp_path: Path) -> None:
    """Here more is better, and the first epoch is the best."""
    what, config = problem().with_settings(mode="max", race=RaceConfig(keep="best")), CONFIGS["sgd"]
    reports, (short,) = rank_reports(0, 1, what.with_settings(max_t=1), config, {})
    torch.save(short, tmp_path / "worker.pt")
    _, (last,) = rank_reports(0, 1, what, config, {"checkpoint": str(tmp_path)})
    best = last["state"]["best"]
    assert (best["epoch"], best["score"]) == (1, reports[0]["val_loss"])
    assert all(torch.equal(best["model"][name], value) for name, value in short["state"]["model"].items())


@pytest.mark.parametrize(("config", "workers"), [("sgd", 1), ("adamw", 2)])
def test_growth_goes_on_from_the_checkpoint_with_a_warm_up(config: str, workers: int, tmp_path: Path) -> None:
    """Counted from the trial's first workers, however many they were."""
    what, chosen = problem(), {**CONFIGS[config], "rescale_warmup_epochs": 2}
    (first, saved), *_ = on_ranks(workers, rank_reports, ending_at(1, what), chosen, {})
    torch.save(saved[-1], tmp_path / "worker.pt")
    more = {"workers": workers, "checkpoint": str(tmp_path)}
    reports, _ = on_ranks(2 * workers, rank_reports, what, chosen, more)[0]
    assert {(r["workers"], r["global_batch_size"]) for r in reports} == {(2 * workers, 16)}
    history, _ = one_process(what, chosen, [(Span(0, 1), 1), (Span(1, MAX_T), 2)], warmup=2)
    assert_same(first + reports, history)
    measured = saved[-1]["measured"]
    assert set(measured["times"]) == {str(workers)}
    assert ("signal" in measured["noise"]) == (workers > 1)
    assert all(("gradient_noise_scale" in r) == (r["workers"] > 1) for r in first + reports)
    assert [r["scaling_efficiency"] for r in first] == [1.0]
    assert all(0 < r["scaling_efficiency"] != 1.0 for r in reports)  # against the first workers' steps
    # 103 examples in batches of 16: 7 steps an epoch, 14 of warm-up; the next step's multiplier is told.
    expected = [1 + min(1.0, (steps + 1) / 14) for steps in (7, 14, 21)]
    assert [r["lr_multiplier"] for r in reports] == pytest.approx(expected)


def test_all_ranks_end_where_one_has_a_loss_that_is_not_finite() -> None:
    x, y = examples(16)
    x[3] = torch.nan
    what = replace(problem(), train_data=make_batches((x, y), "train_data", CPU, 0))  # one step, one rank's example
    reports, saved = on_ranks(2, rank_reports, what, SGD, {})[0]
    assert [report["epoch"] for report in reports] == [1]
    assert [state["iteration"] for state in saved] == [1]


class Record(tune.Callback):  # type: ignore[misc]
    """All results of all trials, which Ray's own files lose where a trial is resumed."""

    def __init__(self) -> None:
        self.results: Reports = []

    def on_trial_result(self, iteration: int, trials: list, trial: Any, result: dict, **info: Any) -> None:
        self.results.append(dict(result))


def run_on_ray(scheduler: Any, trainable: Any, folder: Path) -> tuple[Reports, tune.ResultGrid]:
    record = Record()
    tuner = tune.Tuner(
        trainable,
        param_space={"trial": 5, "config": SGD},
        tune_config=tune.TuneConfig(metric="val_loss", mode="min", scheduler=scheduler, reuse_actors=True),
        run_config=tune.RunConfig(storage_path=str(folder), name="run", verbose=0, callbacks=[record]),
    )
    return record.results, tuner.fit()


def saved_iteration(grid: tune.ResultGrid) -> int:
    with grid[0].checkpoint.as_directory() as folder:
        return int(torch.load(Path(folder, "worker.pt"), weights_only=True)["iteration"])


@pytest.mark.slow
def test_rasda_doubles_workers_and_each_epoch_is_one_process(ray8: None, tmp_path: Path) -> None:
    what = problem()
    scheduler = RASDAScheduler(max_t=MAX_T, max_workers=4)
    reports, grid = run_on_ray(scheduler, elastic(train_full_size, scheduler, data=what), tmp_path)
    assert [(r["workers"], r["global_batch_size"]) for r in reports] == [(1, 8), (2, 16), (4, 32), (4, 32)]
    assert ["gradient_noise_scale" in r for r in reports] == [False, True, True, True]
    assert all(r["scaling_efficiency"] > 0 for r in reports)
    assert_same(reports, one_process(what, SGD, [(Span(0, 1), 1), (Span(1, 2), 2), (Span(2, MAX_T), 4)])[0])
    assert saved_iteration(grid) == MAX_T


@pytest.mark.slow
def test_another_scheduler_of_rays_keeps_the_trials_own_workers(ray8: None, tmp_path: Path) -> None:
    what = problem()
    scheduler = tune.schedulers.ASHAScheduler(max_t=MAX_T, grace_period=MAX_T)
    resources = tune.PlacementGroupFactory([{"CPU": 1}] * 2)
    trainable = tune.with_resources(elastic(train_full_size, scheduler, data=what), resources)
    reports, grid = run_on_ray(scheduler, trainable, tmp_path)
    assert [(r["workers"], r["lr_multiplier"]) for r in reports] == [(2, 1.0)] * MAX_T
    assert_same(reports, one_process(what, SGD, [(Span(0, MAX_T), 1)])[0])
    assert saved_iteration(grid) == MAX_T
