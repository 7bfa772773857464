"""The full-size stage on a real Ray of 8 logical CPUs, with a model that trains in milliseconds."""

from __future__ import annotations

import json
import math
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.tune.error import TuneError
from ray.tune.experiment import Experiment
from ray.tune.schedulers import FIFOScheduler, MedianStoppingRule

from hydro_rasda import RASDAConfig, RASDAScheduler, choice, loguniform, randint, read_journal, uniform
from hydro_rasda.backends.ray.event_log import EventLog
from hydro_rasda.backends.ray.full_size import FullSize
from hydro_rasda.backends.ray.schedulers_by_name import make_scheduler
from hydro_rasda.backends.ray.trial_feed import Offer, TrialFeed, number_of
from hydro_rasda.config import TuneConfig
from hydro_rasda.problem import Problem
from hydro_rasda.run.state import Run
from hydro_rasda.schedulers import milestones
from hydro_rasda.trial import Trial
from tests.hydro_rasda.backends.ray import feeding
from tests.hydro_rasda.backends.ray.test_restore import survivors_reached

SPACE = {"lr": loguniform(1e-3, 1.0)}
LRS = [0.5 / 2**i for i in range(8)]

Open = Callable[..., Run]


@pytest.fixture
def open_run(problem: Problem, tmp_path: Path) -> Iterator[Open]:
    """Opens a run of linear models in one folder; closed at the end."""
    opened: list[Run] = []

    def call(configs: list[dict[str, Any]], **settings: Any) -> Run:
        run = feeding.open_run(tmp_path / "run", feeding.of_linear(problem), configs, **settings)
        opened.append(run)
        return run

    yield call
    for run in opened:
        run.store.close()


def stage(run: Run, scheduler: Any = "rasda") -> FullSize:
    return FullSize(run, {"CPU": 1}, scheduler, space=SPACE, train=feeding.train)


def epochs(run: Run) -> dict[int, list[int]]:
    return {number: [line["epoch"] for line in lines] for (_, number), lines in run.metrics.items()}


def trained(run: Run, number: int) -> torch.nn.Module:
    """The model of a trial's last checkpoint."""
    model = run.problem.target(Trial(number, run.trials[number].config))
    model.load_state_dict(run.store.load(run.checkpoints[number])["model"])
    return model


def wait_for(what: Callable[[], bool], stage: FullSize) -> None:
    until = time.monotonic() + 1000
    while not what():
        assert time.monotonic() < until
        stage.poll()
        time.sleep(0.05)


def train_all(run: Run, scheduler: Any) -> None:
    full = stage(run, scheduler)
    full.offer(sorted(run.trials))
    full.finish(sorted(run.trials))
    assert set(run.checkpoints) == set(run.trials)
    assert all(seen == list(range(1, len(seen) + 1)) for seen in epochs(run).values())


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["asha", "median", MedianStoppingRule("epoch", "val_loss", "min")])
def test_other_schedulers_run_to_their_end(ray8: None, open_run: Open, scheduler: Any) -> None:
    run = open_run([{"lr": lr} for lr in LRS[:3]], max_t=4, rasda=RASDAConfig(workers=2))
    train_all(run, scheduler)
    assert not run.failures
    assert run.epochs("target", 0) == 4
    assert {line["workers"] for lines in run.metrics.values() for line in lines} == {2}


@pytest.mark.slow
def test_rasda_that_waits_and_grows_by_what_it_brings_runs_to_its_end(ray8: None, open_run: Open) -> None:
    """One fails while the others wait for it."""
    settings = RASDAConfig(grace_period=1, wait=1e6, grow="efficient")
    configs = [{"lr": lr, "seconds": 0.5, "fails_at": 2 if lr == LRS[0] else 0} for lr in LRS[:5]]
    run = open_run(configs, max_t=4, rasda=settings)
    full = stage(run)
    full.offer(sorted(run.trials))
    full.finish(sorted(run.trials))
    assert all(seen == list(range(1, len(seen) + 1)) for seen in epochs(run).values())
    assert max(run.epochs("target", number) for number in run.trials) == 4
    assert set(run.failures) <= {0}
    entries = read_journal(str(run.store.path / "ray"))
    waited = {(e.trial, e.t) for e in entries if e.decision == "wait"}
    assert waited
    assert waited <= {(e.trial, e.milestone) for e in entries if e.milestone is not None}


