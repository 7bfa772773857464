"""The scheduler in real Ray Tune runs, and against Ray's own ASHA."""

import gc
import logging
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow.fs import PyFileSystem
from ray import tune
from ray.tune.result_grid import ResultGrid
from ray.tune.schedulers import ASHAScheduler

from benchmarks.ray_stand_in import StandInController, stand_in_trial
from hydro_rasda import RASDAScheduler
from hydro_rasda.backends.ray import read_journal
from hydro_rasda.backends.ray.nodes import Slots
from hydro_rasda.backends.ray.ray_private_names import ControllerStage
from hydro_rasda.simulator import read_past_run
from tests.hydro_rasda.backends.ray.curves import (
    Counter,
    EndsAll,
    HoldsHalf,
    Late,
    Raises,
    Store,
    Unresettable,
    Watch,
    curve,
    lingering,
)


@pytest.fixture(autouse=True)
def _loggers_that_ray_leaves_open(set_aside: None) -> Iterator[None]:
    """Ray closes no logger of a trial that a time budget ended; its files are collected here, unnoticed."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(autouse=True)
def _warnings_are_heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="hydro_rasda")


def run(
    folder: Path,
    scheduler: RASDAScheduler,
    space: dict,
    trainable: Any = curve,
    watch: tune.Callback | None = None,
    checkpoints: tune.CheckpointConfig | None = None,
    stop: tune.Stopper | None = None,
    **config: Any,
) -> ResultGrid:
    config = {"metric": "loss", "mode": "min", "reuse_actors": True, **config}
    tuner = tune.Tuner(
        trainable,
        param_space=space,
        tune_config=tune.TuneConfig(scheduler=scheduler, **config),
        run_config=tune.RunConfig(
            storage_path=str(folder),
            name="run",
            verbose=0,
            callbacks=[watch] if watch else [],
            checkpoint_config=checkpoints,
            stop=stop,
        ),
    )
    return tuner.fit()


def asha_on(reports: list[tuple[str, int, float]], scheduler: RASDAScheduler) -> dict[tuple[str, int], str]:
    """What Ray's scheduler decides on the same stream of results."""
    rule = scheduler.rule
    asha = ASHAScheduler(
        metric="loss",
        mode="min",
        max_t=rule.max_t,
        grace_period=rule.grace_period,
        reduction_factor=rule.reduction_factor,
    )
    decisions: dict[tuple[str, int], str] = {}
    for trial, t, loss in reports:
        stub = SimpleNamespace(trial_id=trial)
        if trial not in asha._trial_info:
            asha.on_trial_add(None, stub)
        result = {"training_iteration": t, "loss": loss}
        decisions[trial, t] = asha.on_trial_result(None, stub, result).lower()
        if decisions[trial, t] == "stop":
            asha.on_trial_complete(None, stub, result)
    return decisions


@pytest.mark.slow
def test_twelve_trials_on_eight_slots(ray8: None, tmp_path: Path) -> None:
    watch, scheduler = Watch(), RASDAScheduler(max_t=8)
    space = {"x": tune.grid_search([(7 * i % 12) / 12 for i in range(12)]), "seconds": 0.2}
    results = run(tmp_path, scheduler, space, watch=watch)
    assert results.num_errors == 0
    assert len(results) == 12
    entries = read_journal(results.experiment_path)
    assert {(e.trial, e.t): e.decision for e in entries if e.decision == "stop" or e.t < 8} == asha_on(
        watch.reports, scheduler
    )
    assert all(e.workers == scheduler.rule.workers_at(e.t - 1) for e in entries)
    assert max(watch.used) <= 8
    assert watch.overtaken, "nobody was promoted"
    assert max(watch.overtaken) <= 8
    best = results.get_best_result()
    assert best.metrics is not None
    assert (best.config or {})["x"] == 0
    assert best.metrics["workers"] == 8


@pytest.mark.slow
def test_new_trials_are_not_shut_out_by_a_stream_of_promotions(ray8: None, tmp_path: Path) -> None:
    """All scores are equal, so that all survive, and those that came first come back twice each.

    Where patience is without end, the longest waiting trial sees 14 others start.
    """
    watch, scheduler = Watch(), RASDAScheduler(max_t=4, workers=2, patience=2)
    space = {"x": 0.0, "i": tune.grid_search(list(range(8))), "seconds": 0.1}
    results = run(tmp_path, scheduler, space, watch=watch)
    assert results.num_errors == 0
    assert [r.metrics["training_iteration"] for r in results if r.metrics is not None] == [4] * 8
    # Two before its turn comes, and what fits beside its reservation: with two workers each, 4 at most.
    assert 2 <= watch.overtaken_as_oldest() <= 2 + 4


