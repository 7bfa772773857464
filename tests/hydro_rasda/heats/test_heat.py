"""Two heats at once: a device that has nothing to do begins the race of the sweep's leader."""

from __future__ import annotations

import math
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hydro_rasda import RaceConfig
from hydro_rasda.contracts import Finished, Outcome, Task
from hydro_rasda.heats.race import Race
from hydro_rasda.history.full_size import run_end, tried_targets
from hydro_rasda.history.history import CALL, FINALISTS
from hydro_rasda.history.lines import Unit, failure_line
from hydro_rasda.records.summary import sum_up
from hydro_rasda.records.timeline import best_over_time, trainings
from hydro_rasda.run.crash_log import DROPPED
from hydro_rasda.run.journal import read_messages
from hydro_rasda.run.record_full_size import try_dropped_again
from hydro_rasda.run.run_folder import Store
from hydro_rasda.run.state import Run
from hydro_rasda.schedulers import PopulationBasedTraining, Range
from tests.hydro_rasda.heats.test_sweep import FINALS, Clock, Curves, Given, configs
from tests.hydro_rasda.heats.test_sweep import run as run
from tests.hydro_rasda.scripted import sweep

pytestmark = pytest.mark.usefixtures("one_process")

SLOW = 0
"""The trial that is slow in the last rung of the sweep, and the best; 4 and 8 are the next best."""


class AllHeats(Curves):
    """Trains nothing, on surrogates or at full size, and has one task come last; `done` has the tasks in that order."""

    def __init__(self, run: Run, devices: int = 1, clock: Clock | None = None) -> None:
        super().__init__(run, devices, clock=clock)
        self.done: list[tuple[Any, ...]] = []

    def _comes_last(self, task: Task) -> bool:
        """Tell whether a task is done after all others that are under way."""
        raise NotImplementedError

    def _told(self, task: Task) -> tuple[Any, ...]:
        """Return what `done` has of a task."""
        return task.heat, task.members, task.span.stop

    def finished(self) -> list[Finished]:
        device = min(self._under_way, key=lambda device: self._comes_last(self._under_way[device]))
        if not (task := self._under_way[device]).is_full_size:
            self._under_way = {device: task, **self._under_way}
            (finished,) = super().finished()
        else:
            del self._under_way[device]
            history = self._history(task, task.number, task.span.stop)
            state = {"model": {}, "epoch": task.span.stop}
            finished = Finished(task, Outcome.of_model(task.number, state, history, 1.0), device)
        self.done.append(self._told(task))
        return [finished]

    def _require_what_is_needed(self) -> None:
        """Checkpoints of several heats lie there."""


class OneIsSlow(AllHeats):
    """All else is done before the slow trial's last rung; `done` has heat, members and last epoch in that order."""

    def __init__(self, run: Run, devices: int, most: float = math.inf) -> None:
        super().__init__(run, devices)
        self.most = most

    def finished(self) -> list[Finished]:
        if len(self.done) == self.most:
            raise KeyboardInterrupt
        return super().finished()

    def _comes_last(self, task: Task) -> bool:
        return task.heat == "sweep" and task.span.stop == 9 and SLOW in task.members


def begun(of: Run, path: Path, top_k: int) -> Run:
    """A run whose groups have one member each; the race compares finalists after nine epochs."""
    settings = of.settings
    race, one_by_one = RaceConfig(top_k=top_k, grace_period=9), replace(settings.sweep, fusion=1)
    return Run(of.problem.with_settings(race=race, sweep=one_by_one), Store.open(path, {}, "auto"))


def search(run: Run, trains: OneIsSlow, eager: bool = True) -> None:
    """Do both heats."""
    race = Race(run, trains)
    finalists = sweep(run, Given([configs(FINALS)]), trains, race=race if eager else None)
    race.between(finalists)


def found(run: Run) -> dict[str, Any]:
    """Results, checkpoints, and those decisions that do not depend on idle devices."""
    summed = sum_up(run.history, tried_targets(run.history, run.history.finalists or ()), run.store.path)
    return {
        "decided": {k: u.value for k, u in run.store.units().items() if "race/to-" in k or k == FINALISTS},
        "winner": (summed.best_trial, summed.best_metric, summed.cost.race_epochs),
        "records": [(r.trial, r.epochs, r.kept_epoch, r.status, r.history) for r in summed.trials],
        "best": {heat: best[-1].score for heat, best in best_over_time(run.store.units(), summed).items()},
        "checkpoints": {path.name for path in (run.store.path / "checkpoints").iterdir()},
    }


@pytest.mark.parametrize("top_k", [1, 2])
def test_what_begins_early_changes_no_decision_and_no_result(run: Run, tmp_path: Path, top_k: int) -> None:
    """With one place in the race, the trial that began early does not enter it."""
    seen = []
    for devices, eager in ((1, True), (2, True), (2, False), (5, True)):
        with closing((of := begun(run, tmp_path / f"{devices}-{eager}", top_k)).store):
            search(of, trains := OneIsSlow(of, devices), eager)
            swept = trains.done.index(("sweep", (SLOW,), 9))
            early = [members for heat, members, _ in trains.done[:swept] if heat == "race"]
            assert early == ([(4,)] if eager and devices > 1 else [])
            assert all(each.device in range(devices) for each in trainings(of.store.units()) if each.heat == "race")
            seen.append(found(of))
    for other in seen:
        assert other == seen[0]


class EarlyRaises(OneIsSlow):
    """The first full-size training raises."""

    raised = False

    def finished(self) -> list[Finished]:
        (finished,) = super().finished()
        if self.raised or not finished.task.is_full_size:
            return [finished]
        self.raised = True
        return [replace(finished, outcome=Outcome.failed(finished.task.number, "ValueError: it raised", 1.0))]