@pytest.mark.slow
def test_a_trial_of_hyperband_fails_alone(ray8: None, open_run: Open) -> None:
    """It fails when the others of its bracket are paused and wait for it."""
    run = open_run([{"lr": lr, "fails_at": 3 if lr == 0.5 else 0} for lr in (0.1, 0.2, 0.3, 0.4, 0.5)], max_t=4)
    train_all(run, "hyperband")
    assert epochs(run)[4] == [1, 2]
    assert [run.epochs("target", number) for number in range(4)] == [4, 4, 4, 4]
    assert set(run.failures) == {4}
    assert f"trial 4: rank 0 of 1 on {socket.gethostname()}" in run.failures[4]
    assert "the user's own mistake" in run.failures[4]


@pytest.mark.slow
def test_pbt_leaves_the_configurations_that_the_models_were_trained_with(ray8: None, open_run: Open) -> None:
    run = open_run([{"lr": lr, "wide": lr == 0.5, "seconds": 0.8} for lr in (0.5, 1e-6, 1e-6)], max_t=8)
    sampled = dict(run.trials)
    train_all(run, "pbt")
    assert not run.failures
    for number in (1, 2):
        config = run.trials[number].config
        trained(run, number)
        assert config == sampled[number].config or config["wide"]
    assert any(run.trials[number].config != sampled[number].config for number in (1, 2))
    changed = [line for unit in run.store.units().values() for line in unit.lines if line["event"] == "trial"]
    assert {line["trial"]: line["config"] for line in changed} == {
        number: run.trials[number].config for number in (1, 2) if run.trials[number].config != sampled[number].config
    }


@pytest.mark.slow
def test_stopped_trials_leave_checkpoints_and_go_on(ray8: None, open_run: Open) -> None:
    configs = [{"lr": lr, "seconds": 0.3} for lr in LRS[:3]]
    run = open_run(configs, max_t=16)
    full = stage(run)
    full.offer([0, 1, 2])
    wait_for(lambda: len(run.checkpoints) == 3, full)
    full.stop()
    before = epochs(run)
    for number in run.checkpoints:
        trained(run, number)
    run.store.close()

    again = open_run(configs, max_t=16)
    full = stage(again)
    assert epochs(again) == before
    assert again.checkpoints == run.checkpoints
    wait_for(lambda: max(map(len, epochs(again).values())) > max(map(len, before.values())), full)
    full.stop()
    assert all(seen == list(range(1, len(seen) + 1)) for seen in epochs(again).values())
    again.store.close()

    late = open_run(configs, max_t=16, time_budget_s=0.1)
    full = stage(late)
    full.finish([0, 1, 2])
    assert not late.store.done("target/done")
    saved = {number: int(name.rpartition("-")[2]) for number, name in late.checkpoints.items()}
    assert epochs(late) == {number: list(range(1, epoch + 1)) for number, epoch in saved.items()}


@pytest.mark.slow
def test_a_killed_driver_leaves_all_that_the_next_one_needs(tmp_path: Path) -> None:
    path = tmp_path / "run"
    command = [sys.executable, "-m", "tests.hydro_rasda.backends.ray.feeding_script", str(tmp_path)]
    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 1000
    while not survivors_reached(path / "ray", workers=2) and time.monotonic() < until:
        assert driver.poll() is None, "the first run ended before it was killed"
        time.sleep(0.05)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    before = (path / "journal.jsonl").read_bytes()
    restored = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "FINISHED 0 0 8 target/trial-0/to-8" in restored.stdout, restored.stderr[-3000:]

    assert (path / "journal.jsonl").read_bytes().startswith(before)
    reached: dict[int, int] = {}
    for line in map(json.loads, (path / "journal.jsonl").read_text().splitlines()):
        if line["event"] == "metrics":
            assert line["epoch"] == reached.get(line["trial"], 0) + 1
            reached[line["trial"]] = line["epoch"]
    assert set(reached) == set(range(4))
    # What this process did began where the last checkpoint of the one before was taken.
    kept = [json.loads(line) for line in before.splitlines()]
    saved = {line["value"]["checkpoint"] for line in kept if line["event"] == "unit" and "/to-" in line["key"]}
    assert saved
    for entry in read_journal(str(path / "ray")):
        assert f"target/trial-{entry.trial}/to-{entry.t}" not in saved
    assert len(list((path / "ray" / "trial-0").glob("checkpoint*"))) == 1


