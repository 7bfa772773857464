"""Rules of a user's own, in the sweep and in `tune`."""

from __future__ import annotations

import cProfile
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from hydro_rasda import RaceConfig, RunExists, SweepConfig, TuneResult, loguniform
from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import Event, Widths
from hydro_rasda.problem.objective import OptimizerSettings, supervised
from hydro_rasda.records.summary import AllTrialsFailed
from hydro_rasda.run.events import Callbacks, TrialConfigured
from hydro_rasda.run.journal import read_messages
from hydro_rasda.run.run_folder import Store
from hydro_rasda.run.run_json import read_asked
from hydro_rasda.run.state import Run
from hydro_rasda.schedulers import Continue, PopulationBasedTraining, Range, Stop, SweepRule, SweepState
from hydro_rasda.schedulers.named_rules import RULES, RuleName
from tests.hydro_rasda.conftest import on_threads
from tests.hydro_rasda.heats.test_sweep import FINALS, Clock, Curves, Given, again, configs, epochs
from tests.hydro_rasda.heats.test_sweep import clock as clock
from tests.hydro_rasda.scripted import sweep, untrained

Moves = dict[int, Continue | Stop]


class MedianStopping(SweepRule):
    """A trial stops that is worse than the median of all others at its epoch (Golovin et al. 2017)."""

    def decide(self, sweep: SweepState) -> Moves:
        moves: Moves = {}
        for number, trial in sweep.waiting.items():
            others = [score for score in sweep.scores.get(trial.epoch, {}).values() if math.isfinite(score)]
            if trial.epoch == 0 or trial.score <= median(others):
                if trial.epoch < sweep.max_t:
                    moves[number] = Continue(trial.epoch + 1)
            else:
                moves[number] = Stop()
        return moves


