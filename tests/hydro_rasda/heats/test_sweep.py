from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from hydro_rasda import RaceConfig, SweepConfig
from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import Finished, History, Outcome, Task, Widths
from hydro_rasda.heats.cost_limits import Costs
from hydro_rasda.heats.finalists import finalists_in_time
from hydro_rasda.heats.fusion_kinds import find_kinds
from hydro_rasda.history.history import GROUP, SWEEP_DECISION
from hydro_rasda.history.lines import Unit
from hydro_rasda.history.transfer import transfer_of
from hydro_rasda.problem.problem import Problem
from hydro_rasda.records.summary import AllTrialsFailed
from hydro_rasda.records.timeline import trainings
from hydro_rasda.run.events import Callbacks, HeatBegan, MessageSaid
from hydro_rasda.run.run_folder import Store
from hydro_rasda.run.state import Run
from hydro_rasda.schedulers import SweepRule
from hydro_rasda.schedulers.named_rules import NoStopping
from hydro_rasda.schedulers.sweep_rule import Stop, move_of
from hydro_rasda.settings.config import Mode
from tests.hydro_rasda.models import Config
from tests.hydro_rasda.scripted import sweep, untrained

pytestmark = pytest.mark.usefixtures("one_process")


class Clock:
    """Stands still unless it is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Curves:
    """Devices that train nothing: a trial's metric is what its configuration says, a little better each epoch.

    Groups are done in the order in which they were begun, or the last first. An epoch of a group takes a second, and a
    group ends where the sweep's time does.
    """

    def __init__(self, run: Run, devices: int = 1, last_first: bool = False, clock: Clock | None = None) -> None:
        self.run, self.devices, self.last_first, self.clock = run, devices, last_first, clock or Clock()
        self.speeds = [1.0] * devices
        self.slow = False
        self.tasks: list[Task] = []
        self._under_way: dict[int, Task] = {}

    def idle(self, task: Task | None = None) -> list[int]:
        return [d for d in range(self.devices) if d not in self._under_way]

    def busy(self) -> bool:
        return bool(self._under_way)

    def speed(self, device: int, kind: str) -> float:
        return self.speeds[device]

    def machine(self, device: int) -> str:
        return "a machine"

    def cores(self, device: int) -> int:
        return 1

    def plan(self, device: int, kinds: Mapping[str, Sequence[Trial]], width: float | None = None) -> dict[str, Widths]:
        return dict.fromkeys(kinds, Widths(4))

    def start(self, device: int, task: Task) -> None:
        assert device not in self._under_way
        self.tasks.append(task)
        self._under_way[device] = task

    def finished(self) -> list[Finished]:
        self._require_what_is_needed()
        device = list(self._under_way)[-1 if self.last_first else 0]
        task = self._under_way.pop(device)
        reached = task.span.start
        while reached < task.span.stop and (reached == task.span.start or not self.run.out_of_time("sweep")):
            reached += 1
            self.clock.now += 1.0
        self.clock.now += 0.2 if self.slow else 0.0
        history = {n: self._history(task, n, reached) for n in task.members}
        return [Finished(task, Outcome([{"members": [*task.members], "state": {}}], history, {}))]

    def _require_what_is_needed(self) -> None:
        """No more checkpoints lie there than a trial goes on from, and each is recorded."""
        there = {p.name for p in (self.run.store.path / "checkpoints").iterdir()}
        needed = set(self.run.history.sources.values())
        assert needed <= self.run.store.units().keys()
        if not self.run.store.recorded:
            assert there == {self.run.store.file(key).name for key in needed}
        else:
            assert there <= {self.run.store.file(key).name for key in needed}

    def _history(self, task: Task, number: int, stop: int) -> History:
        sign = 1.0 if self.run.settings.mode == "min" else -1.0
        final = self.run.history.trials[number].config["final"]
        values = {epoch: sign * (final - 0.001 * epoch) for epoch in range(task.span.start + 1, stop + 1)}
        return [(epoch, {"train_loss": value, "val_loss": value}) for epoch, value in values.items()]


class Given:
    """A search that gives its configurations in batches, and remembers what it is told."""

    def __init__(self, batches: Sequence[Sequence[Config]]) -> None:
        self.batches, self.planned = list(batches), sum(map(len, batches))
        self.given: list[Trial] = []
        self.told: dict[int, list[int]] = {}
        self.closed: list[int] = []
        self.late = False

    def next_trials(self) -> list[Trial]:
        if not self.batches:
            return []
        trials = [Trial(len(self.given) + i, config) for i, config in enumerate(self.batches.pop(0))]
        self.given += trials
        return trials

    def hear(self, key: str, unit: Unit) -> None:
        if GROUP.fullmatch(key):
            for number in unit.value["members"]:
                self.told.setdefault(number, []).append(unit.value["stop"])
        elif SWEEP_DECISION.fullmatch(key):
            self.closed += [number for number, *plain in unit.value if isinstance(move_of(plain), Stop)]

    def close(self, number: int) -> None:
        self.closed.append(number)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Of the run, in place of the real one."""
    clock = Clock()
    monkeypatch.setattr("hydro_rasda.run.run_folder.monotonic", clock)
    return clock


