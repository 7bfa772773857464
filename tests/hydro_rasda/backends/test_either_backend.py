"""One engine: this machine and a Ray cluster decide alike, and each goes on with what the other began."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.model_selection import StratifiedKFold
from torch import Tensor

from hydro_rasda import LocalBackend, RaceConfig, RayBackend, SweepConfig, TuneResult, choice
from hydro_rasda.contracts import Backend, Event, Span, full_size_task
from hydro_rasda.heats.race import train_finalists
from hydro_rasda.history.full_size import is_race_over
from hydro_rasda.history.lines import Unit
from hydro_rasda.problem.problem import Problem
from hydro_rasda.run.run_folder import Store
from hydro_rasda.run.state import Run
from hydro_rasda.schedulers.named_rules import RULES
from hydro_rasda.simulator import read_past_run
from hydro_rasda.training.full_size import train_full_size_trial
from tests.hydro_rasda.backends import finalists
from tests.hydro_rasda.conftest import SPACE
from tests.hydro_rasda.heats.test_middle_heat import wide

pytestmark = pytest.mark.usefixtures("ray2", "one_process")

Quick = Callable[..., TuneResult]
HERE, THERE = LocalBackend(["cpu"] * 2), RayBackend(resources_per_worker={"CPU": 1})
"""Two devices of one thread each: on more threads, the last digits may be others."""

ONE_HERE, ONE_THERE = LocalBackend(["cpu"]), RayBackend(resources_per_worker={"CPU": 2})
"""One device each, for tests whose answer does not depend on their number: a process more takes seconds to start."""

each_first = pytest.mark.parametrize("backends", [(HERE, THERE), (THERE, HERE)], ids=["here first", "ray first"])


def weights(result: TuneResult) -> dict[str, Tensor]:
    return dict(result.best_model().state_dict())


def units(path: Path) -> dict[str, Unit]:
    return dict(Store.read(path).units())


def decisions(path: Path) -> dict[str, Any]:
    """Who went on from where, and with how many workers."""
    found = {key: unit.value for key, unit in units(path).items() if "kept" in key or "finalists" in key}
    lines = [line for unit in units(path).values() for line in unit.lines if line.get("heat") == "race"]
    return {**found, "workers": sorted((line["trial"], line["epoch"], line.get("workers", 1)) for line in lines)}


# One rung, at which all trials come together before any goes on: else who goes on may depend on which device was first.
RACE: dict[str, Any] = {
    "space": SPACE | {"batch_size": 32, "schedule": "linear", "decay_start": choice([0.5, 0.8]), "floor": 0.1},
    "num_samples": 6,
    "max_t": 8,
    "sweep": SweepConfig(grace_period=4, fusion=1),
    "full_trainings": 2,
}


@pytest.mark.parametrize("max_workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_same_call_decides_alike_and_finds_the_same_winner(quick: Quick, tmp_path: Path, max_workers: int) -> None:
    """To the last digit, where each trial has one worker."""
    race = {"top_k": 4, "grace_period": 1, "max_workers": max_workers}
    here, there = (quick(**RACE, race=race, name=type(of).__name__, backend=of) for of in (HERE, THERE))
    decided = decisions(tmp_path / "LocalBackend")
    assert decisions(tmp_path / "RayBackend") == decided
    assert {workers for *_, workers in decided["workers"]} == {1, max_workers}
    assert len([key for key in decided if key.startswith("race/to-")]) == 4
    assert (there.best_trial, there.best_config) == (here.best_trial, here.best_config)
    if max_workers > 1:
        assert there.best_metric == pytest.approx(here.best_metric, rel=1e-4)
        return
    assert there.best_metric == here.best_metric
    assert [(t.status, t.epochs, t.metric, t.chance) for t in there.trials] == [
        (t.status, t.epochs, t.metric, t.chance) for t in here.trials
    ]
    assert all(torch.equal(weights(there)[name], value) for name, value in weights(here).items())


@pytest.mark.slow
@pytest.mark.usefixtures("smallest_have_a_middle_heat")
def test_a_middle_heat_chooses_alike_on_either_backend(quick: Quick) -> None:
    """To the last digit, though an idle device may begin the leader's full-size model early."""
    asked: dict[str, Any] = {**RACE, "model_fn": wide, "full_trainings": 1}
    asked |= {"sweep": {"surrogate": 1 / 8, "fusion": 1, "grace_period": 4}, "race": {"top_k": 4, "max_workers": 1}}
    here, there = (quick(**asked, name=type(of).__name__, backend=of) for of in (HERE, THERE))
    chosen = [{key: of.value for key, of in units(of.path).items() if "finalists" in key} for of in (here, there)]
    assert chosen[0] == chosen[1]
    assert [units(of.path)["heats"].value["finalists"] for of in (here, there)] == [1, 1]
    assert (there.best_trial, there.best_metric) == (here.best_trial, here.best_metric)
    assert [trial.history for trial in there.trials] == [trial.history for trial in here.trials]
    assert [trial.trial for trial in there.trials if trial.epochs] == chosen[0]["middle/finalists"]