@pytest.mark.slow
def test_trials_added_late(ray8: None, tmp_path: Path) -> None:
    """They start with a new trial's workers, and are measured by those that went before."""
    watch, scheduler, late = Watch(), RASDAScheduler(max_t=8), Late([0.4, 0.2, 0.6], [0.1, 0.9], after=4)
    results = run(tmp_path, scheduler, {}, watch=watch, search_alg=late, num_samples=-1)
    assert results.num_errors == 0
    assert len(results) == 5
    assert len(late.late) == 2
    entries = read_journal(results.experiment_path)
    assert {(e.trial, e.t): e.decision for e in entries if e.decision == "stop" or e.t < 8} == asha_on(
        watch.reports, scheduler
    )
    first = [e for e in entries if e.trial in late.late and e.t == 1]
    assert sorted((e.decision, e.workers) for e in first) == [("continue", 1), ("stop", 1)]
    best = results.get_best_result()
    assert (best.config or {})["x"] == 0.1
    assert (best.metrics or {})["workers"] == 8


@pytest.mark.slow
@pytest.mark.parametrize("search", ["random", "optuna"])
def test_searchers(search: str, ray8: None, tmp_path: Path) -> None:
    from ray.tune.search.optuna import OptunaSearch

    scheduler, algorithm = RASDAScheduler(max_t=4), OptunaSearch(seed=0) if search == "optuna" else None
    results = run(tmp_path, scheduler, {"x": tune.uniform(0, 1)}, search_alg=algorithm, num_samples=6)
    assert results.num_errors == 0
    assert len(results) == 6
    entries = read_journal(results.experiment_path)
    assert {e.workers for e in entries} == {1, 2, 4}
    # The simulator reads Tune's own files.
    past = read_past_run(results.experiment_path, mode="min")
    assert len(past.workload.scores) == 6
    assert {*past.workload.scores[:, 0]} <= {e.score for e in entries}
    assert past.resizes <= len({(e.trial, e.workers) for e in entries if e.workers > 1})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_bohb_learns_from_milestones_and_from_those_that_stop(ray8: None, tmp_path: Path) -> None:
    from ray.tune.search.bohb import TuneBOHB

    class Told(TuneBOHB):  # type: ignore[misc]
        """Notes what it is told: once it models a larger budget, BOHB keeps no more results of a smaller one."""

        def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
            self.told = [*getattr(self, "told", []), (trial_id, result["hyperband_info"].get("budget"))]
            super().on_trial_result(trial_id, result)

    # One at a time: who is stopped depends on the order of reports.
    bohb, scheduler, one = Told(seed=0), RASDAScheduler(max_t=4), {"max_concurrent_trials": 1}
    results = run(tmp_path, scheduler, {"x": tune.uniform(0, 1)}, search_alg=bohb, num_samples=6, **one)
    assert results.num_errors == 0
    stopped_at_1 = [e for e in read_journal(results.experiment_path) if e.t == 1 and e.decision == "stop"]
    assert stopped_at_1
    assert len({trial for trial, budget in bohb.told if budget == 1}) == 6
    assert bohb.bohber.losses[1]


@pytest.mark.slow
def test_an_end_of_all_ends_waiting_and_running_trials(ray8: None, tmp_path: Path) -> None:
    """As a time budget is one, but by what was reported, however busy the machine: the first survivor's growth."""
    space = {"x": tune.grid_search([i / 12 for i in range(12)]), "seconds": 0.5}
    results = run(tmp_path, RASDAScheduler(max_t=4096), space, stop=EndsAll(2))
    assert results.num_errors == 0
    assert len(results) == 12
    assert 2 <= max(e.t for e in read_journal(results.experiment_path)) < 4096


