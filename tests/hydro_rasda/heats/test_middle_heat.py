"""The middle heat: `full_trainings` below 3 trains the best of the sweep on wider surrogates, one or two in full."""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rich.table import Table
from torch import Tensor, nn

import hydro_rasda
from hydro_rasda import RaceConfig, SweepConfig, TuneResult, choice, loguniform
from hydro_rasda.cli import main
from hydro_rasda.common.short_values import show
from hydro_rasda.contracts import Event, History, Task
from hydro_rasda.heats import middle_heat
from hydro_rasda.heats.middle_heat import MiddleHeat, finalists_after, planned
from hydro_rasda.heats.race import Race
from hydro_rasda.history.full_size import run_end, tried_targets
from hydro_rasda.history.history import FINALISTS, HEATS, MIDDLE_ENTERED, MIDDLE_FINALISTS, MiddlePlan
from hydro_rasda.history.lines import Unit
from hydro_rasda.loggers import CSVLogger
from hydro_rasda.plots.page.words import answer
from hydro_rasda.records.comparison_of_runs import compared
from hydro_rasda.records.record_from_journal import Follower
from hydro_rasda.records.report import best_line, best_score, render
from hydro_rasda.records.summary import sum_up
from hydro_rasda.run.events import HeatBegan, HeatEnded, RunBegan, RungDecided
from hydro_rasda.run.state import Run
from hydro_rasda.settings.config import TuneConfig
from tests.hydro_rasda.heats.test_heat import AllHeats
from tests.hydro_rasda.heats.test_sweep import Clock, Given
from tests.hydro_rasda.heats.test_sweep import clock as clock
from tests.hydro_rasda.models import Config, mlp
from tests.hydro_rasda.scripted import sweep, untrained

pytestmark = pytest.mark.usefixtures("one_process", "smallest_have_a_middle_heat")

Quick = Callable[..., TuneResult]


# The choice of the heat.


@pytest.mark.parametrize(
    ("settings", "count", "share", "finalists"),
    [
        ({"full_trainings": 1}, 64, 0.08, 1),
        ({"full_trainings": 1.9}, 64, 0.08, 1),
        ({"full_trainings": 2}, 64, 0.08, 2),
        ({"full_trainings": 2.9}, 64, 0.08, 2),
        ({"full_trainings": 3}, 64, 0.08, 0),
        ({"full_trainings": 0.9}, 64, 0.08, 0),
        ({"full_trainings": 2, "race": RaceConfig(top_k=1)}, 64, 0.08, 1),
        ({"full_trainings": 1}, 64, 0.125, 1),  # eight at an eighth cost a full training
        ({"full_trainings": 1}, 64, 0.13, 0),
        ({"full_trainings": 1}, 4, 0.13, 0),  # more samples may follow
        ({"full_trainings": 2}, 2, 0.08, 0),  # both train at full size
        ({"full_trainings": 1, "sweep": SweepConfig(surrogate=1 / 4)}, 64, 0.06, 0),
        ({"full_trainings": 1, "sweep": SweepConfig(surrogate=1 / 5)}, 64, 0.06, 1),
        ({"full_trainings": 1, "sweep": SweepConfig(repeats=2)}, 64, 0.06, 1),  # 16 models, of which one is in full
        ({"full_trainings": 1, "sweep": SweepConfig(repeats=2)}, 64, 0.07, 0),
        ({"full_trainings": 1, "folds": 3}, 64, 0.06, 0),  # a finalist is three trainings
        ({"full_trainings": 2, "folds": 2}, 64, 0.06, 1),
        ({"full_trainings": 1, "objectives": (("val_loss", "min"), ("macs", "min"))}, 64, 0.06, 0),
    ],
)
def test_the_heat_is_chosen_by_settings_and_counted_operations(
    settings: dict[str, Any], count: int, share: float, finalists: int
) -> None:
    asked = TuneConfig(**settings)
    plan = planned(asked, finalists_after(asked, count), (1e9, 2e7, share * 1e9))
    assert (0 if isinstance(plan, str) else plan.finalists) == finalists
    if isinstance(plan, MiddlePlan):
        assert (plan.width, plan.entrants, plan.shares) == (1 / 4, 8, (0.02, share))


