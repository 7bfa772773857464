"""Full-size trials on several devices, of this machine and of Ray: real processes under real gloo, real kills."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hydro_rasda import LocalBackend, RaceConfig, RayBackend, SweepConfig, TuneResult
from hydro_rasda.contracts import Backend, Outcome, Span, full_size_task
from hydro_rasda.data import Batch
from hydro_rasda.heats.race import train_finalists
from hydro_rasda.heats.train_tasks import train_tasks
from hydro_rasda.history.lines import metric_lines
from hydro_rasda.problem.problem import OwnLoop
from hydro_rasda.run.journal import read_messages
from hydro_rasda.run.record_full_size import record_epochs
from hydro_rasda.run.state import Run
from hydro_rasda.training.full_size import train_full_size_trial
from tests.hydro_rasda.backends import finalists
from tests.hydro_rasda.backends.ray.test_ddp import (
    CONFIGS,
    MAX_T,
    Model,
    assert_same,
    objective,
    one_process,
    problem,
    rank_reports,
)
from tests.hydro_rasda.conftest import on_threads
from tests.hydro_rasda.ranks import on_ranks
from tests.hydro_rasda.training.test_user_loop import train as train_own

SCHEDULED = {**CONFIGS["scheduled"], "rescale_warmup_epochs": 1}
STRATEGIES: tuple[Literal["ddp", "fsdp"], ...] = ("ddp", "fsdp")
Open = Callable[..., Run]

pytestmark = pytest.mark.usefixtures("one_process_alone")


@pytest.fixture
def one_process_alone() -> Iterator[None]:
    """On one thread, all that a device does is done in its process."""
    with on_threads(1):
        yield


@pytest.fixture
def open_run(tmp_path: Path) -> Iterator[Open]:
    """Opens the run as the next process would."""
    opened: list[Run] = []

    def call(race: RaceConfig, configs: Any = (SCHEDULED,), **changes: Any) -> Run:
        for run in opened:
            run.store.close()
        what = replace(problem(), **changes)
        opened.append(finalists.open_run(tmp_path / "run", what, list(configs), max_t=MAX_T, race=race))
        return opened[-1]

    yield call
    opened[-1].store.close()


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.slow)])
def two(request: pytest.FixtureRequest) -> Backend:
    """Two devices."""
    if request.param == "local":
        return LocalBackend(["cpu"] * 2)
    request.getfixturevalue("ray8")
    return RayBackend(resources_per_worker={"CPU": 4})


def lines(run: Run, number: int) -> list[dict[str, Any]]:
    return [dict(line) for line in run.history.metrics["race", number]]


def train(run: Run, backend: Backend) -> Outcome:
    """The first trial, to the end."""
    task = full_size_task("key", 0, Span(0, MAX_T), None, run.settings.seed)
    with backend.open(run) as devices:
        (finished,) = train_tasks(devices, [task])
    return finished.outcome


def test_ranks_train_what_those_of_a_script_do_bit_for_bit(two: Backend, open_run: Open) -> None:
    """The same shards, learning rates and checkpoint as `elastic(train_full_size)` has."""
    run = open_run(RaceConfig(workers=2))
    outcome = train(run, two)
    assert outcome.error is None, outcome.error
    reports, (saved,) = on_ranks(
        2, rank_reports, run.problem, SCHEDULED, {"config": {"trial": 0, "config": SCHEDULED}}
    )[0]
    timed = {"epoch", "epoch_seconds", "scaling_efficiency"}
    for (epoch, metrics), report in zip(outcome.epochs, reports, strict=True):
        assert epoch == report["epoch"]
        assert {k: v for k, v in metrics.items() if k not in timed} == {
            k: v for k, v in report.items() if k not in timed
        }
    assert outcome.state["model"].keys() == saved["state"]["model"].keys()
    assert all(torch.equal(value, saved["state"]["model"][name]) for name, value in outcome.state["model"].items())
    assert outcome.more["rescaled"] == saved["rescaled"]
    assert outcome.more["measured"]["noise"] == saved["measured"]["noise"]


@pytest.mark.slow
def test_ranks_that_split_a_model_train_as_those_that_hold_it_whole(two: Backend, open_run: Open) -> None:
    """And leave the same checkpoint."""
    whole, split = (train(open_run(RaceConfig(workers=2, strategy=of)), two) for of in STRATEGIES)
    assert split.error is None, split.error
    for (_, metrics), (_, expected) in zip(split.epochs, whole.epochs, strict=True):
        assert metrics["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-11)
    for name, value in whole.state["model"].items():
        torch.testing.assert_close(split.state["model"][name], value, rtol=1e-11, atol=1e-13)


@pytest.mark.slow
def test_survivors_double_and_each_epoch_is_one_process(two: Backend, open_run: Open) -> None:
    """Two trials race on two devices; of the better one, the epochs are those of one process with as large a batch."""
    configs = [SCHEDULED, {**SCHEDULED, "lr": 1e-6}]
    run = open_run(RaceConfig(grace_period=1, workers=1, max_workers=4), configs)
    with two.open(run) as devices:
        train_finalists(run, [0, 1], devices)
    best, worse = lines(run, 0), lines(run, 1)
    assert [line["workers"] for line in best] == [1, 2, 2, 2]
    assert [line["global_batch_size"] for line in best] == [8, 16, 16, 16]
    assert worse[0]["workers"] == 1
    told = [message.text for message in read_messages(run.store.path)]
    assert "race: trial 0 goes on with 2 workers from epoch 2" in told
    history, weights = one_process(run.problem, SCHEDULED, [(Span(0, 1), 1), (Span(1, MAX_T), 2)], number=0)
    assert_same(best, history)
    saved = run.store.load(run.history.checkpoints[0])["model"]
    for name, value in weights.items():
        torch.testing.assert_close(saved[name], value, rtol=1e-11, atol=1e-13)


@pytest.mark.slow
def test_a_run_goes_on_on_another_number_of_devices(two: Backend, open_run: Open) -> None:
    """On fewer than its first workers, a trial keeps the batch that was tuned; to the last digits it is the same."""
    race = RaceConfig(grace_period=2, workers=2, max_workers=2)
    run = open_run(race)
    with two.open(run) as devices:
        train_finalists(run, [0], finalists.for_tasks(devices, 1))
    assert [line["workers"] for line in lines(run, 0)] == [2, 2]
    run = open_run(race)
    with LocalBackend(["cpu"]).open(run) as devices:
        train_finalists(run, [0], devices)
    assert run.history.epochs("race", 0) == MAX_T
    history, _ = one_process(run.problem, SCHEDULED, [(Span(0, MAX_T), 1)], number=0)
    assert [line["val_loss"] for line in lines(run, 0)] == pytest.approx([of["val_loss"] for of in history], rel=1e-11)


def failing(folder: Path) -> dict[str, Any]:
    """A model function and an objective that the second rank of two fails in while the first waits for it.

    A configuration says how, "dies" or "raises", and how many "times".
    """
    folder.mkdir()

    def model_fn(config: dict[str, Any]) -> nn.Module:
        model = Model()
        model.fails = config  # type: ignore[assignment]
        return model

    def fail_or_train(model: Any, batch: Batch) -> Mapping[str, Tensor]:
        how = str(model.fails["how"])
        if dist.is_initialized() and dist.get_rank() == 1 and len([*folder.glob(f"{how}*")]) < model.fails["times"]:
            (folder / f"{how}-{os.getpid()}").touch()
            if how == "raises":
                raise ArithmeticError("the user's own mistake")
            os.kill(os.getpid(), signal.SIGKILL)
        return objective(model, batch)

    return {"model_fn": model_fn, "objective": fail_or_train}


@pytest.mark.slow
def test_ranks_that_die_are_replaced_and_one_that_raises_is_told_of(
    two: Backend, open_run: Open, tmp_path: Path
) -> None:
    """What dies once trains again to what it would have been; what dies each time fails alone."""
    hows = [("dies once", 1), ("dies ever", 99), ("raises", 1)]
    configs = [{**SCHEDULED, "how": how, "times": times} for how, times in hows]
    run = open_run(RaceConfig(workers=2), configs, **failing(tmp_path / "failures"))
    tasks = [full_size_task(f"key {n}", n, Span(0, MAX_T), None, run.settings.seed) for n in range(len(hows))]
    with two.open(run) as devices:
        done = sorted(train_tasks(devices, tasks), key=lambda finished: finished.task.number)
    again, died, raised = (finished.outcome for finished in done)
    assert again.error is None, again.error
    history, _ = one_process(problem(), SCHEDULED, [(Span(0, MAX_T), 1)], number=0)
    for (_, metrics), expected in zip(again.epochs, history, strict=True):
        assert metrics["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-11)
    assert died.died
    assert "the process that trained it died 2 times: " in str(died.error)
    assert not raised.died
    assert str(raised.error).rstrip().endswith("ArithmeticError: the user's own mistake")


@pytest.mark.slow
def test_a_search_whose_finalists_share_devices(two: Backend, quick: Callable[..., TuneResult]) -> None:
    """Against one device, which trains the same batches alone."""
    race = RaceConfig(workers=2, max_workers=2)
    one, several = (
        quick(race=race, sweep=SweepConfig(fusion=1), name=name, backend=of)
        for name, of in [("1", "local"), ("2", two)]
    )
    assert several.best_metric == pytest.approx(one.best_metric, rel=1e-3)
    trained = [record for record in several.trials if record.epochs]
    assert trained
    assert {line["workers"] for record in trained for line in record.history if line["heat"] == "race"} == {2}


@pytest.mark.slow
def test_ranks_run_a_training_function_of_the_users_own(two: Backend, digits: Any, tmp_path: Path) -> None:
    """It is left where its span ends, on both ranks, and goes on from there."""
    own = replace(problem(), own_loop=OwnLoop(train_own, digits))
    run = finalists.open_run(tmp_path / "run", own, [{"lr": 0.1}], max_t=MAX_T, race=RaceConfig(workers=2))
    tasks = [full_size_task("key", 0, Span(0, 2), None, 0), full_size_task("key", 0, Span(2, MAX_T), "first", 0)]
    with two.open(run) as devices:
        (first,) = (finished.outcome for finished in train_tasks(devices, tasks[:1]))
        assert first.error is None, first.error
        record_epochs(run, 0, metric_lines("race", 0, first.epochs), first.state, **first.more)
        rest = replace(tasks[1], sources=(run.history.checkpoints[0],))
        (second,) = (finished.outcome for finished in train_tasks(devices, [rest]))
    assert not first.ended
    alone = train_full_size_trial(run.problem, run.history.trials[0], replace(tasks[0], span=Span(0, MAX_T)), None)
    history = first.epochs + second.epochs
    assert [epoch for epoch, _ in history] == [epoch for epoch, _ in alone.epochs]
    for (_, metrics), (_, expected) in zip(history, alone.epochs):
        assert metrics["workers"] == 2
        assert metrics["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-4)
    run.store.close()
