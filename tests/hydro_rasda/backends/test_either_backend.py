"""A run that was begun on one backend goes on on the other, as if it had never left the first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydro_rasda import RASDAConfig, TuneResult, loguniform, read_journal
from hydro_rasda.backends.local import LocalDevice
from hydro_rasda.backends.ray.full_size import FullSize
from hydro_rasda.contracts import Span, TargetOutcome, TargetTask
from hydro_rasda.data import Batch
from hydro_rasda.objective import supervised
from hydro_rasda.problem import Problem
from hydro_rasda.run.state import Run
from hydro_rasda.run.targets import recall_targets, targets_over
from hydro_rasda.simulator import read_past_run
from hydro_rasda.stages.race import train_targets
from hydro_rasda.training.ddp import train_full_size
from hydro_rasda.training.full_size import train_target
from tests.hydro_rasda.backends.ray import feeding

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray8", "one_process")]

MAX_T = 8
CONFIGS = [{"lr": lr, "momentum": 0.9, "optimizer": "sgd", "batch_size": 64} for lr in (0.003, 0.1, 0.03, 0.01)]
NUMBERS = list(range(len(CONFIGS)))


def slowly(model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
    """So that a stage can be stopped halfway."""
    time.sleep(0.02)
    return supervised()(model, batch)


@pytest.fixture
def open_run(problem: Problem, tmp_path: Path) -> Iterator[Callable[[], Run]]:
    """Opens the run as the next process would; its trials race over milestones 1, 2, 4 and 8, on one worker each."""
    what = replace(problem, objective=slowly)
    opened: list[Run] = []

    def call() -> Run:
        for run in opened:
            run.store.close()
        rasda = RASDAConfig(grace_period=1, max_workers=1)
        opened.append(feeding.open_run(tmp_path / "run", what, CONFIGS, max_t=MAX_T, rasda=rasda))
        return opened[-1]

    yield call
    opened[-1].store.close()


class Interrupted:
    """This machine, for so many tasks."""

    def __init__(self, run: Run, tasks: int) -> None:
        self._device, self._left = LocalDevice(run, run.problem.device), tasks

    def train_each(self, tasks: Iterable[TargetTask]) -> Iterator[TargetOutcome]:
        for task in tasks:
            if not self._left:
                return
            self._left -= 1
            yield from self._device.train_each([task])

    def race(self, finalists: Sequence[int]) -> bool:
        return False


def on_ray(run: Run) -> FullSize:
    return FullSize(run, {"CPU": 1}, space={"lr": loguniform(1e-3, 1.0)}, train=train_full_size)


def assert_as_alone(run: Run) -> None:
    """Each trial's epochs stand in the journal once, and are those of an unbroken training, weights included."""
    told = [
        (line["trial"], line["epoch"], line["val_loss"])
        for unit in run.store.units().values()
        for line in unit.lines
        if line["event"] == "metrics"
    ]
    for number in NUMBERS:
        task = TargetTask("", number, Span(0, run.epochs("target", number)), None, run.settings.seed)
        alone = train_target(run.problem, run.trials[number], task, None)
        history = [(number, epoch, metrics["val_loss"]) for epoch, metrics in alone.history]
        assert [line for line in told if line[0] == number] == history
        assert alone.state is not None
        saved = run.store.load(run.checkpoints[number])["model"]
        assert all(torch.equal(saved[name], value) for name, value in alone.state["model"].items())
    assert max(run.epochs("target", number) for number in NUMBERS) == MAX_T


def test_ray_goes_on_with_a_race_that_was_interrupted_here(open_run: Callable[[], Run]) -> None:
    run = open_run()
    train_targets(run, NUMBERS, Interrupted(run, tasks=5))  # all to 1, one of the two that go on to 2
    before = {number: run.epochs("target", number) for number in NUMBERS}
    assert sorted(before.values()) == [1, 1, 1, 2]
    run = open_run()
    full = on_ray(run)
    full.offer(NUMBERS)
    full.finish(NUMBERS)
    assert_as_alone(run)
    # The two that were halved away here stay so; the others start where they are.
    entries = read_journal(str(run.store.path / "ray"))
    starts = {int(entry.trial): entry.t for entry in reversed(entries)}
    assert len(starts) == 2
    assert starts == {number: before[number] + 1 for number in starts}
    assert all(run.epochs("target", number) == 1 for number in set(NUMBERS) - set(starts))
    assert targets_over(run, NUMBERS)


def test_this_machine_goes_on_with_a_race_that_was_stopped_on_ray(open_run: Callable[[], Run]) -> None:
    run = open_run()
    full = on_ray(run)
    full.offer(NUMBERS)
    until = time.monotonic() + 1000
    while not run.checkpoints:
        assert time.monotonic() < until
        full.poll()
        time.sleep(0.02)
    full.stop()
    assert not targets_over(run, NUMBERS)
    before = {number: run.epochs("target", number) for number in run.checkpoints}
    recorded = list(run.store.units())
    run = open_run()
    recall_targets(run)
    assert {number: run.epochs("target", number) for number in run.checkpoints} == before
    assert set(train_targets(run, NUMBERS, LocalDevice(run, run.problem.device))) == set(NUMBERS)
    assert list(run.store.units())[: len(recorded)] == recorded
    assert_as_alone(run)
    assert targets_over(run, NUMBERS)


def weights(result: TuneResult) -> dict[str, Tensor]:
    return dict(result.best_model().state_dict())


@pytest.mark.parametrize("ray_first", [False, True])
def test_what_one_backend_finished_the_other_returns(
    quick: Callable[..., TuneResult], tmp_path: Path, ray_first: bool
) -> None:
    there: dict[str, Any] = {"backend": "ray", "resources_per_worker": {"CPU": 2}}
    calls = [there, {}] if ray_first else [{}, there]
    first = quick(**calls[0])
    assert any(record.epochs == 4 for record in first.trials)
    recorded = (tmp_path / "run" / "journal.jsonl").read_bytes()
    second = quick(**calls[1])
    assert (tmp_path / "run" / "journal.jsonl").read_bytes() == recorded
    assert (second.best_config, second.best_metric) == (first.best_config, first.best_metric)
    assert second.trials == first.trials
    assert second.cost.target_epochs == first.cost.target_epochs
    assert weights(second).keys() == weights(first).keys()
    assert all(torch.equal(weights(second)[name], value) for name, value in weights(first).items())
    past = read_past_run(tmp_path / "run")
    assert past.workload.trials == sum(record.surrogate_epochs > 0 for record in first.trials)
    assert past.epoch_seconds is not None
