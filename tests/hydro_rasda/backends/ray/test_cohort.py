"""Trials that wait for their fellows, in real Ray Tune runs; nobody waits for one that stalls or dies."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import tune

from benchmarks.ray_stand_in import StandInController, stand_in_trial
from hydro_rasda import RASDAScheduler
from hydro_rasda.backends.ray import JournalEntry, read_journal
from hydro_rasda.backends.ray.waiting import Grants
from hydro_rasda.schedulers import RASDA
from hydro_rasda.schedulers.rasda import Grow
from tests.hydro_rasda.backends.ray.curves import Opens, held_up
from tests.hydro_rasda.backends.ray.test_scheduler import run

LONG = 1e6
"""A wait that no test lives to see the end of."""


@pytest.mark.slow
def test_eight_that_begin_together_are_halved_exactly(ray8: None, tmp_path: Path) -> None:
    watch = Opens(tmp_path / "go", "start", 8)
    trials = [{"x": i / 8, "seconds": 0.2, "until": str(tmp_path / "go")} for i in reversed(range(8))]
    scheduler = RASDAScheduler(max_t=8, wait=LONG, grow="efficient")
    results = run(tmp_path, scheduler, {"of": tune.grid_search(trials)}, held_up, watch)
    assert results.num_errors == 0
    entries = read_journal(results.experiment_path)
    went_on = Counter(e.milestone for e in entries if e.milestone and e.decision == "continue")
    assert went_on == {1: 4, 2: 2, 4: 1}
    last = {e.trial: e.t for e in entries}
    ended = sorted((r.config or {})["of"]["x"] * 8 for r in results if (r.metrics or {})["training_iteration"] == 8)
    assert (ended, sorted(last.values())) == ([0], [1, 1, 1, 1, 2, 2, 4, 8])
    assert {(e.t, e.workers) for e in entries} == {(t, scheduler.rule.workers_at(t - 1)) for t in range(1, 9)}
    assert max(watch.used) <= 8


@pytest.mark.slow
def test_a_fellow_that_stalls_holds_nobody_beyond_the_bound(ray8: None, tmp_path: Path) -> None:
    """It reports nothing before the other one has ended."""
    watch = Opens(tmp_path / "go", "end", 1)
    trials = [{"x": 0.0, "iterations": 2}, {"x": 1.0, "until": str(tmp_path / "go")}]
    scheduler = RASDAScheduler(max_t=2, wait=0.2)
    results = run(tmp_path, scheduler, {"of": tune.grid_search(trials)}, held_up, watch, time_budget_s=120)
    entries = read_journal(results.experiment_path)
    first, stalled = (results[i].metrics["trial_id"] for i in (0, 1))
    assert [(e.trial, e.t, e.decision, e.milestone) for e in entries] == [
        (first, 1, "wait", None),
        (first, 1, "continue", 1),
        (first, 2, "stop", 2),
        (stalled, 1, "stop", 1),
    ]


@pytest.mark.slow
def test_a_fellow_that_dies_is_not_waited_for(ray8: None, tmp_path: Path) -> None:
    watch = Opens(tmp_path / "go", "result", 1)
    trials = [{"x": 0.0}, {"x": 1.0, "until": str(tmp_path / "go"), "dies": True}]
    scheduler = RASDAScheduler(max_t=2, wait=LONG)
    results = run(tmp_path, scheduler, {"of": tune.grid_search(trials)}, held_up, watch, time_budget_s=120)
    assert results.num_errors == 1
    entries = read_journal(results.experiment_path)
    assert [(e.t, e.decision, e.milestone) for e in entries] == [
        (1, "wait", None),
        (1, "continue", 1),
        (2, "stop", 2),
    ]


@pytest.mark.slow
def test_who_cannot_be_paused_does_not_wait(ray8: None, tmp_path: Path) -> None:
    trials = [{"x": x, "forgets": True} for x in (0.0, 1.0)]
    results = run(tmp_path, RASDAScheduler(max_t=4, wait=LONG), {"of": tune.grid_search(trials)}, held_up)
    assert results.num_errors == 0
    entries = read_journal(results.experiment_path)
    assert {e.decision for e in entries} <= {"continue", "stop"}
    assert max(e.t for e in entries) == 4


@pytest.fixture
def _eight_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "Resources": {"CPU": 8.0}}])


class Controller(StandInController):
    """Stops trials as Ray's controller does.

    `told` are the last results of which the searcher learns then, and the status of `saved` trials is saved.
    """

    def __init__(self, rule: Any, scores: list[list[float]], folder: str) -> None:
        super().__init__(rule, scores, folder)
        self.told: dict[str, Any] = {}
        self.saved: list[str] = []

    def _set_trial_status(self, trial: Any, status: str) -> None:
        trial.status = status

    def _mark_trial_to_checkpoint(self, trial: Any) -> None:
        assert trial.status == "TERMINATED"
        self.saved.append(trial.trial_id)

    def stop_trial(self, trial: Any) -> None:
        if trial.status in ("PENDING", "PAUSED"):
            self._rule.on_trial_remove(self, trial)
            self.told[trial.trial_id] = None
        else:
            self._rule.on_trial_complete(self, trial, trial.last_result)
            self.told[trial.trial_id] = trial.last_result
        trial.status = "TERMINATED"
        del self._live[trial.trial_id]


@pytest.mark.usefixtures("_eight_workers")
@pytest.mark.parametrize("grow", ["due", "efficient"])
@pytest.mark.parametrize("order", [list(range(8)), list(reversed(range(8)))], ids=["best first", "worst first"])
def test_whoever_comes_last_the_best_half_goes_on_with_twice_the_workers(
    tmp_path: Path, order: list[int], grow: Grow
) -> None:
    scheduler = RASDAScheduler(max_t=8, wait=LONG, grow=grow, metric="loss", mode="min")
    Controller(scheduler, [[float(x)] * 8 for x in order], str(tmp_path)).run()
    entries = read_journal(str(tmp_path))
    went_on = Counter((e.milestone, order[int(e.trial)]) for e in entries if e.decision == "continue" and e.milestone)
    assert went_on == Counter({(1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1), (4, 0)})
    assert {(e.t, e.workers) for e in entries} == {(t, scheduler.rule.workers_at(t - 1)) for t in range(1, 9)}
    waited = Counter(e.t for e in entries if e.decision == "wait")
    assert waited == {1: 7, 2: 3, 4: 1}


@pytest.mark.usefixtures("_eight_workers")
def test_a_searcher_is_told_the_scores_of_those_that_are_stopped_while_they_wait(tmp_path: Path) -> None:
    """And BOHB of the milestone to which they came."""
    scheduler = RASDAScheduler(max_t=8, wait=LONG, metric="loss", mode="min")
    controller = Controller(scheduler, [[float(x)] * 8 for x in range(8)], str(tmp_path))
    controller.run()
    assert {name: result["loss"] for name, result in controller.told.items()} == {
        f"{n:05d}": float(n) for n in (2, 4, 5, 6)
    }, "those that came last to a milestone did not wait: Ray stops them itself"
    assert controller.saved == list(controller.told)
    again = RASDAScheduler(max_t=8, wait=LONG, metric="loss", mode="min")
    controller = Controller(again, [], str(tmp_path / "again"))
    (tmp_path / "again").mkdir()
    for _ in range(2):
        controller._add()
        chosen: Any = again.choose_trial_to_run(controller)
        chosen.status = "RUNNING"
    result: dict[str, Any] = {"training_iteration": 1, "loss": 0.0, "should_checkpoint": True}
    assert again.on_trial_result(controller, controller.trials[0], result) == "PAUSE"
    assert result["hyperband_info"] == {"budget": 1}


@pytest.mark.usefixtures("_eight_workers")
def test_who_goes_on_without_a_pause_waits_at_the_next_milestone_too(tmp_path: Path) -> None:
    """The best comes last, and is decided as it comes."""
    scheduler = RASDAScheduler(max_t=8, wait=LONG, max_workers=1, metric="loss", mode="min")
    Controller(scheduler, [[float(x)] * 8 for x in reversed(range(8))], str(tmp_path)).run()
    decisions = Counter((e.milestone, e.decision) for e in read_journal(str(tmp_path)) if e.milestone)
    assert decisions == {(1, "continue"): 4, (1, "stop"): 4, (2, "continue"): 2, (2, "stop"): 2} | {
        (4, "continue"): 1,
        (4, "stop"): 1,
        (8, "stop"): 1,
    }


@pytest.mark.usefixtures("_eight_workers")
def test_growth_leaves_workers_to_those_that_wait(tmp_path: Path) -> None:
    """All scores are equal, so that all go on; of eight workers and eight trials each has one, whatever it is due."""
    scheduler = RASDAScheduler(max_t=4, wait=LONG, grow="efficient", metric="loss", mode="min")
    Controller(scheduler, [[0.0] * 4] * 8, str(tmp_path)).run()
    assert {e.workers for e in read_journal(str(tmp_path))} == {1}


@pytest.mark.usefixtures("_eight_workers")
def test_what_waited_when_the_driver_was_killed_is_decided_once_it_is_back(tmp_path: Path) -> None:
    """Two came to milestone 2 and were not decided; a third had been, and a fourth had not yet saved what it came with:
    both begin to train again before it."""
    scores = {0: 0.3, 1: 0.1, 2: 0.2, 3: 0.0}
    journal = [JournalEntry(f"{n:05d}", 1, score, 1, 1, "continue") for n, score in scores.items()]
    journal += [JournalEntry(f"{n:05d}", 2, scores[n], 2, None, "wait") for n in (0, 1, 3)]
    journal += [JournalEntry("00002", 2, 0.2, 2, None, "wait"), JournalEntry("00002", 2, 0.2, 2, 2, "continue")]
    first = RASDAScheduler(max_t=8, wait=LONG, metric="loss", mode="min")
    path = tmp_path / "rasda.jsonl"
    _write(path, journal)
    controller = Controller(first, [], str(tmp_path))
    trials = [stand_in_trial(n, str(tmp_path)) for n in scores]
    for trial, t in zip(trials, (2, 2, 1, 1)):
        trial.status = "PAUSED"
        trial.latest_checkpoint_result = SimpleNamespace(
            metrics={"training_iteration": t, "loss": scores[trial.number]}
        )
        controller.trials.append(trial)
        controller._live[trial.trial_id] = trial
        first.on_trial_add(controller, trial)
    assert [first._trials.due(trial) for trial in trials] == [4, 4, 2, 2]
    started = first.choose_trial_to_run(controller)
    entries = read_journal(str(tmp_path))[len(journal) :]
    assert [(e.trial, e.t, e.milestone, e.decision) for e in entries] == [
        ("00000", 2, 2, "stop"),
        ("00001", 2, 2, "continue"),
    ]
    assert (started, trials[0].status) == (trials[1], "TERMINATED")


@pytest.mark.usefixtures("_eight_workers")
@pytest.mark.parametrize("t", [2, 8])
def test_a_trial_that_was_stopped_at_its_checkpoint_is_not_trained_again(t: int, tmp_path: Path) -> None:
    """The driver was killed before Ray had saved that it was, or it is the end: `max_t`."""
    _write(tmp_path / "rasda.jsonl", [JournalEntry("00000", t, 0.3, 2, 2 if t == 2 else None, "stop")])
    scheduler = RASDAScheduler(max_t=8, wait=LONG, metric="loss", mode="min")
    controller, stopped = Controller(scheduler, [], str(tmp_path)), stand_in_trial(0, str(tmp_path))
    stopped.last_result = {"training_iteration": t, "loss": 0.3}
    stopped.latest_checkpoint_result = SimpleNamespace(metrics=stopped.last_result)
    controller._live[stopped.trial_id] = stopped
    scheduler.on_trial_add(controller, stopped)
    assert scheduler.choose_trial_to_run(controller) is None
    assert (stopped.status, controller.told) == ("TERMINATED", {"00000": stopped.last_result})


def _write(path: Path, entries: list[JournalEntry]) -> None:
    import json

    path.write_text("".join(json.dumps(vars(entry)) + "\n" for entry in entries))


def trial(name: str, **had: Any) -> Any:
    return SimpleNamespace(trial_id=name, latest_checkpoint_result=SimpleNamespace(metrics=had) if had else None)


def test_grants_follow_what_was_reported() -> None:
    """On 1 worker 8 s, on 2 workers 4 s (efficient) or 8 s (half efficient); the first after a start is slow."""
    grants = Grants(RASDA(16, grow="efficient"))
    quick, lossy, noisy = trial("quick"), trial("lossy"), trial("noisy")
    for seconds, workers, since in ((60.0, 1, 1), (8.0, 1, 2), (30.0, 2, 1), (4.0, 2, 2)):
        grants.note(quick, workers, {"time_this_iter_s": seconds, "iterations_since_restore": since})
    for seconds, workers in ((8.0, 1), (8.0, 2)):
        grants.note(lossy, workers, {"epoch_seconds": seconds, "time_this_iter_s": 0.1})
    grants.note(noisy, 2, {"gradient_noise_scale": 96.0, "global_batch_size": 64})  # 3 workers of 32 examples
    grants.give([(quick, 2), (lossy, 2), (noisy, 2)], milestone=2, slots=16, free=12, idle=0)
    assert [grants.of(t) for t in (quick, lossy, noisy)] == [4, 2, 2]
    grants.give([(quick, 2)], milestone=2, slots=16, free=12, idle=3)
    assert grants.of(quick) == 2


def test_a_decision_at_an_earlier_milestone_takes_no_workers() -> None:
    """Of a trial whose first report passed several milestones; its next ones are decided at the earlier ones."""
    grants, late = Grants(RASDA(16, grow="efficient")), trial("late")
    grants.give([(late, 8)], milestone=2, slots=16, free=16, idle=0)
    assert grants.of(late) == 8
    limited = Grants(RASDA(16, grow="efficient", max_workers=4))
    limited.give([(late, 8)], milestone=2, slots=16, free=16, idle=0)
    assert limited.of(late) == 4


def test_what_a_trial_measured_itself_counts_before_its_epochs() -> None:
    """Its epochs are half as efficient as they should be by what follows its steps; a trial's old size says nothing."""
    grants = Grants(RASDA(16, grow="efficient"))
    measured = trial("measured")
    for workers, own in ((1, {"scaling_efficiency": 1.0}), (2, {"scaling_efficiency": 0.9}), (2, {})):
        grants.note(measured, workers, {"epoch_seconds": 8.0, **own})
        grants.give([(measured, workers)], milestone=2, slots=16, free=12, idle=0)
        assert grants.of(measured) == (4 if own else 2)


def test_without_a_grant_a_trial_keeps_what_it_had() -> None:
    grants = Grants(RASDA(16, workers=2, grow="efficient"))
    assert [grants.of(t) for t in (trial("new"), trial("tells", workers=4), trial("silent", loss=0.1))] == [2, 4, 2]