def again(run: Run, **settings: Any) -> Run:
    """The same run in another process, with other settings."""
    run.store.close()
    run.store = Store.open(run.store.path, {}, "must")
    return Run(run.problem.with_settings(**settings), run.store)


def epochs(run: Run) -> dict[int, list[int]]:
    """Of each trial, the epochs in its history."""
    return {number: [line["epoch"] for line in lines] for (_, number), lines in run.history.metrics.items()}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    narrow = SweepConfig(surrogate=0.5, reduction_factor=3, fusion=4)
    run = untrained(tmp_path / "run", sweep=narrow, num_samples=27, max_t=27, race=RaceConfig(top_k=1))
    yield run
    run.store.close()


def configs(finals: Sequence[float]) -> list[Config]:
    return [{"lr": 0.1, "final": final, "batch_size": (2, 4)[i % 2]} for i, final in enumerate(finals)]


FINALS = [float((7 * i) % 27) for i in range(27)]
"""A permutation of 0 to 26: trial 0 is best, then trial 4 (7 * 4 = 28 = 27 + 1), then trial 8, ..."""

BEST_FIRST = sorted(range(27), key=lambda n: FINALS[n])


def test_halving_is_over_all_trials_of_a_rung(run: Run) -> None:
    backend = Curves(run)
    assert sweep(run, Given([configs(FINALS)]), backend) == [0]
    for stop, left in ((1, 27), (3, 9), (9, 3)):
        trained = [n for task in backend.tasks if task.span.stop == stop for n in task.members]
        assert sorted(trained) == sorted(BEST_FIRST[:left])