@pytest.mark.slow
def test_late_offers_get_their_turn(ray8: None, open_run: Open) -> None:
    run = open_run([{"lr": lr} for lr in LRS[::-1]], max_t=4)
    full = stage(run)
    full.hold(8)
    full.offer([0, 1])
    held_until = time.monotonic() + 3
    wait_for(lambda: time.monotonic() > held_until, full)
    assert ray.available_resources()["CPU"] == 8
    full.hold(0)
    wait_for(lambda: len(run.checkpoints) == 2, full)
    full.offer([7, 1, 6])
    full.finish([6, 7])
    assert set(epochs(run)) == {0, 1, 6, 7}
    assert all(seen == list(range(1, len(seen) + 1)) for seen in epochs(run).values())
    assert epochs(run)[7] == [1, 2, 3, 4]
    assert [line["workers"] for line in run.metrics["target", 7]] == [1, 2, 4, 4]
    x, y = next(run.problem.val_data.in_order(160))
    loss = torch.nn.functional.cross_entropy(trained(run, 7)(x), y).item()
    assert loss == pytest.approx(run.score("target", 7), abs=1e-6)
    again = stage(run)
    again.offer([0])
    assert not any(thread.name == "tune" for thread in threading.enumerate()), "a stage that was done began anew"
    again.finish([6, 7])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheduler", "worker", "space", "error", "message"),
    [
        ("bohb", {"CPU": 1}, SPACE, ValueError, "`scheduler` is 'bohb', but must be one of"),
        (7, {"CPU": 1}, SPACE, ValueError, "`scheduler` is 7, but must be one of"),
        ("pbt", {"CPU": 1}, {"depth": randint(1, 9)}, ValueError, "`scheduler` is 'pbt', but must be another one"),
        ("rasda", {"CPU": 1, "GPU": 1}, SPACE, ValueError, "`resources_per_worker` is .*'GPU': 1"),
        ("asha", {"CPU": 4}, SPACE, ValueError, "`workers` is 3, but must be <= 2"),
    ],
)
def test_bad_input(
    ray8: None, open_run: Open, scheduler: Any, worker: Any, space: Any, error: type[Exception], message: str
) -> None:
    run = open_run([{"lr": 0.1}], max_t=4, rasda=RASDAConfig(workers=3))
    with pytest.raises(error, match=message):
        FullSize(run, worker, scheduler, space=space, train=feeding.train)


def raises(worker: Any) -> None:
    worker.report({"epoch": 1, "train_loss": 1.0})


@pytest.mark.slow
def test_what_tune_raises_comes_out_of_the_main_thread(ray8: None, open_run: Open) -> None:
    run = open_run([{"lr": 0.1}], max_t=4)
    full = FullSize(run, {"CPU": 1}, space=SPACE, train=raises)
    full.offer([0])
    with pytest.raises(Exception, match="did not include the specified metric"):
        full.finish([0])


class RaisesAtTheEnd(FIFOScheduler):  # type: ignore[misc]  # Ray's classes have no types
    def __init__(self) -> None:
        super().__init__()
        self.stopping = threading.Event()

    def on_trial_result(self, tune_controller: Any, trial: Any, result: Any) -> str:
        if result["training_iteration"] > 2:
            self.stopping.wait(100)
            raise RuntimeError("the scheduler cannot go on")
        return str(super().on_trial_result(tune_controller, trial, result))