@pytest.mark.parametrize(
    ("operations", "reason"),
    [
        ((1e9, 2e7, 2e8), "it would cost 1.6 full trainings"),
        ((1e8, 2e6, 2e7), "models of 1/4 of the width take about as long to train as models this small"),
        ((0.0, 0.0, 0.0), "models of 1/4 of the width take about as long to train as models this small"),
        ((math.nan, math.nan, math.nan), "models of 1/4 of the width cannot be built"),
    ],
)
def test_if_there_is_no_heat_it_says_why(
    monkeypatch: pytest.MonkeyPatch, operations: tuple[float, ...], reason: str
) -> None:
    monkeypatch.setattr(middle_heat, "LEAST_STEP", 2e8)
    assert planned(TuneConfig(full_trainings=1), 1, operations) == reason


# The heat by script: what each epoch gives, at each width, stands in a trial's configuration.

PLAN = MiddlePlan(1 / 4, 4, 1, (0.02, 0.1))
NUMBER = 9
SWEPT = [float((4 * i) % NUMBER) for i in range(NUMBER)]
"""Scores in the sweep: trials 0, 7, 5 and 3 enter the heat."""
ENTRANTS = [0, 7, 5, 3]
MIDDLE_BEST = [3, 5, 7, 0]
SLOW = 0
"""The trial that is done last in the heat."""


class Heats(AllHeats):
    """`done` has heat, width, members and last epoch of the tasks that are done, in order."""

    def _comes_last(self, task: Task) -> bool:
        return task.width is not None and SLOW in task.members

    def _told(self, task: Task) -> tuple[Any, ...]:
        return task.heat, task.width, task.members, task.span.stop

    def _history(self, task: Task, number: int, stop: int) -> History:
        config = self.run.history.trials[number].config
        final = config["final"] if task.width is None and task.heat == "sweep" else config["middle"]
        scores = {epoch: final - 0.001 * epoch for epoch in range(task.span.start + 1, stop + 1)}
        return [(epoch, {"train_loss": score, "val_loss": score}) for epoch, score in scores.items()]


class Killed(Run):
    """A run whose process ends once it has recorded so many units."""

    most = math.inf

    def record(self, key: str, unit: Unit, again: bool = False) -> Unit:
        unit = super().record(key, unit, again)
        self.most -= 1
        if self.most <= 0:
            raise KeyboardInterrupt
        return unit


def configs() -> list[Config]:
    """In the sweep, trials come in the order of `SWEPT`; at 1/4 of the width, the other way round."""
    return [{"lr": 0.1, "batch_size": 2, "final": final, "middle": 10 - final} for final in SWEPT]


def opened(path: Path, most: float = math.inf, model_fn: Callable[..., nn.Module] = mlp, **settings: Any) -> Run:
    narrow = SweepConfig(surrogate=1 / 8, fusion=1)
    asked = {"sweep": narrow, "num_samples": NUMBER, "max_t": 8, "full_trainings": 1, **settings}
    of = untrained(path, model_fn, **asked)
    run = Killed(of.problem, of.store)
    run.most = most
    return run


def search(run: Run, trains: Heats, plan: MiddlePlan = PLAN) -> list[int]:
    """Do all heats, as `tune` does; return the trials that trained at full size."""
    run.history.plan_middle(run.unit(HEATS, lambda: Unit(asdict(plan))))
    race = Race(run, trains)
    assert run.history.middle is not None
    middle = MiddleHeat(run, trains, run.history.middle, race)
    swept = sweep(run, Given([configs()]), trains)
    with run.store.sweeping():
        finalists = middle.between(swept)
    return race.between(finalists)


