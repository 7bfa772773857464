"""Population based training in the sweep: copies of sound trials, also by who diverged or failed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fusion import lr_factor
from hydro_rasda import RaceConfig, SweepConfig, TuneResult, choice, load, loguniform, quniform, sample_from, uniform
from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import Event, Finished, History, Task, Widths
from hydro_rasda.heats.finalists import LINEAR
from hydro_rasda.heats.group_queue import Dispatcher
from hydro_rasda.history.lineage import Ancestor, lineages, schedule_of, smoothed
from hydro_rasda.history.lines import WIDTHS_OF, Unit
from hydro_rasda.problem.problem import OwnLoop
from hydro_rasda.run.crash_log import training_of
from hydro_rasda.run.events import RungDecided
from hydro_rasda.run.journal import read_messages
from hydro_rasda.run.record_full_size import try_dropped_again
from hydro_rasda.run.run_folder import Store
from hydro_rasda.run.state import Run
from hydro_rasda.schedulers import PopulationBasedTraining, Range
from hydro_rasda.space.space import explored
from tests.hydro_rasda.heats.test_sweep import Curves, Given, again, epochs
from tests.hydro_rasda.models import Config, mlp
from tests.hydro_rasda.scripted import sweep, untrained

FINALS = (4.0, 3.0, 2.0, 1.0, math.nan, 5.0, 6.0, 7.0)
FAILED = 7
"""The trial of this number raises in its first epochs; the fifth diverges."""


class Fails(Curves):
    """Trains as `Curves`, but for one trial's first group, which raises."""

    def finished(self) -> list[Finished]:
        (done,) = super().finished()
        if done.task.span.start == 0 and FAILED in done.task.members:
            done.outcome.failures[FAILED] = "it raised"
            done.outcome.history[FAILED] = []
        return [done]

    def _history(self, task: Task, number: int, stop: int) -> History:
        history = super()._history(task, number, stop)
        if any(math.isfinite(metrics["val_loss"]) for _, metrics in history):
            return history
        return [(epoch, {**metrics, "train_loss": math.nan}) for epoch, metrics in history]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    asked = SweepConfig(surrogate=0.5, fusion=4, grace_period=3)
    run = untrained(tmp_path / "run", sweep=asked, num_samples=8, max_t=27, race=RaceConfig(top_k=2))
    yield run
    run.store.close()


def configs() -> list[dict[str, Any]]:
    return [{"lr": 0.1 * 2**-i, "final": final, "batch_size": (2, 4)[i % 2]} for i, final in enumerate(FINALS)]


def rule(**changes: Any) -> PopulationBasedTraining:
    arguments = {"explored": {"lr": Range(1e-4, 1.0, log=True)}, "last": 9, "interval": 3}
    return PopulationBasedTraining(**{**arguments, **changes})


def by_size(config: Config, width_ratio: float = 1.0) -> nn.Module:
    """A float decides about its structure."""
    width = int(config["size"] * width_ratio)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


@pytest.mark.parametrize("devices", [1, 3])
def test_who_diverged_or_raised_goes_on_as_a_copy(run: Run, devices: int) -> None:
    backend = Fails(run, devices)
    best, beside = sweep(run, Given([configs()]), backend, rule())
    assert (best, beside) == (8, 9)
    assert run.history.trials[9].config == {
        **run.history.trials[8].config,
        "schedule": "linear",
        "decay_start": 0.0,
        "floor": 0.0,
    }
    assert [line.partition(" trains ")[0] for line in told(run)[-2:]] == ["trial 8", "trial 9"]
    assert lineages(run.store.units(), dict.fromkeys(range(8), 9))[best][0].trial == 3
    assert not run.history.failures
    assert {number: of[-1] for number, of in epochs(run).items()} == dict.fromkeys(range(8), 9)
    assert epochs(run)[FAILED] == [4, 5, 6, 7, 8, 9]
    copies = {number: source for task in backend.tasks for number, source in task.copies.items() if task.span.stop == 6}
    assert copies.keys() == {4, 5, 6, 7}
    assert {*copies.values()} <= {2, 3}
    for number, source in copies.items():
        assert run.history.trials[number].config["batch_size"] == configs()[source]["batch_size"]
    found = lineages(run.store.units(), dict.fromkeys(range(8), 9))
    assert [(a.trial, a.start, a.stop) for a in found[3]] == [(3, 0, 9)]
    assert [(a.trial, a.start, a.stop) for a in found[FAILED]][-1][0] == FAILED
    assert found[best] == found[beside]
    assert found[best] in [found[number] for number in range(8)]
    for number in range(8):
        of = found[number]
        assert of[-1].config == run.history.trials[number].config
        assert [a.start for a in of][1:] == [a.stop for a in of][:-1]
        assert (of[0].start, of[-1].stop) == (0, 9)