@pytest.mark.slow
def test_a_trainable_that_never_checkpoints_is_named_and_goes_on(
    ray8: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    results = run(tmp_path, RASDAScheduler(max_t=4), {"x": 0.0, "forgets": True})
    assert [(e.t, e.workers) for e in read_journal(results.experiment_path)][:4] == [(1, 1), (2, 1), (3, 1), (4, 1)]
    assert "Trainable 'curve' reported iteration 1" in caplog.text
    assert "a checkpoint: `checkpoint=` of tune.report, `state` of Worker.report" in caplog.text
    assert caplog.text.count("without a checkpoint") == 1
    assert caplog.text.count("`reuse_actors` is True") == 1


@pytest.mark.slow
def test_class_trainables_grow_where_they_save(ray8: None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # By default Ray saves a class trainable at its end, whether or not it can.
    never = tune.CheckpointConfig(checkpoint_at_end=False)
    for trainable, workers in ((Counter, [1, 2, 4, 4]), (Unresettable, [1, 1, 1, 1])):
        folder, scheduler = tmp_path / trainable.__name__, RASDAScheduler(max_t=4)
        results = run(folder, scheduler, {}, trainable, checkpoints=never, reuse_actors=False)
        assert results.num_errors == 0
        assert [e.workers for e in read_journal(results.experiment_path)][:4] == workers
    assert (results[0].metrics or {})["training_iteration"] == 4
    assert "Trainable 'Unresettable' reported iteration 1" in caplog.text
    assert "Give it `save_checkpoint` and `load_checkpoint`" in caplog.text
    assert "Trainable 'Counter'" not in caplog.text
    assert "reuse_actors" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(("trainable", "lost"), [(lingering, 0), (Raises, 1)])
def test_an_actor_that_cannot_be_reused_keeps_nobody_waiting(
    trainable: Any, lost: int, ray8: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One trial runs, the other waits for its workers and is given the first one's actor; survivors need all eight.

    One whose reset raises has failed by its own code, one whose actor was merely not free in time has not. Now and then
    Ray ends the actor instead, and nothing is reused.
    """
    never = tune.CheckpointConfig(checkpoint_at_end=False)
    for search in range(5):
        caplog.clear()
        scheduler, holds = RASDAScheduler(max_t=2, workers=4), HoldsHalf(4)
        space = {"x": tune.grid_search([0.0, 0.0])}
        results = run(tmp_path / str(search), scheduler, space, trainable, holds, checkpoints=never)
        if holds.failed:
            break
    assert holds.failed, "Ray reused no actor in five searches"
    assert results.num_errors == lost
    ended = [r.metrics["training_iteration"] for r in results if r.metrics is not None and not r.error]
    assert ended == [2] * (2 - lost)
    assert ("starts again: the actor that it was to reuse" in caplog.text) == (not lost)


@pytest.mark.slow
def test_what_no_trial_can_have_is_refused_before_any_starts(ray8: None, tmp_path: Path) -> None:
    refused = [
        (RASDAScheduler(workers=9), curve, "`workers` is 9, but must be <= 8"),
        (RASDAScheduler(resources_per_worker={"CPU": 1, "GPU": 1}), curve, "`resources_per_worker` is .*'GPU': 1"),
        (RASDAScheduler(), Unresettable, "`reuse_actors` is True, but must be False for 'Unresettable'"),
        (RASDAScheduler(metric=None), curve, "`metric` is None and `mode` is None, but both must be given"),
    ]
    for i, (scheduler, trainable, message) in enumerate(refused):
        named: dict[str, Any] = {"metric": None, "mode": None} if "metric" in message else {}
        with pytest.raises(Exception, match=message):
            run(tmp_path / str(i), scheduler, {"x": 0.0}, trainable, **named)


@pytest.mark.slow
def test_growth_ends_at_what_the_cluster_holds(ray8: None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """3 CPUs a worker: two workers fit on 8; a third does not, though the milestones are three."""
    scheduler = RASDAScheduler(max_t=8, resources_per_worker={"CPU": 3})
    results = run(tmp_path, scheduler, {"x": 0.0})
    assert [e.workers for e in read_journal(results.experiment_path)][:8] == [1, 2, 2, 2, 2, 2, 2, 2]
    assert "due 4 workers and gets 2: the cluster holds no more" in caplog.text


@pytest.mark.slow
def test_an_experiment_may_lie_in_an_object_store(ray8: None, tmp_path: Path) -> None:
    scheduler = RASDAScheduler(max_t=4)
    results = tune.Tuner(
        curve,
        param_space={"x": tune.grid_search([0.0, 0.5])},
        tune_config=tune.TuneConfig(metric="loss", mode="min", scheduler=scheduler),
        run_config=tune.RunConfig(
            storage_path="bucket",
            name="run",
            storage_filesystem=PyFileSystem(Store(str(tmp_path))),
            verbose=0,
        ),
    ).fit()
    assert results.num_errors == 0
    entries = read_journal((tmp_path / "bucket" / "run").as_uri())
    assert {(e.t, e.workers) for e in entries if e.milestone} == {(1, 1), (2, 2), (4, 4)}
    for result in results:
        assert result.metrics_dataframe is not None
        assert list(result.metrics_dataframe["training_iteration"]) == [*range(1, len(result.metrics_dataframe) + 1)]


def test_importing_the_package_starts_no_ray() -> None:
    code = "import ray; from hydro_rasda import RASDAScheduler, elastic; print(ray.is_initialized())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"scaling_factor": 1}, ValueError, "`scaling_factor` is 1, but must be an integer >= 2"),
        ({"reduction_factor": 1}, ValueError, "`reduction_factor` is 1, but must be an integer >= 2"),
        ({"grace_period": 101}, ValueError, r"`grace_period` is 101, but must be <= `max_t` \(100\)"),
        ({"workers": 0}, ValueError, "`workers` is 0, but must be an integer >= 1"),
        ({"workers": 1.5}, ValueError, "`workers` is 1.5, but must be an integer"),
        ({"mode": "best"}, ValueError, "`mode` is 'best'"),
        ({"max_workers": 1, "workers": 2}, ValueError, "`max_workers` is 1, but must be None or an integer >= 2"),
        ({"patience": 0}, ValueError, "`patience` is 0, but must be an integer >= 1"),
        ({"wait": -0.1}, ValueError, "`wait` is -0.1, but must be a number >= 0"),
        ({"wait": float("inf")}, ValueError, "`wait` is inf, but must be finite"),
        ({"grow": "fast"}, ValueError, "`grow` is 'fast', but must be one of"),
        ({"brackets": 2}, ValueError, "`brackets` is 2, but must be 1"),
        ({"stop_last_trials": False}, ValueError, "`stop_last_trials` is False, but must be True"),
        ({"resources_per_worker": {"CPU": 0}}, ValueError, "`resources_per_worker` is .*, but must be more than 0"),
    ],
)
def test_bad_input(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        RASDAScheduler(**arguments)


def test_its_state_needs_no_file_of_its_own() -> None:
    with pytest.raises(NotImplementedError, match="keeps its state in the experiment's folder"):
        RASDAScheduler().save("state")


def test_metric_and_mode_come_from_one_side() -> None:
    scheduler = RASDAScheduler(metric="acc")
    assert not scheduler.set_search_properties("loss", "max")
    assert scheduler.set_search_properties(None, "max")
    assert (scheduler.metric, scheduler.rule.mode) == ("acc", "max")


@pytest.fixture
def two_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "Resources": {"CPU": 2.0}}])


def started(scheduler: RASDAScheduler, folder: Path) -> tuple[StandInController, list[Any]]:
    """Two trials that train."""
    controller = StandInController(scheduler, [], str(folder))
    for _ in range(2):
        controller._add()
        chosen: Any = scheduler.choose_trial_to_run(controller)
        chosen.status = "RUNNING"
    return controller, controller.trials


@pytest.mark.usefixtures("two_slots")
def test_a_stopped_trial_that_fails_before_its_end_is_stopped_again(tmp_path: Path) -> None:
    """Ray repeats it from a checkpoint before the milestone, at which it has a score already."""
    scheduler = RASDAScheduler(max_t=8, metric="loss", mode="min")
    controller, (good, bad) = started(scheduler, tmp_path)

    def report(trial: Any, loss: float) -> str:
        result = {"training_iteration": 1, "loss": loss, "should_checkpoint": True}
        return scheduler.on_trial_result(controller, trial, result)

    assert (report(good, 0.0), report(bad, 1.0)) == ("PAUSE", "STOP")
    scheduler.on_trial_error(controller, bad)
    bad.status = "PENDING"
    scheduler.on_trial_add(controller, bad)
    assert report(bad, 1.0) == "STOP"


class Staging(StandInController):
    """A controller that unstages, pauses and repeats trials as Ray's does; `done` names what it did."""

    done: list[str]

    def _unstage_trial_with_resources(self, trial: Any) -> None:
        self.done.append("unstage")

    def pause_trial(self, trial: Any, should_checkpoint: bool) -> None:
        assert not should_checkpoint
        self.done.append("pause")
        trial.status = "PAUSED"

    def _requeue_trial(self, trial: Any) -> None:
        self.done.append("repeat")
        trial.status = "PENDING"


@pytest.fixture
def staging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Staging:
    """A trial of two workers that is about to start on a cluster that holds two, and another one that waits."""
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "Resources": {"CPU": 2.0}}])
    monkeypatch.setattr(Slots, "_fresh_for_s", -1.0)
    scheduler = RASDAScheduler(max_t=8, metric="loss", mode="min", workers=2)
    controller = Staging(scheduler, [], str(tmp_path))
    controller.done = []
    for _ in range(2):
        controller._add()
    assert scheduler.choose_trial_to_run(controller) is controller.trials[0]
    return controller