def found(run: Run) -> dict[str, Any]:
    """Results, checkpoints, and those decisions that do not depend on idle devices."""
    units = run.store.units()
    summed = sum_up(run.history, tried_targets(run.history, run.history.at_full_size or ()), run.store.path)
    return {
        "decided": {key: unit.value for key, unit in units.items() if "finalists" in key or "entered" in key},
        "winner": (summed.best_trial, summed.best_metric, summed.cost.middle_epochs, summed.cost.race_epochs),
        "records": [(t.trial, t.epochs, t.middle_epochs, t.status, t.history) for t in summed.trials],
        "checkpoints": {path.name for path in (run.store.path / "checkpoints").iterdir()},
        "end": run_end(run.history),
    }


def test_the_best_of_the_ends_at_a_quarter_trains_in_full(tmp_path: Path) -> None:
    with closing((run := opened(tmp_path / "run")).store):
        tried = search(run, trains := Heats(run))
        assert tried == [3], "the worst of those that the sweep let in"
        units = run.store.units()
        assert units[FINALISTS].value == units[MIDDLE_ENTERED].value == ENTRANTS
        assert units[MIDDLE_FINALISTS].value == [3]
        middle = [(members, stop) for _, width, members, stop in trains.done if width == 1 / 4]
        assert sorted(middle) == [((n,), stop) for n in sorted(ENTRANTS) for stop in (4, 8)]
        assert [members for heat, _, members, _ in trains.done if heat == "race"] == [(3,)] * 3
        assert found(run)["end"] == "finished"


def test_two_train_in_full_and_the_second_stops_where_it_is_not_worth_the_rest(tmp_path: Path) -> None:
    with closing((run := opened(tmp_path / "run", race=RaceConfig(top_k=2), full_trainings=2)).store):
        assert search(run, Heats(run), replace(PLAN, finalists=2)) == [3, 5]
        assert {n: run.history.epochs("race", n) for n in (3, 5)} == {3: 8, 5: 6}


def test_idle_devices_change_no_decision_though_the_leader_begins_early(tmp_path: Path) -> None:
    seen = []
    for devices in (1, 2, 5):
        with closing((run := opened(tmp_path / str(devices))).store):
            search(run, trains := Heats(run, devices))
            seen.append(found(run))
        last = max(i for i, (_, width, *_) in enumerate(trains.done) if width is not None)
        early = [members for heat, _, members, _ in trains.done[:last] if heat == "race"]
        assert early == ([(3,)] if devices > 1 else [])
    assert seen[1] == seen[0]
    assert seen[2] == seen[0]


@pytest.mark.parametrize(
    ("devices", "step"), [(2, 3), *(pytest.param(devices, 1, marks=pytest.mark.slow) for devices in (1, 2))]
)
def test_a_run_that_was_killed_after_any_unit_comes_to_the_same(tmp_path: Path, devices: int, step: int) -> None:
    with closing((unbroken := opened(tmp_path / "unbroken")).store):
        search(unbroken, Heats(unbroken, devices))
        expected, keys = found(unbroken), [*unbroken.store.units()]
    first = next(i for i, key in enumerate(keys) if key == FINALISTS)
    for most in range(first, len(keys), step):
        path = tmp_path / f"killed-{most}"
        with closing((killed := opened(path, most)).store), pytest.raises(KeyboardInterrupt):
            search(killed, Heats(killed, devices))
        with closing((goes_on := opened(path)).store):
            search(goes_on, trains := Heats(goes_on, devices))
            assert found(goes_on) == expected, f"killed after {keys[most - 1]}"
            assert len(trains.done) == len({*trains.done})


def test_more_samples_decide_the_heat_anew_and_train_nobody_twice(tmp_path: Path) -> None:
    with closing((few := opened(tmp_path / "run")).store):
        search(few, Heats(few))
    with closing((more := opened(tmp_path / "run")).store):
        more = Run(more.problem.with_settings(num_samples=NUMBER + 1), more.store)
        more.history.plan_middle(more.unit(HEATS, lambda: Unit("")))
        assert more.history.middle is not None
        middle = MiddleHeat(more, trains := Heats(more), more.history.middle, race := Race(more, trains))
        better = {"lr": 0.1, "batch_size": 2, "final": -1.0, "middle": 1.0}
        swept = sweep(more, Given([[*configs(), better]]), trains)
        assert swept == [NUMBER, *ENTRANTS[:3]]
        assert race.between(middle.between(swept)) == [NUMBER, 3]
        assert {n for _, width, members, _ in trains.done if width for n in members} == {NUMBER}
    with closing((reader := opened(tmp_path / "run")).store):
        reader.fold()
        assert reader.history.at_full_size == [NUMBER]