def test_groups_are_compiled_where_that_wins_twice_its_time_by_the_next_milestone(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(
        self: Curves, device: int, kinds: Mapping[str, Sequence[Trial]], width: float | None = None
    ) -> dict[str, Widths]:
        return dict.fromkeys(kinds, Widths(4, 2, {1: 1.0, 4: 4.0}, compiled=2.0, compile_seconds=1.0))

    monkeypatch.setattr(Curves, "plan", plan)
    asked = again(run, sweep=replace(run.settings.sweep, fusion="auto"))
    sweep(asked, Given([[{**config, "batch_size": 2} for config in configs(FINALS)]]), devices := Curves(asked))
    # Of 2 steps an epoch, that take a second each: half of 2, then of 4, then of 12 are won, for 1 second twice.
    found = {(task.span.stop, group.compiled) for task in devices.tasks for group in task.groups if group.fused}
    assert found == {(1, False), (3, False), (9, True)}


@pytest.mark.parametrize(("max_t", "grace_period", "rungs"), [(27, 1, {1, 3, 9}), (26, 1, {1, 3}), (27, 27, {27})])
def test_the_last_rung_leaves_a_training_to_full_size(run: Run, max_t: int, grace_period: int, rungs: set[int]) -> None:
    asked = again(run, max_t=max_t, sweep=replace(run.settings.sweep, grace_period=grace_period))
    assert sweep(asked, Given([configs(FINALS)]), devices := Curves(asked)) == [0]
    assert {task.span.stop for task in devices.tasks} == rungs


def test_the_plan_of_a_grid_counts_all_of_its_points(run: Run) -> None:
    """A grid has more configurations than `num_samples`, which is how often it is tried."""
    grid, events = again(run, num_samples=1), list[Any]()
    grid.callbacks = Callbacks([events.append])
    assert sweep(grid, Given([configs(FINALS)]), Curves(grid)) == [0]
    assert [event.epochs for event in events if isinstance(event, HeatBegan)] == [27 + 9 * 2 + 3 * 6]
    told = [event.text for event in events if isinstance(event, MessageSaid)]
    assert told[0].startswith("27 configurations")
    assert told[1] == "First, surrogates of 1/2 of the width train for 63 epochs in all."


def test_the_plan_of_a_sweep_at_full_width_speaks_of_the_models_themselves(run: Run) -> None:
    wide, told = again(run, sweep=replace(run.settings.sweep, surrogate=1)), list[str]()
    wide.callbacks = Callbacks([lambda event: told.append(getattr(event, "text", ""))])
    sweep(wide, Given([configs(FINALS)]), Curves(wide))
    assert "First, models at full width train for 63 epochs in all." in told


def test_configurations_that_wait_for_their_models_are_admitted_in_order(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Building takes so long that each time two models are built. Without a budget, all might have been."""
    bounds = set[float]()

    def builds_two(problem: Problem, trials: Sequence[Trial], *rest: Any) -> Unit:
        bounds.add(rest[-1])
        return find_kinds(problem, trials[:2], *rest)

    monkeypatch.setattr("hydro_rasda.heats.sweep.find_kinds", builds_two)
    assert sweep(run, Given([configs(FINALS)]), Curves(run)) == [0]
    assert [*run.history.sweep.trials] == [*range(27)]
    assert bounds == {math.inf}


def test_who_trains_first_or_in_which_batch_does_not_matter(run: Run) -> None:
    split = [configs(FINALS)[i : i + 9] for i in (0, 9, 18)]
    assert sweep(run, Given(split), Curves(run, devices=3, last_first=True)) == [0]


def test_groups_count_that_are_done_while_the_transfer_is_checked(run: Run) -> None:
    """An idle device goes on with the best at the first milestone; it may still train when all have come there."""
    done = list[str]()
    at_once = 0

    class Notes(Curves):
        def finished(self) -> list[Finished]:
            nonlocal at_once
            at_once += len({task.heat for task in self._under_way.values()}) > 1
            (finished,) = super().finished()
            done.append(finished.task.heat)
            return [finished]

    checked = again(run, sweep=replace(run.settings.sweep, check_transfer=True))
    assert sweep(checked, Given([configs(FINALS)]), Notes(checked, devices=3)) == [0]
    assert transfer_of(checked.history) is not None
    assert at_once
    assert done.count("race") == 7
    assert done.count("sweep") == sum("/group-" in key for key in checked.store.units())


def test_trials_that_are_compared_by_place_are_checked_by_their_metric(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[tuple[Mapping[int, float], int]] = []
    monkeypatch.setattr("hydro_rasda.heats.sweep.check_transfer", lambda run, *first, **_: checked.append(first[:2]))
    checks = replace(run.settings.sweep, check_transfer=True)
    several = again(run, objectives=(("val_loss", "min"), ("params", "min")), sweep=checks)
    sweep(several, Given([configs(FINALS)]), Curves(several))
    ((scores, epoch),) = checked
    assert epoch == 1
    assert scores == pytest.approx({number: final - 0.001 for number, final in enumerate(FINALS)})


def test_max_mirrors_min(run: Run) -> None:
    mirrored = replace(run, problem=run.problem.with_settings(mode="max", race=RaceConfig(top_k=3)))
    assert sweep(mirrored, Given([configs(FINALS)]), Curves(mirrored)) == [0, 4, 8]


def test_nan_is_worst_in_both_modes(run: Run) -> None:
    modes: tuple[Mode, ...] = ("min", "max")
    for mode in modes:
        finals = [math.nan, 2.0, math.inf, 1.0, -math.inf]
        fresh = Run(run.problem.with_settings(mode=mode, race=RaceConfig(top_k=4)), run.store)
        run.store._units.clear()
        assert sweep(fresh, Given([configs(finals)]), Curves(fresh)) == [3, 1]


def test_all_diverged(run: Run) -> None:
    told = (
        r"all 3 trials diverged or failed by epoch 1 of the sweep: no finite val_loss; lower `lr` or .*journal\.jsonl"
    )
    with pytest.raises(AllTrialsFailed, match=told):
        sweep(run, Given([configs([math.nan] * 3)]), Curves(run))


def test_if_all_that_went_on_diverge_those_stopped_before_are_finalists(run: Run) -> None:
    class BestDiverge(Curves):
        def _history(self, task: Task, number: int, stop: int) -> History:
            late = self.run.history.trials[number].config["final"] < 9.0
            told = super()._history(task, number, stop)
            return [(at, {name: math.nan if late and at > 1 else of for name, of in m.items()}) for at, m in told]

    told: list[str] = []
    run.callbacks = Callbacks([lambda event: told.append(getattr(event, "text", ""))])
    assert sweep(run, Given([configs(FINALS)]), BestDiverge(run)) == [BEST_FIRST[9]]
    assert f"nobody is left; of those stopped before, the best go on: [{BEST_FIRST[9]}]" in " ".join(told)


def test_a_model_that_fails_is_left_out_with_its_traceback(run: Run) -> None:
    trials = configs(FINALS[:4])
    trials[0]["activation"] = "no such activation"
    assert sweep(run, Given([trials]), Curves(run)) == [1]  # 0 would be best; 7 is next
    assert "no such activation" in run.history.failures[0]
    assert list(run.history.failures) == [0]


def test_a_searcher_is_told_of_each_rung_and_of_each_end(run: Run) -> None:
    search = Given([configs(FINALS[:14]), configs(FINALS[14:])])
    sweep(run, search, Curves(run))
    rungs = {3: [1, 3, 9], 9: [1, 3], 27: [1]}
    for place, number in enumerate(BEST_FIRST):
        assert search.told[number] == next(epochs for left, epochs in rungs.items() if place < left)
    assert sorted(search.closed) == list(range(27))


def test_a_rung_cut_short_by_time_keeps_the_best_of_the_deepest(run: Run, clock: Clock) -> None:
    """The first rung is 8 groups of an epoch; of the second's 9 trials, the 4 of the first group train for two more."""
    short = again(run, race=RaceConfig(top_k=2), time_budget_s=2 * 9.5)
    assert sweep(short, Given([configs(FINALS)]), Curves(short, clock=clock)) == [0, 4]
    assert {short.history.epochs("sweep", n) for n in range(27)} == {1, 3}


def test_the_sweep_takes_half_of_a_time_budget(run: Run, clock: Clock) -> None:
    for budget, swept in ((4.0, 2.0), (22.0, 11.0), (23.0, 12.0)):
        timed = again(run, time_budget_s=budget)
        sweep(timed, Given([configs(FINALS)]), Curves(timed, clock=clock))
        assert run.store.swept == swept  # an epoch that has begun is trained to its end


def test_what_full_size_training_took_is_not_the_sweeps(run: Run, clock: Clock) -> None:
    short = again(run, time_budget_s=10.0)
    sweep(short, Given([configs(FINALS)]), Curves(short, clock=clock))
    clock.now += 6.0
    run.store.record("race/trial-0/to-2", Unit(None))
    longer = again(run, time_budget_s=16.0)
    assert longer.seconds_left("sweep") == 3.0
    assert longer.seconds_left("race") == 5.0
    longest = again(run, time_budget_s=12.0)
    assert longest.seconds_left("sweep") == 1.0


@pytest.mark.parametrize("budget", [0.1, 5.0, 21.0])
def test_with_more_time_a_sweep_goes_on_where_it_stood(run: Run, clock: Clock, budget: float) -> None:
    timed = again(run, time_budget_s=budget)
    found = sweep(timed, Given([configs(FINALS)]), Curves(timed, clock=clock))
    before = run.store.swept

    same = again(run, time_budget_s=budget)
    idle = Curves(same, clock=clock)
    assert sweep(same, Given([configs(FINALS)]), idle) == found
    assert not idle.tasks

    longer = again(run)
    assert sweep(longer, Given([configs(FINALS)]), Curves(longer, clock=clock)) == [0]
    rungs = {3: [1, 2, 3, 4, 5, 6, 7, 8, 9], 9: [1, 2, 3], 27: [1]}
    for place, number in enumerate(BEST_FIRST):
        assert epochs(longer)[number] == next(trained for left, trained in rungs.items() if place < left)
    if budget == 21.0:  # it ended between the two epochs of a group, which goes on from there
        assert (before, run.store.swept) == (11, 8 + 3 * 2 + 6)


@pytest.mark.parametrize("rule", [None, NoStopping(9)])
def test_where_building_models_takes_all_the_time_the_others_wait_for_more(
    run: Run, clock: Clock, rule: SweepRule | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hydro_rasda.heats.sweep.BUILDING_S", 0.0)
    said: list[str] = []
    for _ in range(2):
        timed = again(run, time_budget_s=1e-9)
        timed.callbacks = Callbacks([lambda event: said.append(getattr(event, "text", ""))])
        clock.now += 1.0
        assert sweep(timed, Given([configs(FINALS)]), Curves(timed, clock=clock), rule) == [0]
        assert [*timed.history.trials] == [0]
    assert said.count("there was time to build the models of 1 of 27 configurations") == 2
    longer, whole = again(run), replace(run, store=Store.open(run.store.path.parent / "whole", {}, "auto"))
    found = sweep(longer, Given([configs(FINALS)]), Curves(longer, clock=clock), rule)
    assert found == sweep(whole, Given([configs(FINALS)]), Curves(whole, clock=clock), rule)
    assert epochs(longer) == epochs(whole)
    whole.store.close()


def test_where_measuring_costs_takes_all_the_time_the_others_wait_for_more(
    run: Run, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[float] = []

    def of(self: Costs, config: Config) -> dict[str, float]:
        measured.append(config["final"])
        return {"macs": 1.0}

    monkeypatch.setattr(Costs, "of", of)
    monkeypatch.setattr("hydro_rasda.heats.sweep.BUILDING_S", 0.0)
    timed = again(run, time_budget_s=1e-9)
    clock.now += 1.0
    assert sweep(timed, Given([configs(FINALS)]), Curves(timed, clock=clock)) == [0]
    assert measured == FINALS[:1]
    assert timed.history.costs == {0: {"macs": 1.0}}
    longer = again(run)
    assert sweep(longer, Given([configs(FINALS)]), Curves(longer, clock=clock)) == [0]
    assert measured == FINALS


def test_where_drawing_took_all_the_time_the_others_compete_later(run: Run) -> None:
    worst_first = configs([float(27 - n) for n in range(27)])
    late = Given([worst_first[:1]])
    late.late = True
    timed = again(run, max_t=1, time_budget_s=1e-9)
    assert sweep(timed, late, Curves(timed)) == [0]
    longer = again(run, max_t=1)
    assert sweep(longer, Given([worst_first]), Curves(longer)) == [26]
    same = again(run, max_t=1, time_budget_s=1e-9)
    assert sweep(same, Given([worst_first]), idle := Curves(same)) == [26]
    assert not idle.tasks


def test_a_budget_that_was_spent_between_two_groups_stays_spent(run: Run, clock: Clock) -> None:
    timed = again(run, time_budget_s=2 * 5.9)
    devices = Curves(timed, clock=clock)
    devices.slow = True
    sweep(timed, Given([configs(FINALS)]), devices)
    assert len(devices.tasks) == 5  # the last was recorded at 5.8 s
    same = again(run, time_budget_s=2 * 5.9)
    idle = Curves(same, clock=clock)
    sweep(same, Given([configs(FINALS)]), idle)
    assert not idle.tasks


def test_whom_fewer_samples_let_go_on_more_may_not(run: Run) -> None:
    worst_first = [float(27 - n) for n in range(27)]
    few = again(run, num_samples=9)
    assert sweep(few, Given([configs(worst_first[:9])]), Curves(few)) == [8]
    more = again(run)
    assert sweep(more, Given([configs(worst_first)]), Curves(more)) == [26]
    decided = [key.rpartition("-")[0] for key in run.store.units() if "/kept" in key]
    assert decided == [f"sweep/to-{stop}/kept/of-{n}" for n, stop in ((9, 1), (3, 3), (27, 1), (9, 3), (3, 9))]
    lines = [
        (line["trial"], line["epoch"]) for unit in run.store.units().values() for line in unit.lines if "epoch" in line
    ]
    assert len(lines) == len(set(lines))


@pytest.mark.parametrize("begin_with", [1, 9, 18])
def test_a_run_that_is_given_more_samples_ends_as_one_that_had_them_at_first(run: Run, begin_with: int) -> None:
    few = again(run, num_samples=begin_with)
    sweep(few, Given([configs(FINALS[:begin_with])]), Curves(few))
    trained = {number: len(lines) for number, lines in epochs(few).items()}
    more = again(run)
    devices = Curves(more)
    assert sweep(more, Given([configs(FINALS)]), devices) == [0]
    for place, number in enumerate(BEST_FIRST):
        reached = next(stop for left, stop in ((3, 9), (9, 3), (27, 1)) if place < left)
        assert epochs(more)[number] == list(range(1, max(reached, trained.get(number, 0)) + 1))
    lines = [
        (line["trial"], line["epoch"]) for unit in run.store.units().values() for line in unit.lines if "epoch" in line
    ]
    assert len(lines) == len(set(lines))
    from_their_start = [n for task in devices.tasks if task.span.start == 0 for n in task.members if n in trained]
    assert len(from_their_start) == len(set(from_their_start))
    assert all(trained[n] < epochs(more)[n][-1] for n in from_their_start)  # halved away then, in the race now
    assert from_their_start


def test_on_several_devices_a_run_that_is_given_more_samples_goes_on(run: Run) -> None:
    few = again(run, num_samples=18)
    sweep(few, Given([configs(FINALS[:18])]), Curves(few, devices=3, last_first=True))
    more = again(run)
    assert sweep(more, Given([configs(FINALS)]), Curves(more, devices=3, last_first=True)) == [0]
    assert all(of == list(range(1, len(of) + 1)) for of in epochs(more).values())
    resumed = again(run)
    idle = Curves(resumed, devices=3)
    assert sweep(resumed, Given([configs(FINALS)]), idle) == [0]
    assert not idle.tasks


def test_finalists_of_surrogates_as_wide_as_the_model_keep_their_checkpoints(run: Run) -> None:
    run.problem = run.problem.with_settings(sweep=SweepConfig(surrogate=1))
    for _ in range(2):
        full = again(run, race=RaceConfig(top_k=2))
        finalists = sweep(full, Given([configs(FINALS)]), Curves(full))
        assert sorted(full.history.sources) == sorted(finalists)
        assert all(full.store.has(key) for key in full.history.sources.values())
        assert len(list((run.store.path / "checkpoints").iterdir())) == len(set(full.history.sources.values()))


def test_checkpoints_of_the_sweep_are_gone_after_it(run: Run) -> None:
    sweep(run, Given([configs(FINALS)]), Curves(run))
    assert not list((run.store.path / "checkpoints").iterdir())


def rounded_width(config: Config, width_ratio: float = 1.0) -> nn.Module:
    width = int(config["width"] * width_ratio)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 10))


def test_surrogates_of_targets_of_different_width_are_not_fused(run: Run) -> None:
    backend = Curves(run)
    run.problem = replace(run.problem, model_fn=rounded_width)
    trials = [{"lr": 0.1, "final": float(w), "width": w, "batch_size": 4} for w in (32, 33, 32)]
    assert rounded_width(trials[0], 0.5)[0].weight.shape == rounded_width(trials[1], 0.5)[0].weight.shape  # type: ignore[index]
    sweep(run, Given([trials]), backend)
    assert [task.members for task in backend.tasks if task.span.stop == 1] == [(0, 2), (1,)]


@pytest.mark.parametrize("last_first", [False, True])
def test_several_devices_end_with_the_same_best(run: Run, last_first: bool) -> None:
    devices = Curves(run, devices=3, last_first=last_first)
    assert sweep(run, Given([configs(FINALS)]), devices) == [0]


def test_a_device_goes_on_while_the_last_of_a_rung_are_under_way(run: Run) -> None:
    sweep(run, Given([configs(FINALS)]), Curves(run, devices=2, last_first=True))
    stops = [unit.value["stop"] for key, unit in run.store.units().items() if "/group-" in key]
    assert stops.index(3) < max(i for i, stop in enumerate(stops) if stop == 1)


def test_a_faster_device_takes_more(run: Run) -> None:
    wide = Run(run.problem.with_settings(sweep=replace(run.settings.sweep, fusion=64)), run.store)
    devices = Curves(wide, devices=2)
    devices.speeds = [3.0, 1.0]
    same = [config | {"batch_size": 4} for config in configs(FINALS[:16])]
    assert sweep(wide, Given([same]), devices) == [0]
    assert [len(task.members) for task in devices.tasks[:2]] == [12, 4]


def test_who_has_lost_a_checkpoint_where_time_ended_a_group_trains_all_epochs_again(run: Run, clock: Clock) -> None:
    """The group begins its first span twice. The second time, time ends it before it is where it was."""
    few: Any = {"num_samples": 4, "sweep": replace(run.settings.sweep, grace_period=3)}
    of_one_kind = [config | {"batch_size": 4} for config in configs([0.1, 0.2, 0.3, 0.4])]
    spans = []
    for budget in (4.0, 6.0, None):
        timed = again(run, time_budget_s=budget, **few)
        devices = Curves(timed, clock=clock)
        assert sweep(timed, Given([of_one_kind]), devices) == [0]
        spans.append([(task.span.start, task.span.stop) for task in devices.tasks])
        if budget == 4.0:
            assert {timed.history.epochs("sweep", n) for n in range(4)} == {2}
            for file in (run.store.path / "checkpoints").iterdir():
                file.unlink()
    assert spans == [[(0, 3)], [(0, 3)], [(1, 3)]]
    assert [*epochs(timed).values()] == [[1, 2, 3]] * 4
    assert [(one.start, one.stop) for one in trainings(run.store.units())] == [(0, 3), (0, 3), (1, 3)]


def test_a_sweep_whose_time_was_spent_begins_nothing_if_its_call_is_repeated(run: Run, clock: Clock) -> None:
    """Time may pass after its last group."""
    timed, search = again(run, time_budget_s=100.0), Given([configs(FINALS)])
    sweep(timed, search, Curves(timed, clock=clock))
    assert timed.store.swept < 50.0
    with timed.store.sweeping():
        clock.now += 50.0
        assert finalists_in_time(timed, search) == [0]
    repeated = again(timed)
    assert repeated.out_of_time("sweep")
    assert not repeated.out_of_time("race")
    repeated.store.close()


class MetricComesLate(Curves):
    """The metric is NaN before the third epoch, though the training loss is finite."""

    def _history(self, task: Task, number: int, stop: int) -> History:
        found = super()._history(task, number, stop)
        return [(epoch, {**of, "val_loss": math.nan if epoch < 3 else of["val_loss"]}) for epoch, of in found]


def test_time_may_end_a_group_where_its_metric_is_not_known_yet(run: Run, clock: Clock) -> None:
    few: Any = {"num_samples": 4, "sweep": replace(run.settings.sweep, grace_period=3)}
    given = [[config | {"batch_size": 4} for config in configs([0.1, 0.2, 0.3, 0.4])]]
    timed = again(run, time_budget_s=4.0, **few)
    told = r"all 4 trials that had time to begin diverged or failed by epoch 2 of the sweep"
    with pytest.raises(AllTrialsFailed, match=told):
        sweep(timed, Given(given), MetricComesLate(timed, clock=clock))
    longer = again(run, **few)
    assert sweep(longer, Given(given), MetricComesLate(longer, clock=clock)) == [0]
    assert [*epochs(longer).values()] == [[1, 2, 3]] * 4