class TopHalfBySlope(SweepRule):
    """All train for two epochs; the half that improved most between them trains to the end."""

    def decide(self, sweep: SweepState) -> Moves:
        if new := sweep.waiting_at(0):
            return {number: Continue(2) for number in new}
        if sweep.training or not sweep.waiting_at(2):
            return {}
        assert sweep.spent == 2 * len(sweep.trials)
        slope = {n: trial.curve[2] - trial.curve[1] for n, trial in sweep.waiting_at(2).items()}
        best_first = sorted(slope, key=slope.__getitem__)
        kept = best_first[: len(slope) // 2]
        return {n: Continue(sweep.max_t) if n in kept else Stop() for n in best_first}


class Population(SweepRule):
    """Every epoch, the worst trial goes on as a copy of the best, with a changed learning rate."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def decide(self, sweep: SweepState) -> Moves:
        at = min((trial.epoch for trial in sweep.waiting.values()), default=sweep.max_t)
        if sweep.training or at == sweep.max_t:
            return {}
        moves: Moves = {number: Continue(at + 1) for number in sweep.waiting}
        if at:
            best_first = [number for number in sweep.best(len(sweep.trials)) if number in sweep.waiting]
            best, worst = best_first[0], best_first[-1]
            lr = sweep.trials[best].config["lr"] * self.factor
            moves[worst] = Continue(at + 1, copy_of=best, changes={"lr": lr})
        return moves


class SecondThoughts(SweepRule):
    """Drops all but the best after an epoch; when that has trained on, brings back the second best."""

    def decide(self, sweep: SweepState) -> Moves:
        if new := sweep.waiting_at(0):
            return {number: Continue(1) for number in new}
        if sweep.training:
            return {}
        if waiting := sweep.waiting_at(1):
            best = sweep.best(1)[0]
            return {number: Continue(3) if number == best else Stop() for number in waiting}
        if len(sweep.scores[3]) == 1:
            return {sweep.best(2)[1]: Continue(3)}
        return {}


class Patient(SweepRule):
    """Takes in six at a time; decides when five have come, or when nothing else is to do."""

    def admit(self, sweep: SweepState) -> int:
        return 6 if not sweep.training else 0

    def decide(self, sweep: SweepState) -> Moves:
        if new := sweep.waiting_at(0):
            return {number: Continue(1) for number in new}
        there = sweep.waiting_at(1)
        if len(there) < 5 and not sweep.idle:
            return {}
        return {number: Continue(3) if i == 0 else Stop() for i, number in enumerate(sorted(there))}


@dataclass
class Moody(SweepRule):
    """Decides by chance, which no rule should; so what a resumed run decides alike, it has from its journal."""

    rng: random.Random = field(default_factory=random.Random)
    asked: list[tuple[int, ...]] = field(default_factory=list)

    def decide(self, sweep: SweepState) -> Moves:
        moves: Moves = {number: Continue(1) for number in sweep.waiting_at(0)}
        if not moves and not sweep.training:
            at = {trial.epoch for trial in sweep.waiting.values()}
            later = {1: 3, 3: 9}.get(min(at, default=9))
            if later is not None:
                kept = self.rng.sample(sorted(sweep.waiting), len(sweep.waiting) // 3)
                moves = {number: Continue(later) if number in kept else Stop() for number in sorted(sweep.waiting)}
        if moves:
            self.asked.append((sweep.spent, *sorted(sweep.waiting)))
        return moves


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    narrow = SweepConfig(surrogate=0.5, fusion=4)
    run = untrained(tmp_path / "run", sweep=narrow, num_samples=27, max_t=9, race=RaceConfig(top_k=2))
    yield run
    run.store.close()


def by_name(run: Run, rule: Any) -> Run:
    """The same run, or its next process, by a rule that its settings name."""
    return replace(again(run, max_t=27, sweep=replace(run.settings.sweep, rule=rule)), space=SPACE)


EPOCHS = {
    "halving": {1: 18, 3: 6, 9: 3},
    "epsilon-net": {1: 18, 3: 6, 9: 3},
    "hyperband": {1: 10, 3: 9, 9: 8},
    "median": {},
    "none": {9: 27},
    "pbt": {9: 27},
}
"""By rule, how many of 27 trials train for how long; of "median" that depends on when each comes."""


OF_ONE_METRIC = [name for name in RULES if name != "epsilon-net"]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("rule", OF_ONE_METRIC)
def test_a_rule_by_name_ends_at_the_last_rung_with_the_best(run: Run, rule: str, devices: int) -> None:
    named = by_name(run, rule)
    found = sweep(named, Given([configs(FINALS)]), Curves(named, devices))
    assert found[0] == 0
    # Trial 4 may be in a bracket with trial 0, or be overtaken by copies of it.
    assert rule in ("hyperband", "pbt") or found == [0, 4]
    trained = Counter(lengths(named).values())
    assert max(trained) == 9
    if devices == 1 and EPOCHS[rule]:
        assert trained == EPOCHS[rule]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("rule", OF_ONE_METRIC)
def test_a_rule_by_name_decides_alike_after_a_kill(run: Run, rule: str, tmp_path: Path) -> None:
    def decided(of: Run) -> dict[str, Any]:
        return {key: unit.value for key, unit in of.store.units().items()}

    whole = by_name(run, rule)
    expected = sweep(whole, Given([configs(FINALS)]), Curves(whole))
    for after in (1, 6):
        broken = by_name(Run(run.problem, Store.open(tmp_path / f"broken-{after}", {}, "auto")), rule)
        with pytest.raises(KeyboardInterrupt):
            sweep(broken, Given([configs(FINALS)]), Stopped(broken, after, devices=1))
        resumed = replace(again(broken), space=SPACE)
        assert sweep(resumed, Given([configs(FINALS)]), Curves(resumed)) == expected
        assert epochs(resumed) == epochs(whole)
        assert decided(resumed) == decided(whole)
        resumed.store.close()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("max_t", [8, 9])
def test_the_plan_tells_whether_a_population_copies_anybody(run: Run, max_t: int) -> None:
    said: list[str] = []
    named = replace(by_name(run, "pbt"), callbacks=Callbacks([lambda event: said.append(getattr(event, "text", ""))]))
    named.problem = named.problem.with_settings(max_t=max_t)
    sweep(named, Given([configs(FINALS)]), Curves(named))
    copies = [key for key, unit in run.store.units().items() if "/group-" in key and "copies" in unit.value]
    assert bool(copies) == (max_t == 9)
    assert any(line.startswith("No trial is copied, as the sweep ends") for line in said) == (max_t == 8)
    assert any(line.startswith("They train by the schedules that the population found") for line in said) == (
        max_t == 9
    )


class Learns(Given):
    """Gives no further batch before it is told of all trials that it gave."""

    def next_trials(self) -> list[Trial]:
        assert len(self.told) == len(self.given) or not self.batches
        return super().next_trials()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("rule", ["none", "median", "pbt", MedianStopping()])
def test_a_searcher_learns_from_a_batch_before_it_gives_the_next(run: Run, rule: Any) -> None:
    asked, own = by_name(run, rule), rule if isinstance(rule, SweepRule) else None
    search = Learns([configs(FINALS[:14]), configs(FINALS[14:])])
    assert sweep(asked, search, Curves(asked), own)
    assert sorted(search.told) == list(range(27))


@pytest.mark.usefixtures("one_process")
def test_all_brackets_of_hyperband_tell_whether_the_first_rung_differs_from_chance(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "hydro_rasda.heats.sweep.warn_of_chance", lambda run, scores, epoch: told.append((len(scores), epoch))
    )
    named = by_name(run, "hyperband")
    sweep(named, Given([configs(FINALS)]), Curves(named))
    assert told == [(27, 1)]


def lengths(run: Run) -> dict[int, int]:
    return {number: len(trained) for number, trained in epochs(run).items()}


class WithoutLength(TopHalfBySlope):
    """A rule that Python takes for false."""

    def __len__(self) -> int:
        return 0


@pytest.mark.usefixtures("one_process")
def test_a_rule_counts_though_it_has_no_length(run: Run) -> None:
    sweep(run, Given([configs(FINALS)]), Curves(run), WithoutLength())
    assert {*lengths(run).values()} == {2, 9}


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("devices", [1, 3])
def test_median_stopping(run: Run, devices: int) -> None:
    found = sweep(run, Given([configs(FINALS)]), Curves(run, devices), MedianStopping())
    assert found[0] == 0
    trained = lengths(run)
    assert trained.pop(0) == 9
    assert 1 <= trained[FINALS.index(26.0)] < max(trained.values()) < 9


@pytest.mark.usefixtures("one_process")
def test_what_came_last_is_decided_by_the_curves(run: Run) -> None:
    devices = Curves(run)
    assert sweep(run, Given([configs(FINALS)]), devices, TopHalfBySlope()) == [0, 4]
    assert sorted(lengths(run).values()) == [2] * 14 + [9] * 13


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("devices", [1, 3])
def test_who_is_brought_back_trains_again_from_its_first_epoch(run: Run, devices: int) -> None:
    backend = Curves(run, devices)
    assert sweep(run, Given([configs(FINALS)]), backend, SecondThoughts()) == [0, 4]
    spans = [(task.span.start, task.span.stop) for task in backend.tasks if 4 in task.members]
    assert spans == [(0, 1), (0, 3)]
    assert epochs(run)[4] == [1, 2, 3]  # each epoch counts once
    assert lengths(run)[8] == 1


@pytest.mark.usefixtures("one_process")
def test_a_rule_can_wait_and_takes_in_as_many_as_it_likes(run: Run) -> None:
    backend = Curves(run, devices=2)
    sweep(run, Given([configs(FINALS)]), backend, Patient())
    begun = [n for task in backend.tasks if task.span.stop == 1 for n in task.members]
    assert begun == sorted(begun, key=lambda n: n // 6)  # six of them, then the next six
    assert sorted(begun) == list(range(27))
    assert sum(length == 3 for length in lengths(run).values()) >= 27 // 6


@pytest.mark.usefixtures("one_process")
def test_a_rule_that_waits_for_idle_devices_is_asked_also_when_time_is_up(run: Run, clock: Clock) -> None:
    few = again(run, num_samples=3, time_budget_s=3.0)  # of which the two groups take more than half
    sweep(few, Given([configs(FINALS[:3])]), Curves(few, clock=clock), Patient())
    assert [n for n, standing in few.history.sweep.trials.items() if standing.dropped] == [1, 2]
    assert [*few.history.sweep.training] == [0]
    assert {few.history.epochs("sweep", n) for n in range(3)} == {1}


class Stopped(Curves):
    """The process ends after so many groups."""

    def __init__(self, run: Run, after: int, devices: int = 2) -> None:
        super().__init__(run, devices, last_first=True)
        self.after = after

    def finished(self) -> Any:
        if len([key for key in self.run.store.units() if "/group-" in key]) >= self.after:
            raise KeyboardInterrupt
        return super().finished()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("after", [1, 3, 8, 10])
def test_a_run_that_was_killed_decides_alike(run: Run, after: int) -> None:
    first = Moody()
    with pytest.raises(KeyboardInterrupt):
        sweep(run, Given([configs(FINALS)]), Stopped(run, after), first)
    before = {key: unit.value for key, unit in run.store.units().items() if "/kept" in key}
    resumed, second = again(run), Moody()
    found = sweep(resumed, Given([configs(FINALS)]), Curves(resumed, devices=2, last_first=True), second)
    assert set(first.asked).isdisjoint(second.asked)
    assert before.items() <= {key: unit.value for key, unit in run.store.units().items()}.items()
    third = Moody()
    once_more = again(run)
    idle = Curves(once_more, devices=2)
    assert sweep(once_more, Given([configs(FINALS)]), idle, third) == found
    assert not idle.tasks
    assert not third.asked


class Lossy(Curves):
    """Some checkpoints are gone."""

    def _require_what_is_needed(self) -> None: ...


@pytest.mark.usefixtures("one_process")
def test_a_copy_whose_source_has_lost_its_checkpoint_trains_anew(run: Run) -> None:
    few: Any = {"num_samples": 4, "max_t": 3, "race": RaceConfig(top_k=4)}
    given, stopped = [configs([0.1, 0.2, 0.3, 0.4])], again(run, **few)
    with pytest.raises(KeyboardInterrupt):
        sweep(stopped, Given(given), Stopped(stopped, 2, devices=1), Population(0.5))
    for file in (run.store.path / "checkpoints").iterdir():
        file.unlink()
    for _ in range(2):
        resumed = again(run, **few)
        sweep(resumed, Given(given), Lossy(resumed), Population(0.5))
        assert [*epochs(resumed).values()] == [[1, 2, 3]] * 4


@pytest.mark.usefixtures("one_process")
def test_a_copy_that_has_not_trained_when_time_ends_is_no_finalist(run: Run, clock: Clock) -> None:
    """Its score is that of the configuration before, and its checkpoint holds other trials."""
    timed = again(run, num_samples=4, time_budget_s=4.0, race=RaceConfig(top_k=4))
    devices = Curves(timed, clock=clock)
    assert sweep(timed, Given([configs([0.1, 0.2, 0.3, 0.4])]), devices, Population(0.5)) == [0, 1, 2]
    assert {task.span.stop for task in devices.tasks} == {1}
    assert timed.history.trials[3].config["lr"] == timed.history.trials[0].config["lr"] * 0.5


@pytest.mark.usefixtures("one_process")
def test_it_is_said_that_a_population_whose_time_ends_goes_on_with_its_last_values(run: Run, clock: Clock) -> None:
    timed = again(run, num_samples=4, time_budget_s=8.0, race=RaceConfig(top_k=4))
    given = Given([configs([0.1, 0.2, 0.3, 0.4])])
    assert sweep(timed, given, Curves(timed, clock=clock), Population(0.5)) == [0, 3, 1]
    *_, line = read_messages(timed.store.path)
    assert line.text == "finalists go on with their last values of lr: `best_schedule` has the earlier ones"


class SaysItsSchedule:
    """As the objectives of `tune_trainer` and `tune_module`."""

    def __call__(self, model: torch.nn.Module, batch: Any) -> Any:
        return supervised()(model, batch)

    def optimizer_settings(self, model: torch.nn.Module, config: Mapping[str, Any]) -> OptimizerSettings:
        return OptimizerSettings({**config, "schedule": "cosine"})


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("objective", "found"), [(supervised(), True), (SaysItsSchedule(), False)])
def test_no_schedule_is_found_for_an_objective_that_says_its_own(run: Run, objective: Any, found: bool) -> None:
    """Two finalists of a lineage trained alike, and were told to differ in their schedules."""
    run.problem = replace(run.problem, objective=objective)
    few = again(run, num_samples=4, max_t=3, race=RaceConfig(top_k=4))
    finalists = sweep(few, Given([configs([0.1, 0.2, 0.3, 0.4])]), Curves(few), Population(0.5))
    assert (max(finalists) >= 4) == found  # trials of their own, for found schedules
    assert ("with their last values" in read_messages(few.store.path)[-1].text) != found


class Sends(SweepRule):
    def __init__(self, moves: Mapping[int, Any], finalists: Sequence[int] = ()) -> None:
        self.moves, self.named = moves, finalists

    def decide(self, sweep: SweepState) -> Mapping[int, Any]:
        return self.moves if not sweep.scores and not sweep.training else {}

    def finalists(self, sweep: SweepState) -> Sequence[int]:
        return self.named


class Foresees(MedianStopping):
    def __init__(self, count: Any) -> None:
        self.count = count

    def epochs(self, sweep: SweepState) -> Any:
        return self.count


def test_a_rule_that_expects_no_epochs_trains_all_the_same(run: Run) -> None:
    expected = sweep(run, Given([configs(FINALS)]), Curves(run), MedianStopping())
    fresh = again(run)
    assert sweep(fresh, Given([configs(FINALS)]), Curves(fresh), Foresees(0)) == expected


def test_bad_rules_are_told_of(run: Run) -> None:
    with pytest.raises(ValueError, match=r"`sweep\.rule` Sends moves trial 99, but must name one of trials 0 to 26"):
        sweep(run, Given([configs(FINALS)]), Curves(run), Sends({99: Stop()}))
    with pytest.raises(ValueError, match=r"`sweep\.rule` Sends names no finalists"):
        sweep(run, Given([configs(FINALS)]), Curves(run), Sends({0: Continue(1)}))
    for count in (-1, math.inf, "many"):
        with pytest.raises(ValueError, match=r"Foresees: epochs.* must be a finite number >= 0"):
            sweep(run, Given([configs(FINALS)]), Curves(run), Foresees(count))
    fresh = again(run, num_samples=28)
    with pytest.raises(AllTrialsFailed, match=r"`sweep\.rule` Sends has none of 28 trials train"):
        sweep(fresh, Given([configs([*FINALS, 0.5])]), Curves(fresh), Sends({}))


def test_more_samples_are_refused_if_a_trial_that_is_copied_has_trained_further_among_fewer(run: Run) -> None:
    few = again(run, num_samples=9)
    sweep(few, Given([configs(FINALS[:9])]), Curves(few), MedianStopping())
    more = again(run)
    with pytest.raises(ValueError, match=r"`num_samples` is more than the run had, .* copies weights; begin another"):
        sweep(more, Given([configs(FINALS)]), Curves(more), Population(1.0))


@pytest.mark.usefixtures("one_process")
def test_a_population_that_was_asked_to_grow_is_as_it_was(quick: Callable[..., TuneResult]) -> None:
    result = quick(num_samples=6, sweep={"rule": "pbt"})
    with pytest.raises(RunExists, match=r"`num_samples` was 6, now 8, but a run whose .* copied weights cannot grow"):
        quick(num_samples=8, sweep={"rule": "pbt"})
    same = quick(num_samples=6, sweep={"rule": "pbt"})
    assert same.finished
    assert len(same.trials) == len(result.trials), "finalists by found schedules are trials of their own, made once"
    assert (same.best_trial, same.cost.sweep_epochs) == (result.best_trial, result.cost.sweep_epochs)


def test_a_callback_may_change_the_configuration_of_a_copy_that_it_is_told(run: Run) -> None:
    def spoils(event: Event) -> None:
        if isinstance(event, TrialConfigured):
            event.config["net"]["depth"] = 9

    run.callbacks = Callbacks([spoils])
    nested = [{**config, "net": {"depth": 2}} for config in configs(FINALS[:9])]
    sweep(run, Given([nested]), Curves(run), Population(1.0))
    assert all(trial.config["net"] == {"depth": 2} for trial in run.history.trials.values())


SPACE = {"lr": loguniform(1e-3, 0.3), "optimizer": "sgd", "momentum": 0.9, "batch_size": 64}


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_copies_go_on_as_what_they_are_copies_of(quick: Callable[..., TuneResult], threads: int) -> None:
    with on_threads(threads):
        same = quick(space=SPACE, num_samples=6, sweep=SweepConfig(rule=Population(1.0)), name="same", max_t=3)
        changed = quick(space=SPACE, num_samples=6, sweep=SweepConfig(rule=Population(0.1)), name="changed", max_t=3)
    trials = same.trials[:6]  # beside the best, the same with a linear decay goes to full size
    swept = [[line["val_loss"] for line in trial.history if line["heat"] == "sweep"] for trial in trials]
    first = [losses[0] for losses in swept]
    best, worst = first.index(min(first)), first.index(max(first))
    assert swept[worst][1] == pytest.approx(swept[best][1], rel=1e-5)
    assert same.trials[worst].config == same.trials[best].config
    changed_lr = changed.trials[worst].config["lr"]
    assert changed_lr == pytest.approx(0.1 * same.trials[best].config["lr"])
    history = [line["val_loss"] for line in changed.trials[worst].history if line["heat"] == "sweep"]
    assert history[0] == swept[worst][0]
    assert history[1] != pytest.approx(swept[worst][1], rel=1e-5)


@pytest.mark.usefixtures("one_process")
def test_tune_sweeps_by_a_rule_of_ones_own(quick: Callable[..., TuneResult]) -> None:
    quick = partial(quick, num_samples=6)
    result = quick(sweep=SweepConfig(rule=MedianStopping()))
    assert math.isfinite(result.best_metric)
    trained = sorted(trial.sweep_epochs for trial in result.trials)
    assert trained[0] == 1
    assert trained[-1] == 4
    again = quick(sweep=SweepConfig(rule=MedianStopping()))
    assert again.best_config == result.best_config
    with pytest.raises(RunExists, match=r"sweep\.rule was 'MedianStopping', now 'halving'"):
        quick()
    quick(sweep=SweepConfig(rule=Population(0.5)), max_t=2, name="population")
    with pytest.raises(RunExists, match=r"`sweep\.rule` has other values"):
        quick(sweep=SweepConfig(rule=Population(2.0)), max_t=2, name="population")


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("rule", OF_ONE_METRIC)
def test_tune_sweeps_by_a_rule_of_this_name(quick: Callable[..., TuneResult], rule: Any, tmp_path: Path) -> None:
    result = quick(sweep={"rule": rule}, num_samples=6)
    assert math.isfinite(result.best_metric)
    assert read_asked(tmp_path / "run")["sweep_rule"] == rule
    again = quick(sweep={"rule": rule}, num_samples=6)
    assert again.best_config == result.best_config
    other = "none" if rule != "none" else "halving"
    with pytest.raises(RunExists, match=rf"sweep\.rule was '{rule}', now '{other}'"):
        quick(sweep={"rule": other}, num_samples=6)


def test_a_rule_is_a_name_or_an_object() -> None:
    known = "one of .'halving', 'hyperband', 'median', 'none', 'pbt', 'epsilon-net'., or an object of a subclass of"
    for odd in (MedianStopping, "asha", None, ["median"]):
        with pytest.raises(ValueError, match=rf"`sweep\.rule` is .*, but must be {known}"):
            SweepConfig(rule=odd)  # type: ignore[arg-type]
    assert repr(SweepConfig()) == "SweepConfig()"
    assert repr(SweepConfig(rule="hyperband")) == "SweepConfig(rule='hyperband')"


class InTwenties(Curves):
    """A device that trains groups of twenty, and looks at nothing else."""

    def plan(self, device: int, kinds: Mapping[str, Sequence[Trial]], width: float | None = None) -> dict[str, Widths]:
        return dict.fromkeys(kinds, Widths(20))

    def _require_what_is_needed(self) -> None:
        pass


@pytest.mark.parametrize(
    "rule", ["halving", *(pytest.param(rule, marks=pytest.mark.slow) for rule in ("pbt", "hyperband", "median"))]
)
def test_a_trial_costs_no_more_among_many(tmp_path: Path, rule: RuleName) -> None:
    """Function calls of a whole sweep, for each of its trials: counts do not depend on load."""

    def calls(count: int) -> float:
        asked = SweepConfig(rule=rule, surrogate=0.5)
        run = untrained(tmp_path / str(count), sweep=asked, num_samples=count, max_t=27)
        drawn = random.Random(0)
        given = [{"lr": drawn.random(), "own": drawn.random(), "final": drawn.random()} for _ in range(count)]
        population = PopulationBasedTraining({"lr": Range(0.0, 1.0), "own": Range(0.0, 1.0)}, 9, 3)
        profile = cProfile.Profile()
        with run.store:
            profile.enable()
            sweep(run, Given([given]), InTwenties(run), population if rule == "pbt" else None)
            profile.disable()
        return sum(entry.callcount for entry in profile.getstats()) / count

    calls(20)  # imports
    assert calls(640) < 1.1 * calls(160)