def test_time_that_ends_the_heat_leaves_the_best_so_far_and_more_time_goes_on(tmp_path: Path, clock: Clock) -> None:
    """The sweep takes 13 seconds, the heat would take 32; sweep and heat may take half of the budget."""
    with closing((run := opened(tmp_path / "run", time_budget_s=56.0)).store):
        search(run, Heats(run, clock=clock))
        assert MIDDLE_FINALISTS not in run.store.units()
        trained = {n: run.history.epochs("middle", n) for n in ENTRANTS}
        assert 0 < sum(trained.values()) < 32
        furthest = max(trained.values())
        best = next(n for n in MIDDLE_BEST if trained[n] == furthest)
        assert run.history.entrants == [best]
        assert run_end(run.history) == "out of time"
    with closing((run := opened(tmp_path / "run", time_budget_s=1000.0)).store):
        search(run, Heats(run, clock=clock))
        assert run.store.units()[MIDDLE_FINALISTS].value == [3]
        assert {n: run.history.epochs("middle", n) for n in ENTRANTS} == dict.fromkeys(ENTRANTS, 8)
        assert run_end(run.history) == "finished"


def test_a_sweep_that_time_ends_decides_nothing_for_the_heat(tmp_path: Path, clock: Clock) -> None:
    """The best of the sweep so far trains in full; with more time, the heat has its turn."""
    with closing((run := opened(tmp_path / "run", time_budget_s=16.0)).store):
        assert len(search(run, Heats(run, clock=clock))) == 1
        assert not {FINALISTS, MIDDLE_ENTERED, MIDDLE_FINALISTS} & run.store.units().keys()
        assert run_end(run.history) == "out of time"
    with closing((run := opened(tmp_path / "run", time_budget_s=1000.0)).store):
        search(run, Heats(run, clock=clock))
        assert run.store.units()[MIDDLE_FINALISTS].value == [3]
        assert run_end(run.history) == "finished"


def narrow_fails(config: Config, width_ratio: float = 1.0) -> nn.Module:
    """One trial's model, the best at 1/4 of the width, cannot be made so narrow."""
    if width_ratio == 1 / 4 and config["final"] == SWEPT[3]:
        raise RuntimeError("this model cannot be a quarter as wide")
    return mlp(config, width_ratio)


def none_narrow(config: Config, width_ratio: float = 1.0) -> nn.Module:
    if width_ratio == 1 / 4:
        raise RuntimeError("no model can be a quarter as wide")
    return mlp(config, width_ratio)


def test_where_all_fail_at_a_quarter_the_best_of_the_sweep_trains_in_full(tmp_path: Path) -> None:
    with closing((run := opened(tmp_path / "run", model_fn=none_narrow)).store):
        assert search(run, Heats(run)) == [0]
        assert run_end(run.history) == "finished"


def test_a_model_that_fails_at_a_quarter_is_not_chosen(tmp_path: Path) -> None:
    with closing((run := opened(tmp_path / "run", model_fn=narrow_fails)).store):
        assert search(run, Heats(run)) == [5]
        assert "cannot be a quarter as wide" in run.history.failed["middle", 3]


# The whole search.


class Wide(nn.Sequential):
    """64 -> 128 -> 128 -> 128 -> 10 at full width."""


def wide(config: Config, width_ratio: float = 1.0) -> nn.Module:
    width = int(128 * width_ratio)
    sizes = [64, width, width, width]
    hidden = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    return Wide(*hidden, nn.Linear(width, 10))