def test_a_trial_whose_node_is_lost_before_it_starts_waits_again_for_fewer_workers(
    staging: Staging, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert staging._rule.choose_trial_to_run(staging) is None
    assert staging.done == []
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "Resources": {"CPU": 1.0}}])
    chosen: Any = staging._rule.choose_trial_to_run(staging)
    assert staging.done == ["unstage", "pause"]
    assert chosen is staging.trials[1], "it had waited longer"
    assert len(chosen.placement_group_factory.bundles) == 1
    assert "A trial is due 2 workers and gets 1: the cluster holds no more" in caplog.text


def test_workers_that_other_programs_hold_are_not_waited_for_forever(
    staging: Staging, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The trial is due both CPUs of the cluster, but a task has one of them, such as the one that runs the script."""
    monkeypatch.setattr("ray.available_resources", lambda: {"CPU": 1.0})
    monkeypatch.setattr(Slots, "_patience_s", 0.2)
    staging._actor_manager.num_pending_actors = 1
    assert staging._rule.choose_trial_to_run(staging) is None
    time.sleep(0.25)
    staging._actor_manager.num_live_actors = 1
    assert staging._rule.choose_trial_to_run(staging) is None, "a trial may give its workers back"
    staging._actor_manager.num_live_actors = 0
    assert staging._rule.choose_trial_to_run(staging) is None
    time.sleep(0.25)
    chosen: Any = staging._rule.choose_trial_to_run(staging)
    assert staging.done == ["unstage", "pause"]
    assert len(chosen.placement_group_factory.bundles) == 1
    assert "hold a part of the cluster. For 600 s, trials get at most 1 workers" in caplog.text


@pytest.mark.parametrize("reported", [False, True])
def test_a_staged_trial_that_failed_for_its_actor_alone_starts_again_in_its_place(
    staging: Staging, reported: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """If Ray has reported the failure, Ray itself repeats the trial, or ends it."""
    (failed, _) = staging.trials
    failed.run_metadata = SimpleNamespace(num_failures=1, error_filename="error", pickled_error_filename="pickle")
    failed.status, failed.is_finished = "ERROR", lambda: failed.status == "ERROR"
    staging._staged_trials = [failed]  # type: ignore[assignment]  # a stand-in cannot be in a set
    if reported:
        staging._rule.on_trial_error(staging, failed)
    chosen = staging._rule.choose_trial_to_run(staging)
    assert staging.done == ["unstage"] + ["repeat"] * (not reported)
    assert chosen is staging.trials[reported]
    kept = failed.run_metadata
    assert (kept.num_failures, kept.error_filename) == ((1, "error") if reported else (0, None))
    assert ("starts again: the actor that it was to reuse" in caplog.text) == (not reported)


def test_reuse_of_actors_that_cannot_be_reset_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scheduler = RASDAScheduler(max_t=8, metric="loss", mode="min")
    controller, trial = StandInController(scheduler, [], str(tmp_path)), stand_in_trial(0, str(tmp_path))
    controller._reuse_actors = True
    ControllerStage(controller).check_reuse(trial)
    assert caplog.text.count("`reuse_actors` is True: Ray hands an actor that comes free to a new trial") == 1
    trial.get_trainable_cls = lambda: Unresettable
    with pytest.raises(ValueError, match="`reuse_actors` is True, but must be False for 'stand_in', which has no"):
        ControllerStage(controller).check_reuse(trial)
    controller._reuse_actors = False
    ControllerStage(controller).check_reuse(trial)


@pytest.mark.usefixtures("two_slots")
def test_reports_may_hold_numbers_of_numpy(tmp_path: Path) -> None:
    scheduler = RASDAScheduler(max_t=8, metric="loss", mode="min", time_attr="steps")
    controller, (trial, _) = started(scheduler, tmp_path)
    numbers = {"steps": np.int64(1), "loss": np.float32(0.5), "global_batch_size": np.int64(32)}
    scheduler.on_trial_result(controller, trial, {**numbers, "should_checkpoint": True})
    (entry,) = read_journal(str(tmp_path))
    assert (entry.t, entry.score, entry.global_batch_size) == (1, 0.5, 32)


@pytest.mark.parametrize(
    ("bundles", "arguments", "given"),
    [
        ([{"CPU": 0.5, "GPU": 0.25}], {}, None),
        ([{"CPU": 2}], {"resources_per_worker": {"CPU": 2, "GPU": 0}}, None),
        ([{"CPU": 1}] * 2, {"workers": 2}, None),
        ([{"CPU": 1}] * 2, {}, [{"CPU": 1.0}]),
        ([{"CPU": 2}], {"resources_per_worker": {"CPU": 1}}, [{"CPU": 1}]),
    ],
)
def test_a_worker_is_the_bundle_that_a_trial_asks_for(
    bundles: list[dict[str, float]],
    arguments: dict[str, Any],
    given: list[dict[str, float]] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A script that took `ASHAScheduler` keeps its GPUs. Other bundles than a trial asks for are told once."""
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "Resources": {"CPU": 8.0, "GPU": 1.0}}])
    asked = tune.PlacementGroupFactory(bundles)
    scheduler = RASDAScheduler(max_t=4, metric="loss", mode="min", **arguments)
    controller = StandInController(scheduler, [[0.0] * 4], str(tmp_path))
    made = stand_in_trial(0, str(tmp_path))
    made.placement_group_factory = asked
    monkeypatch.setattr("benchmarks.ray_stand_in.stand_in_trial", lambda number, folder: made)
    controller._add()
    assert (made.placement_group_factory == asked) == (given is None)
    scheduler.on_trial_error(controller, made)
    scheduler.on_trial_add(controller, made)
    made.status = "RUNNING"
    scheduler.choose_trial_to_run(controller)
    report = {"training_iteration": 1, "loss": 0.0, "should_checkpoint": True}
    assert scheduler.on_trial_result(controller, made, report) == "PAUSE"
    said = f"Trainable 'stand_in' asks for {asked.bundles}, but a new trial gets {given}, by the arguments"
    assert caplog.text.count("asks for") == caplog.text.count(said) == (given is not None)
    caplog.clear()
    made.trial_id, made.placement_group_factory = "begins anew", tune.PlacementGroupFactory(bundles * 2)
    again = RASDAScheduler(max_t=4, metric="loss", mode="min", **arguments)
    again.on_trial_add(controller, made)
    assert "asks for" not in caplog.text


@pytest.mark.usefixtures("two_slots")
@pytest.mark.parametrize("loss", [None, "low", torch.ones(2)])
def test_what_is_no_number_is_no_score(loss: object, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in the report of an epoch without validation."""
    scheduler = RASDAScheduler(max_t=8, metric="loss", mode="min")
    controller, (trial, _) = started(scheduler, tmp_path)
    assert scheduler.on_trial_result(controller, trial, {"training_iteration": 1, "loss": loss}) == "CONTINUE"
    assert "has no number 'loss': it decides nothing" in caplog.text
    scheduler.on_trial_complete(controller, trial, {"training_iteration": 1, "loss": loss})


@pytest.mark.usefixtures("two_slots")
def test_a_trial_that_cannot_grow_is_not_said_to_get_workers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scheduler = RASDAScheduler(max_t=8, metric="loss", mode="min")
    controller, (trial, _) = started(scheduler, tmp_path)
    assert scheduler.on_trial_result(controller, trial, {"training_iteration": 2, "loss": 0.0}) == "CONTINUE"
    assert "keeps its number of workers (1)" in caplog.text
    assert "the cluster holds no more" not in caplog.text