@pytest.mark.slow
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "epsilon-net"])
def test_a_rule_by_name_sweeps_on_either_backend(quick: Quick, tmp_path: Path, rule: str) -> None:
    """Begun on Ray, in the middle of its sweep it goes on here; over, it is found again there."""
    asked: dict[str, Any] = {"num_samples": 6, "max_t": 8, "race": {"max_workers": 1}, "space": RACE["space"]}
    asked["sweep"] = SweepConfig(reduction_factor=2, fusion=2, rule=rule)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        quick(**asked, backend=ONE_THERE, callbacks=[LeavesAfter(tmp_path / "run", "/group-", 2)])
    found = quick(**asked, backend=ONE_HERE)
    # Halving is over when as many are left as become finalists.
    assert max(trial.sweep_epochs for trial in found.trials) == (2 if rule == "halving" else 4)
    over = units(tmp_path / "run")
    again = quick(**asked, backend=ONE_THERE)
    assert units(tmp_path / "run") == over
    assert (again.best_trial, again.best_metric) == (found.best_trial, found.best_metric)


class LeavesAfter:
    """Interrupts a run once its journal has so many units of a heat."""

    def __init__(self, path: Path, prefix: str, count: int) -> None:
        self._path, self._prefix, self._count = path, prefix, count

    def __call__(self, event: Event) -> None:
        if self._path.exists() and sum(self._prefix in key for key in units(self._path)) >= self._count:
            raise KeyboardInterrupt


_whole: list[TuneResult] = []


@pytest.fixture
def whole(quick: Quick, tmp_path_factory: pytest.TempPathFactory) -> TuneResult:
    """A race that nothing interrupts, trained once for all tests."""
    if not _whole:
        _whole.append(quick(**RACE, race=ALONE, storage_path=tmp_path_factory.mktemp("whole"), backend=HERE))
    return _whole[0]


ALONE = {"top_k": 4, "grace_period": 1, "max_workers": 1}


@pytest.mark.slow
@pytest.mark.parametrize("backends", [(ONE_HERE, THERE), (THERE, ONE_HERE)], ids=["here first", "ray first"])
@pytest.mark.parametrize(("prefix", "count"), [("/group-", 2), ("race/trial-", 3), ("race/trial-", 6)])
def test_a_run_goes_on_on_the_other_backend_in_either_stage(
    quick: Quick, whole: TuneResult, tmp_path: Path, backends: tuple[Backend, Backend], prefix: str, count: int
) -> None:
    """As if it had never left the first: nothing is trained twice, and all decisions are those of an unbroken run."""
    leaves = LeavesAfter(tmp_path / "run", prefix, count)
    first, second = backends
    with pytest.raises(KeyboardInterrupt):
        quick(**RACE, race=ALONE, backend=first, callbacks=[leaves])
    before = units(tmp_path / "run")
    found = quick(**RACE, race=ALONE, backend=second)
    after = units(tmp_path / "run")
    assert [*after][: len(before)] == [*before]
    assert decisions(tmp_path / "run") == decisions(whole.path)
    assert (found.best_trial, found.best_metric) == (whole.best_trial, whole.best_metric)
    assert all(torch.equal(weights(found)[name], value) for name, value in weights(whole).items())
    lines = [line for unit in after.values() for line in unit.lines if line["event"] == "metrics"]
    told = [(line["heat"], line["trial"], line["epoch"]) for line in lines]
    assert len(told) == len(set(told))