def test_the_check_of_the_transfer_trains_the_configurations_that_were_scored(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Config] = []
    monkeypatch.setattr(
        "hydro_rasda.heats.sweep.check_transfer",
        lambda run, scores, *_: checked.extend(dict(run.history.trials[number].config) for number in scores),
    )
    asked = again(run, sweep=replace(run.settings.sweep, check_transfer=True))
    finite = [{**config, "final": float(i)} for i, config in enumerate(configs())]
    sweep(asked, Given([finite]), Curves(asked), rule())
    assert checked == finite


def test_copies_and_finalists_meet_functions_of_the_configuration(run: Run) -> None:
    def fits(config: Mapping[str, Any]) -> bool:
        return bool(config["lr"] < 0.051 and config.get("schedule") != "linear")

    asked = again(run, sweep=replace(run.settings.sweep, constraints=fits))
    fitting = [{**config, "lr": 0.05 - 0.001 * i, "final": float(i)} for i, config in enumerate(configs())]
    finalists = sweep(asked, Given([fitting]), Curves(asked), rule(factors=(1.2, 0.8), quantile=0.5))
    found = lineages(asked.store.units(), {})
    assert all(fits(ancestor.config) for of in found.values() for ancestor in of)
    assert all(fits(asked.history.trials[number].config) for number in finalists)
    changed = [of[-1].config["lr"] != of[-2].config["lr"] for of in found.values() if len(of) > 1]
    assert {*changed} == {True, False}


def test_a_finalist_whose_changes_break_a_constraint_stays_as_it_is(run: Run) -> None:
    """Neither another rate nor a decay meets the constraint here."""
    rates = {config["lr"] for config in configs()}

    def fits(config: Mapping[str, Any]) -> bool:
        return config["lr"] in rates and "schedule" not in config

    asked = again(run, sweep=replace(run.settings.sweep, constraints=fits))
    finite = [{**config, "final": float(i)} for i, config in enumerate(configs())]
    finalists = sweep(asked, Given([finite]), Curves(asked), rule())
    assert len(finalists) == 2
    assert all(number < 8 and fits(asked.history.trials[number].config) for number in finalists)
    assert any(len(of) > 1 for of in lineages(asked.store.units(), {}).values())
    assert not any("trains as trial" in line for line in told(asked))


def test_it_is_said_where_copies_keep_the_learning_rate(run: Run) -> None:
    space = {"lr": sample_from(lambda config: config.scale), "scale": uniform(0.0, 1.0), "final": 0.0, "batch_size": 4}
    sampled = [{**config, "scale": config["lr"]} for config in configs()]
    named = replace(again(run, sweep=replace(run.settings.sweep, rule="pbt")), space=space)
    sweep(named, Given([sampled]), Curves(named))
    assert "copies keep `lr`, as it is no single range or list of floats: they change scale" in told(run)


def test_with_schedule_free_no_finalist_decays(run: Run) -> None:
    free = [{**config, "optimizer": "schedule_free_adamw"} for config in configs()]
    finalists = sweep(run, Given([free]), Fails(run), rule())
    assert len(finalists) == 2
    assert not any("schedule" in run.history.trials[number].config for number in finalists)


def told(run: Run) -> list[str]:
    return [message.text for message in read_messages(run.store.path)]


def test_a_resumed_population_decides_as_the_unbroken_one(run: Run, tmp_path: Path) -> None:
    expected = sweep(run, Given([configs()]), Fails(run), rule())
    whole = {key: (unit.value, unit.lines) for key, unit in run.store.units().items()}
    for after in range(1, sum("/group-" in key for key in whole)):
        broken = Run(run.problem, Store.open(tmp_path / str(after), {}, "auto"))

        class Ends(Fails):
            def finished(self) -> list[Finished]:
                if sum("/group-" in key for key in self.run.store.units()) >= after:  # noqa: B023
                    raise KeyboardInterrupt
                return super().finished()

        with pytest.raises(KeyboardInterrupt):
            sweep(broken, Given([configs()]), Ends(broken), rule())
        resumed = again(broken)
        assert sweep(resumed, Given([configs()]), Fails(resumed), rule()) == expected
        assert {key: (unit.value, unit.lines) for key, unit in resumed.store.units().items()} == whole
        assert not resumed.history.failures
        resumed.store.close()