@pytest.mark.parametrize("top_k", [1, 2])
def test_a_training_that_began_early_and_raised_counts_as_none(run: Run, tmp_path: Path, top_k: int) -> None:
    with closing((plain := begun(run, tmp_path / "plain", top_k)).store):
        search(plain, OneIsSlow(plain, 1))
        expected = found(plain)
    with closing((of := begun(run, tmp_path / "raises", top_k)).store):
        search(of, trains := EarlyRaises(of, 2))
        assert trains.raised
        assert found(of) == expected
        assert not of.history.failures
        assert not any("tried again" in message.text for message in read_messages(of.store.path))


@pytest.mark.parametrize("top_k", [1, 2])
def test_what_began_early_outlives_a_kill(run: Run, tmp_path: Path, top_k: int) -> None:
    """The process ends once the training that began early is recorded, while the slow trial trains."""
    with closing((unbroken := begun(run, tmp_path / "unbroken", top_k)).store):
        search(unbroken, trains := OneIsSlow(unbroken, 2))
        expected, most = found(unbroken), trains.done.index(("race", (4,), 9)) + 1
    with closing((killed := begun(run, tmp_path / "killed", top_k)).store), pytest.raises(KeyboardInterrupt):
        search(killed, OneIsSlow(killed, 2, most))
    needed = sum_up(killed.history, [], killed.store.path, undecided=[])._needed  # which `clean` keeps
    assert killed.store.file("race/trial-4/to-9") in needed
    assert {*needed} == {*(killed.store.path / "checkpoints").iterdir()}
    with closing((goes_on := begun(run, tmp_path / "killed", top_k)).store):
        search(goes_on, trains := OneIsSlow(goes_on, 2))
        assert found(goes_on) == expected
    assert ("race", (4,), 9) not in trains.done


def test_what_began_early_and_entered_counts_after_others_have_entered(run: Run, tmp_path: Path) -> None:
    with closing((of := begun(run, tmp_path / "entered", 2)).store):
        search(of, trains := OneIsSlow(of, 2))
        assert trains.done.index(("race", (4,), 9)) < trains.done.index(("sweep", (SLOW,), 9))
        others = sorted({*of.history.trials} - {*(of.history.finalists or ())})
        Race(of, OneIsSlow(of, 1)).between(others[:2])
        expected = found(of)
    with closing((read_again := begun(run, tmp_path / "entered", 2)).store):
        read_again.fold()
        assert found(read_again) == expected


def test_what_began_early_and_entered_counts_after_dropped_trials_are_tried_again(run: Run, tmp_path: Path) -> None:
    with closing((of := begun(run, tmp_path / "dropped", 2)).store):
        search(of, OneIsSlow(of, 2))
        winner = found(of)["winner"]
        expected = of.history.metrics["race", 4], {**of.history.checkpoints}
        of.record("race/trial-7/failed-after-0", Unit(None, [failure_line(7, DROPPED)]))
    with closing((again := begun(run, tmp_path / "dropped", 2)).store):
        try_dropped_again(again)
        again.fold()
        assert (again.history.metrics["race", 4], again.history.checkpoints) == expected
        assert run_end(again.history) == "open"
    with closing((to_its_end := begun(run, tmp_path / "dropped", 2)).store):
        search(to_its_end, trains := OneIsSlow(to_its_end, 2))
        assert (found(to_its_end)["winner"], run_end(to_its_end.history), trains.done) == (winner, "finished", [])


def test_dropped_trials_are_tried_again_also_after_a_kill_at_any_line(run: Run, tmp_path: Path) -> None:
    with closing((of := begun(run, tmp_path / "whole", 2)).store):
        search(of, OneIsSlow(of, 2))
        of.record("race/trial-7/failed-after-0", Unit(None, [failure_line(7, DROPPED)]))

    def tried_again(folder: Path, lines: float = math.inf) -> set[str]:
        """Open the run in a copy of the folder, and end after this number of lines, as if killed."""
        with closing((again := begun(run, folder, 2)).store):
            record, left = again.store.record, iter(range(10**6))

            def killed(*given: Any, **named: Any) -> Unit:
                if next(left) >= lines:
                    raise KeyboardInterrupt
                return record(*given, **named)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(again.store, "record", killed)
                try_dropped_again(again)
            again.fold()
            return {*again.store.units()}

    expected = tried_again(Path(shutil.copytree(tmp_path / "whole", tmp_path / "unbroken")))
    assert CALL in expected
    assert "race/trial-7/failed-after-0" not in expected
    for lines in range(100):
        shutil.copytree(tmp_path / "whole", folder := tmp_path / f"{lines}")
        try:
            tried_again(folder, lines)
        except KeyboardInterrupt:
            assert tried_again(folder) == expected
        else:
            break
    assert lines > 3


class RaceIsSlow(AllHeats):
    """Each training of the race is done after all of the sweep's."""

    def _comes_last(self, task: Task) -> bool:
        return task.is_full_size


def test_a_population_leaves_no_device_to_the_race_before_its_last_interval(run: Run, tmp_path: Path) -> None:
    rule = PopulationBasedTraining({"lr": Range(0.01, 1.0)}, last=9, interval=3)
    with closing((of := begun(run, tmp_path / "population", 2)).store):
        trains = RaceIsSlow(of, 4)
        sweep(of, Given([configs(FINALS)]), trains, rule, Race(of, trains))
    first = [task.is_full_size for task in trains.tasks].index(True)
    assert {task.span.stop for task in trains.tasks[:first]} == {3, 6, 9}
    assert sum(task.is_full_size for task in trains.tasks) == 1