ASKED: dict[str, Any] = {
    "model_fn": wide,
    "space": {"lr": loguniform(1e-3, 0.3), "momentum": choice([0.5, 0.9]), "batch_size": 64, "optimizer": "sgd"},
    "num_samples": 12,
    "sweep": {"surrogate": 1 / 8},
    "race": {"top_k": 4},
}


def test_one_full_training_trains_one_model_in_full(quick: Quick, tmp_path: Path) -> None:
    events = list[Event]()
    result = quick(**ASKED, full_trainings=1, callbacks=[events.append])
    middle = [trial for trial in result.trials if trial.middle_epochs]
    assert [trial.middle_epochs for trial in middle] == [4] * 8
    winner = min(middle, key=lambda trial: trial.middle_metric)
    assert [trial.trial for trial in result.trials if trial.epochs] == [winner.trial]
    assert (result.best_trial, result.cost.middle_epochs, result.cost.race_epochs) == (winner.trial, 32, 4)
    assert [event.epochs for event in events if isinstance(event, HeatBegan) and event.heat == "middle"] == [32]
    bounds = [type(event) for event in events if isinstance(event, HeatBegan | HeatEnded)]
    assert bounds == [HeatBegan, HeatEnded] * (len(bounds) // 2)
    (decided,) = (event for event in events if isinstance(event, RungDecided) and event.heat == "middle")
    assert (decided.epoch, decided.candidates, decided.kept) == (4, tuple(t.trial for t in middle), (winner.trial,))
    told = [message.text for message in result.messages]
    assert "Then the best 8 train anew on surrogates of 1/4 of the width, to their ends, for 32 epochs in all." in told
    leads = f"middle heat at epoch 4: 1 of 8 go on; trial {winner.trial} leads with val_loss "
    assert [line for line in told if line.startswith("middle heat at epoch")] == [f"{leads}{winner.middle_metric:.4g}"]
    cost = "Cost of the three heats, by counted operations: about 0.12 + 0.84 + 1.00 full trainings."
    assert cost in told
    assert set(result.curves()["heat"]) == {"sweep", "middle", "race"}
    assert {"middle_metric", "middle_epochs"} <= {*result.dataframe().columns}
    names = [trace.name for trace in hydro_rasda.plots.learning_curves(result).data]
    assert "fell at epoch 4 (7)" in names, "a panel of its own"
    read = Follower(tmp_path / "run").read()
    assert (read.finished, read.best_trial, read.cost) == (True, result.best_trial, result.cost)
    again = quick(**ASKED, full_trainings=1)
    assert (again.cost, again.best_metric) == (result.cost, result.best_metric)


def test_before_the_race_the_best_trial_is_that_of_the_middle_heat(quick: Quick) -> None:
    paths = list[Path]()

    def killed(event: Event) -> None:
        if isinstance(event, RunBegan):
            paths.append(event.path)
        if isinstance(event, HeatBegan) and event.heat == "race":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quick(**ASKED, full_trainings=1, callbacks=[killed])
    record = Follower(*paths).read()
    ends = {trial.trial: trial.middle_metric for trial in record.trials if trial.middle_epochs}
    best = min(ends, key=ends.__getitem__)
    assert (record.best_trial, best_score(record)) == (best, (ends[best], "middle"))
    assert best_line(record) == f"best val_loss {show(ends[best], 4)} in the middle heat (trial {best})"
    found = compared([record], [{}])["found"]
    assert found["best val_loss in the middle heat"] == [ends[best]]
    assert found["epochs of the middle heat"] == [record.cost.middle_epochs]
    assert f"{show(ends[best], 4)} after epoch {record.max_t}" in answer(record)[0]


def test_a_heat_has_one_name_in_journals_events_tables_and_json(
    quick: Quick, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The guide's table of the heats has these names."""

    def printed(*command: str) -> Any:
        capsys.readouterr()
        assert main([*command, "--json"]) == 0
        text = capsys.readouterr().out
        assert not re.search(r"stage|surrogate_|target|full size\"", text)
        return json.loads(text)

    names, events = {"sweep", "middle", "race"}, list[Event]()
    result = quick(**ASKED, full_trainings=1, callbacks=[events.append, CSVLogger()])
    journal = (tmp_path / "run" / "journal.jsonl").read_text()
    lines = [json.loads(line) for line in journal.splitlines()]
    assert {line["heat"] for line in lines if line["event"] == "metrics"} == names
    assert {line["key"].partition("/")[0] for line in lines if line["event"] == "unit"} == {*names, HEATS}
    assert not re.search("stage|surrogate|target", journal)
    assert {vars(event)["heat"] for event in events if "heat" in vars(event)} == names
    with (tmp_path / "run" / "metrics.csv").open() as file:
        assert {row["heat"] for row in csv.DictReader(file)} == names
    shown = printed("show", str(tmp_path / "run"))
    assert {line["heat"] for trial in result.trials for line in trial.history} == names
    assert {name for heat in names for name in (f"{heat}_epochs", f"{heat}_seconds")} < shown["cost"].keys()
    (row,) = printed("runs", str(tmp_path))
    assert row["best_heat"] == "race"
    columns = {"sweep_metric", "sweep_epochs", "middle_metric", "middle_epochs", "metric", "epochs"}
    assert columns < printed("trials", str(tmp_path / "run"))[0].keys()
    (table, *_) = render(result).renderables
    assert isinstance(table, Table)
    assert [column.header for column in table.columns[1:4]] == ["sweep\n(epochs)", "middle\n(epochs)", "race\n(epochs)"]


@pytest.mark.parametrize(
    "asked",
    [
        {"full_trainings": 3},
        {"full_trainings": 0.5},
        {"full_trainings": 1, "sweep": {"surrogate": 1 / 4}},
        {"full_trainings": 1, "model_fn": mlp},
    ],
)
def test_elsewhere_the_finalists_race_as_ever(quick: Quick, asked: dict[str, Any]) -> None:
    result = quick(**ASKED | asked)
    assert result.cost.middle_epochs == 0
    assert len([trial for trial in result.trials if trial.epochs]) == 4
    told = "no middle heat: it would cost "
    assert any(message.text.startswith(told) for message in result.messages) == (asked.get("model_fn") is mlp)


@pytest.mark.parametrize(("more", "there"), [(0, True), (1, False)])
def test_small_models_have_none(quick: Quick, monkeypatch: pytest.MonkeyPatch, more: int, there: bool) -> None:
    """A batch of 32 takes 32 times the multiplications of the layers of `wide`."""
    weights = sum(layer.weight.numel() for layer in wide({}, 1.0).modules() if isinstance(layer, nn.Linear))
    monkeypatch.setattr(middle_heat, "LEAST_STEP", 32 * weights + more)
    result = quick(**ASKED | {"space": {"lr": loguniform(0.01, 0.1), "batch_size": 32}})
    assert (result.cost.middle_epochs > 0) == there


class Counting(nn.Module):
    """`wide`, which counts the epochs' steps of training by width."""

    steps: ClassVar = Counter[int]()

    def __init__(self, config: Config, width_ratio: float) -> None:
        super().__init__()
        self.body = wide(config, width_ratio)

    def forward(self, x: Tensor) -> Tensor:
        hidden: nn.Linear = self.body[0]  # type: ignore[index]
        self.steps[hidden.out_features] += self.training
        y: Tensor = self.body(x)
        return y


def counting(config: Config, width_ratio: float = 1.0) -> nn.Module:
    return Counting(config, width_ratio)


def test_the_heat_trains_at_a_quarter_of_the_width_to_the_end(quick: Quick) -> None:
    """One group of eight: five steps an epoch, and few more that try models out."""
    Counting.steps.clear()
    result = quick(**ASKED | {"model_fn": counting}, full_trainings=1)
    assert result.cost.middle_epochs == 8 * 4
    assert 4 * 5 <= Counting.steps[128 // 4] <= 4 * 5 + 20
    assert set(Counting.steps) == {128 // 8, 128 // 4, 128}