MAX_T = 8
CONFIGS = [{"lr": lr, "momentum": 0.9, "optimizer": "sgd", "batch_size": 64} for lr in (0.003, 0.1, 0.03, 0.01)]
NUMBERS = list(range(len(CONFIGS)))


@pytest.fixture
def open_run(problem: Problem, tmp_path: Path) -> Iterator[Callable[[], Run]]:
    """Opens the run as the next process would; its trials race over milestones 1, 2, 4 and 8, on one worker each."""
    opened: list[Run] = []

    def call() -> Run:
        for run in opened:
            run.store.close()
        race = RaceConfig(grace_period=1, max_workers=1)
        settings = {"max_t": MAX_T, "race": race, "full_trainings": 0}
        opened.append(finalists.open_run(tmp_path / "run", problem, CONFIGS, **settings))
        return opened[-1]

    yield call
    opened[-1].store.close()


@pytest.mark.slow
@each_first
def test_a_race_goes_on_from_amid_a_milestone(open_run: Callable[[], Run], backends: tuple[Backend, Backend]) -> None:
    """Each trial's epochs stand in the journal once, and are those of an unbroken training, weights included."""
    first, second = backends
    with first.open(run := open_run()) as devices:
        train_finalists(run, NUMBERS, finalists.for_tasks(devices, 5))  # all to 1, one of them to 2
    assert sorted(run.history.epochs("race", number) for number in NUMBERS) == [1, 1, 1, 2]
    with second.open(run := open_run()) as devices:
        train_finalists(run, NUMBERS, devices)
    assert is_race_over(run.history, NUMBERS)
    assert sorted(run.history.epochs("race", number) for number in NUMBERS) == [
        2,
        2,
        4,
        MAX_T,
    ]  # after one epoch, none differs from chance
    for number in NUMBERS:
        task = full_size_task("", number, Span(0, run.history.epochs("race", number)), None, run.settings.seed)
        alone = train_full_size_trial(run.problem, run.history.trials[number], task, None)
        history = [(epoch, metrics["val_loss"]) for epoch, metrics in alone.epochs]
        assert [(line["epoch"], line["val_loss"]) for line in run.history.metrics["race", number]] == history
        saved = run.store.load(run.history.checkpoints[number])["model"]
        assert all(torch.equal(saved[name], value) for name, value in alone.state["model"].items())


@pytest.mark.slow
@pytest.mark.parametrize("ray_first", [False, True])
def test_what_one_backend_finished_the_other_returns(quick: Quick, tmp_path: Path, ray_first: bool) -> None:
    there: dict[str, Any] = {"backend": RayBackend(resources_per_worker={"CPU": 1})}
    calls = [there, {}] if ray_first else [{}, there]
    first = quick(**calls[0])
    assert any(record.epochs == 4 for record in first.trials)
    recorded = (tmp_path / "run" / "journal.jsonl").read_bytes()
    second = quick(**calls[1])
    assert (tmp_path / "run" / "journal.jsonl").read_bytes() == recorded
    assert (second.best_config, second.best_metric) == (first.best_config, first.best_metric)
    assert second.trials == first.trials
    assert second.cost.race_epochs == first.cost.race_epochs
    assert weights(second).keys() == weights(first).keys()
    assert all(torch.equal(weights(second)[name], value) for name, value in weights(first).items())
    past = read_past_run(tmp_path / "run")
    assert past.workload.trials == sum(record.sweep_epochs > 0 for record in first.trials)
    assert past.epoch_seconds is not None


@pytest.mark.slow
def test_folds_are_trained_alike(quick: Quick) -> None:
    sweep = SweepConfig(grace_period=2, fusion=8)
    asked = {"val_data": StratifiedKFold(3), "space": RACE["space"], "num_samples": 6, "sweep": sweep}
    here, there = (quick(**asked, name=type(of).__name__, backend=of) for of in (ONE_HERE, THERE))
    scores = [[(t.status, t.metric, t.spread) for t in result.trials if t.epochs] for result in (here, there)]
    assert scores[0] == scores[1]
    assert here.over == there.over == "3 folds"
    assert all(torch.equal(weights(there)[name], value) for name, value in weights(here).items())