class LosesOne(Curves):
    """The first of two devices ends with its machine while it measures."""

    lost = False

    def idle(self, task: Task | None = None) -> list[int]:
        return [device for device in super().idle() if device or not self.lost]

    def plan(self, device: int, kinds: Mapping[str, Sequence[Trial]], width: float | None = None) -> dict[str, Widths]:
        self.lost |= device == 0
        return super().plan(device, kinds, width) if device else {}


def test_another_device_measures_where_one_is_lost(run: Run) -> None:
    auto = again(run, sweep=replace(run.settings.sweep, fusion="auto"))
    backend = LosesOne(auto, devices=2)
    sweep(auto, Given([configs()]), backend)
    assert backend.lost
    widths = [unit.value["most"] for key, unit in auto.store.units().items() if "widths-of" in key]
    assert {*widths} == {4}
    assert max(len(group.members) for task in backend.tasks for group in task.groups) == 4


class Measures(Curves):
    """Notes the kinds that it is asked to measure together, which takes three seconds each."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.measured: list[set[str]] = []
        self.now = 100.0

    def plan(self, device: int, kinds: Mapping[str, Sequence[Trial]], width: float | None = None) -> dict[str, Widths]:
        self.measured.append({*kinds})
        self.now += 3.0 * len(kinds)
        return super().plan(device, kinds, width)


def test_a_kind_is_measured_once_and_counts_as_the_time_that_it_took(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    auto = again(run, sweep=replace(run.settings.sweep, fusion="auto"))
    backend = Measures(auto)
    monkeypatch.setattr(time, "perf_counter", lambda: backend.now)
    sweep(auto, Given([configs()]), backend)
    assert len(backend.tasks) > 1
    assert backend.measured == [{*auto.history.kinds.values()}]
    assert [unit.seconds for key, unit in auto.store.units().items() if "widths-of" in key] == [3.0, 3.0]


class Cores(Curves):
    """One device with several cores."""

    def __init__(self, run: Run, count: int) -> None:
        super().__init__(run)
        self._count = count

    def cores(self, device: int) -> int:
        return self._count


@pytest.mark.parametrize(("own", "cores", "groups"), [(False, 1, 1), (False, 2, 2), (True, 1, 1), (True, 2, 8)])
def test_a_task_has_a_group_for_each_core_or_all_trials_of_a_loop_of_the_users(
    run: Run, own: bool, cores: int, groups: int
) -> None:
    """A device trains the trials of such a loop one after another on each core."""
    if own:
        alone = again(run, sweep=replace(run.settings.sweep, fusion=1))
        run = Run(replace(alone.problem, own_loop=OwnLoop(lambda worker: None, None, sweeps=True)), alone.store)
    dispatcher = Dispatcher(run, Cores(run, cores))
    for number, config in enumerate(configs()):
        run.history.trials[number], run.history.kinds[number] = Trial(number, config), "a kind"
        run.history.sweep.admit(number, config)
        run.history.sweep.go_on(number, 3, config)
        dispatcher.add(number, 3)
    _, task = next(dispatcher.tasks([0]))
    assert len(task.groups) == groups
    assert [group.fused for group in task.groups] == [len(group.members) > 1 for group in task.groups]
    assert task.beside == (8 if own else 1)


class MeasuresInTime(Curves):
    """Measures only if the sweep has time left."""

    def plan(self, device: int, kinds: Mapping[str, Sequence[Trial]], width: float | None = None) -> dict[str, Widths]:
        return dict.fromkeys(kinds, Widths(1, assumed=True) if self.run.out_of_time("sweep") else Widths(4))


def test_a_call_with_more_time_measures_what_time_left_unmeasured(run: Run) -> None:
    auto = again(run, time_budget_s=1e-9, sweep=replace(run.settings.sweep, fusion="auto"))
    sweep(auto, Given([configs()]), MeasuresInTime(auto))
    assert auto.history.metrics
    assert not any("widths-of" in key for key in auto.store.units())
    more = again(auto, time_budget_s=None)
    backend = MeasuresInTime(more)
    sweep(more, Given([configs()]), backend)
    assert max(len(group.members) for task in backend.tasks for group in task.groups) == 4
    more.store.close()


def test_trials_at_which_processes_died_train_last_and_alone(run: Run) -> None:
    for number, deaths in ((1, 3), (2, 2), (3, 1)):
        run.store.doing._deaths[training_of([number], 3)] = 0, deaths
    backend = Curves(run)
    sweep(run, Given([configs()]), backend)
    *others, last, very_last = [task.members for task in backend.tasks if task.span.stop == 3]
    assert ([*last], [*very_last]) == ([2], [1])
    assert sorted(number for members in others for number in members) == [0, 3, 4, 5, 6, 7]
    assert max(map(len, others)) > 1


@pytest.mark.usefixtures("one_process")
def test_a_trial_that_was_dropped_while_it_was_built_is_tried_again_and_no_other_one_changes(run: Run) -> None:
    """The configurations that the run has recorded stay where they are in its journal."""
    run.store.doing._deaths["building trial 2"] = 0, 3
    sweep(run, Given([configs()]), Curves(run))
    assert run.history.failures.keys() == {2}
    recorded = run.store.units()["sweep/kinds-from-0"]
    for deaths in (3, 0):
        later = again(run)
        later.store.doing._deaths["building trial 2"] = 0, deaths
        try_dropped_again(later)
        sweep(later, Given([configs()]), Curves(later))
        assert later.history.failures.keys() == ({2} if deaths else set())
        assert next(iter(later.store.units().items())) == ("sweep/kinds-from-0", recorded)
        assert (2 in epochs(later)) == (not deaths)
        run = later
    for read in (again(run), Run(run.problem, Store.read(run.store.path))):
        assert [*read.store.folded_into(read.history)]
        assert not read.history.failures
    lines = [line for unit in run.store.units().values() for line in unit.lines]
    assert len([line for line in lines if line["event"] == "trial" and line["trial"] == 2]) == 1
    run.store.close()


@pytest.mark.parametrize("heat", ["sweep", "middle"])
def test_group_sizes_that_were_assumed_are_measured_again_with_dropped_trials(run: Run, heat: str) -> None:
    """Measuring them may have killed processes."""
    assumed, measured = (f"{heat}{WIDTHS_OF}{kind} on a machine" for kind in ("assumed", "measured"))
    for key in (assumed, measured):
        run.store.record(key, Unit(asdict(Widths(1, assumed=key == assumed))))
    try_dropped_again(run)
    assert [*run.store.units()] == [measured]
    run.store.close()


class Unmeasured(Curves):
    def plan(self, device: int, kinds: Mapping[str, Sequence[Trial]], width: float | None = None) -> dict[str, Widths]:
        return dict.fromkeys(kinds, Widths(1, assumed=True))


def test_no_time_is_foreseen_from_widths_that_were_not_measured(run: Run) -> None:
    auto = again(run, sweep=replace(run.settings.sweep, fusion="auto"))
    for measured in (False, True):
        backend = Curves(auto) if measured else Unmeasured(auto)
        auto.history.trials[0], dispatcher = Trial(0, configs()[0]), Dispatcher(auto, backend)
        auto.history.kinds[0] = f"a kind, {measured}"
        dispatcher.add(0, 3)
        next(dispatcher.tasks([0]))
        assert math.isfinite(dispatcher.foreseen(1, 1)) == measured


@pytest.mark.parametrize(
    ("count", "lanes", "seconds"),
    [
        (8, 1, 6 * 2 / 4 + 2),  # groups of 4
        (8, 2, (6 * 2 / 3 + 2) / 2),
        (4, 1, 3 * 2 / 3 + 1),
        (4, 4, (3 * 2 / 1 + 1) / 4),
    ],
)
def test_an_epoch_is_foreseen_from_the_measured_rates_of_all_kinds(
    run: Run, count: float, lanes: int, seconds: float
) -> None:
    """Trials of one kind take 2 steps an epoch, and those of another take one. A step of any group takes a second."""

    class Rates(Curves):
        def plan(
            self, device: int, kinds: Mapping[str, Sequence[Trial]], width: float | None = None
        ) -> dict[str, Widths]:
            return {"fuses": Widths(4, 2, {1: 1.0, 4: 4.0}), "alone": Widths(1)}

    auto = again(run, sweep=replace(run.settings.sweep, fusion="auto"))
    dispatcher = Dispatcher(auto, Rates(auto))
    for number in range(8):
        kind = "fuses" if number < 6 else "alone"
        batch_size = {"fuses": 2, "alone": 4}[kind]
        auto.history.trials[number] = Trial(number, {"lr": 0.1, "batch_size": batch_size})
        auto.history.kinds[number] = kind
        dispatcher.add(number, 3)
    next(dispatcher.tasks([0]))
    assert dispatcher.foreseen(count, lanes) == pytest.approx(seconds)


def test_a_key_that_makes_another_structure_is_refused(run: Run) -> None:
    sized = [{**config, "size": 8.0 * (i + 1)} for i, config in enumerate(configs())]
    other = replace(run, problem=replace(run.problem, model_fn=by_size))
    with pytest.raises(ValueError, match=r"changes `size` of trial .* leave it out of what the rule explores"):
        sweep(other, Given([sized]), Curves(other), rule(explored={"size": Range(1.0, 99.0)}))


@pytest.mark.parametrize("explored", [{"slope": Range(0.0, 1.0)}, {"size": [8.0]}])
def test_a_key_that_leaves_the_structure_as_it_is_may_change(run: Run, explored: Any) -> None:
    """Here no two trials of one structure differ in it."""
    sizes = [8.0] * 8 if "size" in explored else [8.0 * (i + 1) for i in range(8)]
    sized = [{**config, "size": size, "slope": 1 / size} for config, size in zip(configs(), sizes, strict=True)]
    other = replace(run, problem=replace(run.problem, model_fn=by_size))
    sweep(other, Given([sized]), Curves(other), rule(explored=explored))
    assert any(len(of) > 1 for of in lineages(run.store.units(), {}).values())


SPACE: Mapping[str, Any] = {
    "lr": loguniform(1e-3, 0.3),
    "optimizer": choice(["sgd", "adamw"]),
    "dropout": uniform(0.0, 0.5),
    "batch_size": 64,
}
PBT: dict[str, Any] = {"space": SPACE, "num_samples": 8, "max_t": 9, "sweep": {"rule": "pbt", "fusion": 4}}


@pytest.mark.usefixtures("one_process")
def test_a_population_is_trained_and_its_finalists_by_its_schedules(
    quick: Callable[..., TuneResult], digits: Any
) -> None:
    """Interrupted in the sweep, it ends as an unbroken run does."""
    whole = quick(**PBT, name="whole")

    def interrupt(event: Event) -> None:
        if isinstance(event, RungDecided) and event.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quick(**PBT, callbacks=[interrupt])
    found = quick(**PBT)
    assert [(t.config, t.history) for t in found.trials] == [(t.config, t.history) for t in whole.trials]
    assert [trial.sweep_epochs for trial in found.trials] == 8 * [4] + 2 * [0]
    assert found.best_trial in (8, 9)
    copied = [trial.trial for trial in found.trials[:8] if len(found.lineage(trial.trial)) > 1]
    assert len(copied) >= 2
    for number in copied:
        *_, parent, last = found.lineage(number)
        assert last.config == found.trials[number].config
        assert {key for key in last.config if last.config[key] != parent.config[key]} <= {"lr", "dropout"}
        assert 0.0 <= last.config["dropout"] <= 0.5
    assert found.best_schedule == schedule_of(found.lineage(found.best_trial))
    schedule = found.smoothed_schedule if found.best_trial == 8 else {**found.smoothed_schedule, **LINEAR}
    assert found.best_config.items() >= schedule.items()
    trained: dict[str, Any] = {}
    exec(found.recipe(), trained)
    model = trained["train"](mlp, digits[0], nn.functional.cross_entropy)
    for name, weight in found.best_model().state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], weight, rtol=1e-4, atol=1e-5)
    assert load(found.path).best_schedule == found.best_schedule
    with pytest.raises(ValueError, match="`trial` is 99, but must be a trial of the run"):
        found.lineage(99)
    at_full_width = quick(**{**PBT, "sweep": {**PBT["sweep"], "surrogate": 1}}, name="full width")
    assert len(at_full_width.trials) == 8
    assert sum("finalists go on with their last values" in message.text for message in at_full_width.messages) == 1


def test_a_space_without_floats_is_refused_before_any_work(quick: Callable[..., TuneResult], tmp_path: Path) -> None:
    fixed = {"lr": 0.1, "activation": choice(["relu", "tanh"]), "batch_size": choice([32, 64])}
    with pytest.raises(ValueError, match=r"`space` is .*, but must be one with a float that population based training"):
        quick(space=fixed, sweep={"rule": "pbt"})
    assert not (tmp_path / "run").exists()


def test_a_schedule_has_the_keys_that_changed() -> None:
    configs = [{"lr": 0.1, "momentum": 0.9}, {"lr": 0.08, "momentum": 0.9}, {"lr": 0.1, "momentum": 0.9}]
    ancestors = [Ancestor(k, 3 * k, 3 * k + 3, config) for k, config in enumerate(configs)]
    assert schedule_of(ancestors) == {"lr": [(0.0, 0.1), (pytest.approx(1 / 3), 0.08), (pytest.approx(2 / 3), 0.1)]}
    assert schedule_of(ancestors[:1]) == {}


def test_a_lineage_of_a_trapezoid_is_smoothed_to_that_trapezoid() -> None:
    """Steps of a linear decay from a plateau, with noise on a key that has none."""
    rates = [lr_factor({"schedule": "linear", "decay_start": 0.4, "floor": 0.1}, at + 0.5, 20) for at in range(20)]
    ancestors = [
        Ancestor(at, at, at + 1, {"lr": 0.2 * rate, "lr.head": 0.4 * rate, "p": (0.1, 0.4)[at % 2], "momentum": 0.9})
        for at, rate in enumerate(rates)
    ]
    found = smoothed(ancestors)
    assert found == {
        "lr": pytest.approx(0.2, rel=0.02),
        "lr.head": pytest.approx(0.4, rel=0.02),
        "p": pytest.approx(0.2),
        "schedule": "linear",
        "decay_start": pytest.approx(0.4, abs=0.05),
        "floor": pytest.approx(0.1, rel=0.3),
    }
    scheduled = [replace(ancestor, config={**ancestor.config, "schedule": "cosine"}) for ancestor in ancestors]
    assert smoothed(scheduled).keys() == {"lr", "lr.head", "p"}
    assert smoothed(ancestors[:1]) == {}
    rising = [replace(ancestor, config={"lr": 0.1 * (at + 1)}) for at, ancestor in enumerate(ancestors)]
    assert smoothed(rising).keys() == {"lr"}


def test_schedule_free_optimizers_get_no_schedule() -> None:
    for key in ("optimizer", "optimizer.head"):
        free = {key: "schedule_free_sgd"}
        ancestors = [Ancestor(0, 0, 6, {"lr": 0.1, **free}), Ancestor(0, 6, 9, {"lr": 0.01, **free})]
        assert smoothed(ancestors).keys() == {"lr"}


def test_a_key_that_a_rule_added_keeps_its_last_value() -> None:
    assert smoothed([Ancestor(0, 0, 3, {"lr": 0.1}), Ancestor(0, 3, 9, {"lr": 0.1, "momentum": 0.9})]) == {}


def test_a_population_explores_ranges_and_lists_of_floats() -> None:
    space = {
        "lr": loguniform(1e-3, 0.3),
        "lr.head": loguniform(1e-3, 0.3),
        "momentum": choice([0.9, 0.5]),
        "dropout": uniform(0.0, 0.5),
        "decay_start": uniform(0.0, 0.9),
        "batch_size": choice([32, 64]),
        "rounded": quniform(0.0, 1.0, 0.1),
        "nested": {"slope": uniform(0.0, 1.0)},
        "constant": 0.5,
    }
    found = explored(space)
    assert found.keys() == {"lr", "lr.head", "momentum", "dropout"}
    assert found["momentum"] == (0.5, 0.9)
    assert found["lr"] == Range(1e-3, math.nextafter(0.3, 0.0), log=True)
    assert explored({**space, "optimizer": choice(["sgd", "rmsprop"])}).keys() == found.keys()
    of_a_function = explored({**space, "optimizer": lambda params, lr: torch.optim.SGD(params, lr)})
    assert of_a_function.keys() == {"lr", "lr.head", "dropout"}
    of_a_part = {"optimizer.head": choice(["adam", "sgd"]), "beta1.head": uniform(0.0, 0.9)}
    assert explored({**space, **of_a_part}).keys() == {*found, "beta1.head"}
    own = {**of_a_part, "optimizer.head": lambda params, lr: torch.optim.SGD(params, lr)}
    assert explored({**space, **own}).keys() == found.keys()
    branches = {"by": choice([{"lr": loguniform(1e-3, 0.3)}, {"lr": loguniform(1e-3, 0.3), "p": uniform(0.0, 1.0)}])}
    assert explored(branches).keys() == {"lr", "p"}