@pytest.mark.slow
def test_what_tune_raises_while_it_is_stopped_comes_out_too(ray8: None, open_run: Open) -> None:
    run, scheduler = open_run([{"lr": 0.1}], max_t=16), RaisesAtTheEnd()
    full = stage(run, scheduler)
    scheduler.stopping = full._stopping
    full.offer([0])
    wait_for(lambda: bool(run.checkpoints), full)
    run.problem = run.problem.with_settings(time_budget_s=1e-3)
    with pytest.raises(TuneError, match="the scheduler cannot go on"):
        full.poll()
    assert run.store.done("target/ended-by-0.001s")


def test_pbt_stays_within_the_space() -> None:
    space = {"momentum": uniform(0.5, 0.95), "optimizer": "sgd", "lr": choice([0.1, 0.2]), "depth": randint(1, 9)}
    pbt = make_scheduler("pbt", TuneConfig(max_t=4), {"CPU": 1}, space)
    assert pbt._hyperparam_mutations == {"config": {"momentum": space["momentum"], "lr": [0.1, 0.2]}}
    far: dict[str, Any] = {"trial": 3, "config": {"momentum": 1.1, "lr": 0.2, "depth": 4, "optimizer": "sgd"}}
    assert pbt._custom_explore_fn(far)["config"] == {**far["config"], "momentum": math.nextafter(0.95, 0)}


def test_rungs_lie_on_ray_where_they_lie_locally() -> None:
    settings = TuneConfig(max_t=27, rasda=RASDAConfig(grace_period=2, reduction_factor=2, scaling_factor=3))
    scheduler = make_scheduler("rasda", settings, {"CPU": 1}, SPACE)
    assert isinstance(scheduler, RASDAScheduler)
    assert scheduler.rule.milestones == (2, 6, 18, 27)
    assert scheduler.rule.milestones == milestones(settings.full_grace_period, 27, settings.rasda.scaling_factor)
    assert make_scheduler("asha", settings, {"CPU": 1}, SPACE)._reduction_factor == 2


def test_waiting_and_growth_are_those_of_the_settings() -> None:
    asked: Any = {"wait": 0.1, "grow": "efficient", "least_efficiency": 0.2, "batch_over_noise": 3.0}
    chosen = make_scheduler("rasda", TuneConfig(rasda=RASDAConfig(**asked)), {"CPU": 1}, SPACE)
    papers = make_scheduler("rasda", TuneConfig(rasda=RASDAConfig()), {"CPU": 1}, SPACE)
    assert isinstance(chosen, RASDAScheduler)
    assert isinstance(papers, RASDAScheduler)
    assert {name: getattr(chosen.rule, name) for name in asked} == asked
    assert (papers.rule.wait, papers.rule.grow) == (0, "due")


def test_better_offers_go_first_and_none_twice(tmp_path: Path) -> None:
    experiment = Experiment("ray", lambda config: None, storage_path=str(tmp_path))
    feed = TrialFeed(experiment)
    assert feed.next_trial() is None
    feed.offer({number: Offer(number, {}) for number in (3, 1, 2)})
    first = feed.next_trial()
    assert first is not None
    assert (number_of(first), first.config) == (3, {"trial": 3, "config": {}})
    feed.offer({number: Offer(number, {}) for number in (5, 3, 2)})
    given = [number_of(trial) for trial in iter(feed.next_trial, None) if trial is not None]
    assert given == [5, 2, 1]
    assert not feed.is_finished()
    feed.close()
    assert feed.is_finished()


def test_events_survive_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.write({"event": "ended", "trial": 0})
    assert list(log.read()) == [(0, {"event": "ended", "trial": 0})]
    assert list(log.read()) == []
    log.close()
    with path.open("a") as file:
        file.write('{"event": "met')
    again = EventLog(path)
    again.write({"event": "ended", "trial": 1, "how": int})
    assert [(place, event["trial"]) for place, event in again.read()] == [(0, 0), (1, 1)]
    again.remove()
    assert not path.exists()
