"""A training function of the user's in every heat: `tune(train=...)` without a loss, on this machine."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydro_rasda import (
    AllTrialsFailed,
    LocalBackend,
    RaceConfig,
    SweepConfig,
    TuneResult,
    Worker,
    choice,
    load,
    loguniform,
    tune,
)
from hydro_rasda.schedulers import NoStopping
from tests.hydro_rasda.conftest import on_threads
from tests.hydro_rasda.forks import is_killed

SPACE: dict[str, Any] = {"rate": loguniform(1e-3, 1.0), "optimizer": choice(["SGD", "AdamW"])}
MAX_T = 4

x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
y = (x[:, :4] * x[:, 4:]).sum(1).gt(0).long()


def model_fn(config: Mapping[str, Any], width_ratio: float = 1.0) -> nn.Module:
    width = int(32 * width_ratio)
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))


def train(worker: Worker, last: int | None = None) -> None:
    """A loop as anybody writes it: no batch size, no loss for one batch."""
    model = worker.model()
    optimizer = worker.optimizer(model, getattr(torch.optim, worker.config["optimizer"]), lr=worker.config["rate"])
    if worker.checkpoint is not None:
        worker.plain(model).load_state_dict(worker.checkpoint["model"])
        optimizer.load_state_dict(worker.checkpoint["optimizer"])
    for _ in range(worker.iteration, last or worker.max_t):
        for batch in torch.randperm(64).split(16):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        with torch.no_grad():
            reward = -F.cross_entropy(model(x[64:]), y[64:])
        worker.report(
            {"reward": reward, "val_width": worker.width_ratio},
            lambda: {"model": worker.plain(model).state_dict(), "optimizer": optimizer.state_dict()},
        )


ASKED: dict[str, Any] = {
    "model_fn": model_fn,
    "space": SPACE,
    "metric": "reward",
    "mode": "max",
    "num_samples": 6,
    "max_t": MAX_T,
    "sweep": SweepConfig(reduction_factor=2, surrogate=1 / 4),
    "race": RaceConfig(top_k=2),
    "name": "run",
    "progress": False,
}
"""Arguments of `tune`."""


@pytest.fixture
def search(tmp_path: Path) -> Callable[..., TuneResult]:
    """`tune` of this loop; any argument can be given in place of its own."""

    def call(function: Callable[..., None] = train, **arguments: Any) -> TuneResult:
        return tune(**ASKED | {"train": function, "storage_path": tmp_path} | arguments)

    return call


def _best_in_the_end(result: TuneResult) -> int:
    """Return the trial whose full training ended best."""
    ends = {record.trial: record.history[-1]["reward"] for record in result.trials if record.epochs == MAX_T}
    return max(ends, key=ends.__getitem__)


def test_it_trains_in_every_heat(search: Callable[..., TuneResult]) -> None:
    """On two cores, its trials train beside each other in processes of their own."""
    result = search()
    assert result.finished
    assert len(result.trials) == 6
    assert {line["heat"]: line["val_width"] for record in result.trials for line in record.history} == {
        "sweep": 1 / 4,
        "race": 1.0,
    }
    model = result.best_model()
    with torch.no_grad():
        assert -F.cross_entropy(model(x[64:]), y[64:]).item() == pytest.approx(result.best_metric)
    assert result.best_trial == _best_in_the_end(result)
    assert not [record for record in result.trials if record.error]
    assert load(result.path).best_config == result.best_config
    with pytest.raises(ValueError, match="no loss is known of a run that `train` alone trains"):
        result.evaluate((x, y))
    with pytest.raises(ValueError, match="`train` trained it"):
        result.recipe()


@pytest.mark.usefixtures("one_process")
def test_a_resumed_run_is_the_unbroken_one(search: Callable[..., TuneResult]) -> None:
    whole = search(name="whole")
    calls = [0]

    def halting(worker: Worker) -> None:
        calls[0] += 1
        if calls[0] % 3 == 0:
            raise KeyboardInterrupt
        train(worker)

    for _ in range(20):
        try:
            again = search(halting, resume="changed")
            break
        except KeyboardInterrupt:
            continue
    assert (again.best_config, again.best_metric) == (whole.best_config, whole.best_metric)
    assert [record.history for record in again.trials] == [record.history for record in whole.trials]


@pytest.mark.usefixtures("one_process")
def test_at_full_width_it_goes_on_from_the_sweep(search: Callable[..., TuneResult]) -> None:
    begun: list[int] = []

    def noting(worker: Worker) -> None:
        begun.append(worker.iteration)
        train(worker)

    result = search(noting, sweep=SweepConfig(reduction_factor=2, surrogate=1))
    assert result.finished
    assert begun.count(0) == 6, "finalists do not begin anew"
    assert result.best_trial == _best_in_the_end(result)


@pytest.mark.usefixtures("one_process")
def test_who_returns_early_is_compared_by_its_best_epoch(search: Callable[..., TuneResult]) -> None:
    calls: list[tuple[str, int]] = []

    def short(worker: Worker) -> None:
        calls.append((worker.trial, worker.iteration))
        train(worker, last=1 if worker.width_ratio < 1 else None)

    result = search(short, sweep=SweepConfig(reduction_factor=2, surrogate=1 / 4, rule="none"), max_t=8)
    assert result.finished
    narrow = {r.trial: [line["reward"] for line in r.history if line["heat"] == "sweep"] for r in result.trials}
    assert all(len(rewards) == 4 and len({*rewards}) == 1 for rewards in narrow.values())
    assert sum(iteration == 0 for _, iteration in calls) == len(narrow) + 2, "over is over: it is not called again"


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("surrogate", [1 / 4, 1])
@pytest.mark.parametrize("says_so", [False, True])
def test_who_ends_at_a_rung_is_over(search: Callable[..., TuneResult], surrogate: float, says_so: bool) -> None:
    """Rungs are after 2 and 4 epochs. The second epoch is the last, which some functions say."""
    calls: list[int] = []

    def two_epochs(worker: Worker) -> None:
        calls.append(worker.iteration)
        order = worker.report
        if says_so:
            worker.report = lambda *given: order(*given, final=worker.iteration == 1)  # type: ignore[method-assign]
        train(worker, last=None if says_so else 2)

    sweep = SweepConfig(surrogate=surrogate, rule=NoStopping(4, every=2))
    result = search(two_epochs, sweep=sweep, max_t=8, num_samples=3)
    assert result.finished
    assert not [record.error for record in result.trials if record.error]
    for record in result.trials:
        rewards = [line["reward"] for line in record.history if line["heat"] == "sweep"]
        assert rewards == [*rewards[:2], max(rewards[:2]), max(rewards[:2])]
    assert {*calls} == ({0} if says_so else {0, 2})


@pytest.fixture
def two_cores() -> Iterator[None]:
    with on_threads(2):
        yield


@pytest.mark.usefixtures("two_cores")
def test_no_trial_waits_for_a_slower_one(search: Callable[..., TuneResult], tmp_path: Path) -> None:
    """On two cores, trial 0 trains beside all others of its rung, and the first finalist beside the other three."""

    def slow(worker: Worker) -> None:
        size = "full" if worker.width_ratio == 1 else "narrow"
        (tmp_path / f"{size} {worker.trial}").touch()
        first = min(tmp_path.glob("full *"), key=lambda path: path.stat().st_mtime_ns, default=None)
        if worker.iteration == 0 and (size == "narrow" and worker.trial == "0"):
            _wait_for(lambda: len([*tmp_path.glob("narrow *")]) == 6)
        if worker.iteration == 0 and size == "full" and first is not None and first.name == f"full {worker.trial}":
            _wait_for(lambda: len([*tmp_path.glob("full *")]) == 4)
        train(worker)

    result = search(slow, race=RaceConfig(top_k=4))
    assert result.finished
    assert not [record for record in result.trials if record.error]


@pytest.mark.slow
@pytest.mark.usefixtures("two_cores")
def test_trials_that_a_device_left_out_train_later(search: Callable[..., TuneResult], tmp_path: Path) -> None:
    """Trial 0 goes to full size before the rest of its rung begins, and is not good enough there."""

    def good_when_narrow(worker: Worker) -> None:
        state = {"model": worker.model().state_dict()}
        size = "full" if worker.width_ratio == 1 else "narrow"
        while worker.iteration < worker.max_t:
            with (tmp_path / "trained").open("a") as file:
                file.write(f"{size} {worker.trial} {worker.iteration + 1}\n")
            time.sleep(0.1 * int(worker.trial) * (size == "narrow"))  # trial 0 is done first
            worker.report({"reward": 9.0 if (worker.trial, size) == ("0", "narrow") else -worker.config["rate"]}, state)

    result = search(good_when_narrow, stop_at=9.0)
    trained = (tmp_path / "trained").read_text().splitlines()
    assert result.finished
    assert len(trained) == len({*trained}), "no epoch is trained twice"
    assert {line.split()[1] for line in trained if line.startswith("narrow")} == {"0", "1", "2", "3", "4", "5"}
    assert trained.index("full 0 1") < trained.index("narrow 3 1")


@pytest.mark.slow
@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize("seed", range(4))
def test_kills_of_driver_and_trials_lose_nothing(
    search: Callable[..., TuneResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """At random moments, a trial's process kills itself or its driver; at the end, no process or file is left."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    whole, random = search(name="whole"), Random(seed)
    kills = [(random.randrange(20), random.choice(["driver", "trial"])) for _ in range(4)]

    def dying(worker: Worker) -> None:
        order = worker.report

        def report(*given: Any, **named: Any) -> None:
            with (tmp_path / "reports").open("a") as file:
                file.write(".")
            count = (tmp_path / "reports").stat().st_size
            for at, what in kills:
                mark = tmp_path / f"{at} {what}"
                if count > at and not mark.exists():
                    mark.touch()
                    os.kill(os.getppid() if what == "driver" else os.getpid(), signal.SIGKILL)
            order(*given, **named)

        worker.report = report  # type: ignore[method-assign]
        train(worker)

    own = psutil.Process()
    earlier = {one.pid for one in own.children(recursive=True)}  # such as a fork server of another test
    for _ in range(6):
        if not is_killed(lambda: search(dying)):
            break
    left = [one for one in own.children(recursive=True) if one.pid not in earlier]
    assert not [one for one in left if one.status() != psutil.STATUS_ZOMBIE]
    result = search(dying, resume="must")
    assert not [*temporary.glob("hydro_rasda*")]
    assert (result.best_config, result.best_metric) == (whole.best_config, whole.best_metric)
    assert [record.history for record in result.trials] == [record.history for record in whole.trials]
    assert not [*(tmp_path / "run").rglob("*.tmp")]


def _wait_for(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not holds():
        if time.monotonic() > until:
            raise TimeoutError("the other trials wait for this one")
        time.sleep(0.01)


def forks(worker: Worker) -> None:
    if os.fork() == 0:
        return  # and so would go on with the tuner's work
    os.wait()
    train(worker)


def reports_in_a_fork(worker: Worker) -> None:
    if os.fork() == 0:
        try:
            worker.report({"reward": 1.0}, {"model": {}})
        except RuntimeError:
            os._exit(7)
        os._exit(0)
    _, status = os.wait()
    assert os.waitstatus_to_exitcode(status) == 7
    train(worker)


@pytest.mark.parametrize("function", [pytest.param(forks, marks=pytest.mark.slow), reports_in_a_fork])
def test_a_fork_of_it_does_none_of_the_tuners_work(search: Callable[..., TuneResult], function: Any) -> None:
    assert search(function).best_metric == search(name="plain").best_metric


class Closed:
    """A stream whose reader has gone."""

    def write(self, _: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def _prints(worker: Worker) -> None:
    print("anything", file=Closed())


def _changes_its_key(worker: Worker) -> None:
    state = {"model": worker.plain(worker.model()).state_dict()}
    worker.report({"reward": 0.0}, state)
    worker.report({"rewards": 0.0}, state)


FAULTS: dict[str, tuple[Callable[[Worker], object], str]] = {
    "raises": (lambda worker: worker.config["rate"] / 0, "ZeroDivisionError"),
    "exits": (lambda worker: sys.exit(0), "SystemExit: 0"),
    "dies": (lambda worker: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL"),
    "prints to a closed pipe": (_prints, "BrokenPipeError"),
    "reports nothing": (lambda worker: None, "`train` returned without a report"),
    "reports tensors": (
        lambda worker: worker.report({"reward": torch.zeros(2)}, {"model": {}}),
        "`metrics` is .*the number 'reward', which is `tune`'s `metric`",
    ),
    "changes its key": (_changes_its_key, "`metrics` is .*'reward'"),
    "reports no mapping": (lambda worker: worker.report(0.5), "`metrics` is 0.5"),  # type: ignore[arg-type]
    "raises in its state": (
        lambda worker: worker.report({"reward": 0.0}, lambda: {"model": 1 / 0}),
        "ZeroDivisionError",
    ),
    "reports another model": (
        lambda worker: worker.report(
            {"reward": 0.0}, {"model": nn.ModuleDict({"_orig_mod": worker.model()}).state_dict()}
        ),
        r"`state\['model'\]` is .*_orig_mod\.0\.bias.* of a wrapper",
    ),
    "reports NaN": (
        lambda worker: worker.report({"reward": float("nan")}, {"model": worker.model().state_dict()}),
        "",
    ),
}


# Each takes a whole search; these raise where others do.
AGAIN = ("prints to a closed pipe", "reports nothing", "reports no mapping", "raises in its state")


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=[pytest.mark.slow] * (fault in AGAIN)) for fault in FAULTS]
)
def test_a_trial_fails_alone(search: Callable[..., TuneResult], fault: str) -> None:
    broken, told = FAULTS[fault]

    def train_or_fail(worker: Worker) -> None:
        if worker.trial == "2":
            worker.model()
        (broken if worker.trial == "2" else train)(worker)

    result = search(train_or_fail)
    assert result.finished
    assert result.best_trial != 2
    assert [record.trial for record in result.trials if record.error] == [2] * (told != "")
    if told:
        with pytest.raises(ValueError, match=told):
            raise ValueError(result.trials[2].error)
    else:
        assert result.trials[2].status == "diverged"
    assert result.best_trial == _best_in_the_end(result)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("rule", ["halving", "none"])
def test_a_trial_that_diverges_between_rungs_is_lost_at_the_next(search: Callable[..., TuneResult], rule: Any) -> None:
    """It ended the sweep, as if time were up, and when the call was repeated, it trained on."""
    calls: list[str] = []

    def diverges(worker: Worker) -> None:
        calls.append(worker.trial)
        if worker.trial != "2":
            train(worker)
        model = worker.model()
        for reward in (-0.1, float("nan"), -0.1):
            worker.report({"reward": reward}, {"model": model.state_dict()})

    sweep = SweepConfig(grace_period=3, surrogate=1 / 4, rule=rule)
    result = search(diverges, sweep=sweep)
    assert result.finished
    assert (result.trials[2].status, result.trials[2].sweep_epochs) == ("diverged", 2)
    assert calls.count("2") == 1
    calls.clear()
    assert search(diverges, sweep=sweep).trials == result.trials
    assert calls == []


def test_if_all_fail_the_first_error_is_told(search: Callable[..., TuneResult]) -> None:
    with pytest.raises(AllTrialsFailed, match="ZeroDivisionError"):
        search(FAULTS["raises"][0])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"train": print, "model_fn": 1}, None),
        (
            {"model_fn": lambda config: model_fn(config)},
            r"`model_fn` is '<lambda>', but must be a function of \(config, ",
        ),
        ({"sweep": SweepConfig(fusion=2)}, "`sweep.fusion` is 2, but must be 'auto' or 1 where `train` alone trains"),
        ({"sweep": SweepConfig(repeats=2)}, "`train` is .*, but must be None where a trial trains several models"),
        ({"metrics": lambda outputs, targets: {}}, "`metrics` is .*, but must be None where `train` alone trains"),
        ({"metric": ["reward", "macs"], "mode": "max"}, r"`metric` is \('macs',\), but must be metrics that `train`"),
        ({"metric": "workers"}, r"`metric` is \['workers'\], but must be metrics of other names where `train` alone"),
        ({"race": RaceConfig(patience=1)}, "`race.patience` is 1, but must be None with `train`"),
        ({"train": lambda: None}, r"`train` is .*, but must be None, or a function"),
        ({"train": None}, "`train_data` is None, but must be given, unless `train` alone trains the models"),
    ],
)
def test_what_does_not_go_together_is_refused_before_any_work(tmp_path: Path, arguments: Any, told: str) -> None:
    asked: dict[str, Any] = {"model_fn": model_fn, "space": SPACE, "train": train, "metric": "reward", "name": "run"}
    with pytest.raises(ValueError, match=told):
        tune(**asked | arguments, storage_path=tmp_path)
    assert not [*tmp_path.iterdir()]


@pytest.mark.usefixtures("one_process")
def test_its_keys_and_data_are_its_own(search: Callable[..., TuneResult]) -> None:
    """Values that the library would refuse where it reads them, and data in no form of its own."""

    def own(worker: Worker) -> None:
        assert (worker.data[0]["env"], worker.data[1], worker.config["lr"]) == ("CartPole", None, "high")
        state = {"model": worker.plain(worker.model()).state_dict()}
        worker.report({"reward": worker.config["rate"]}, state)

    space = {"rate": loguniform(1e-3, 1.0), "lr": "high", "optimizer": choice(["SGD", "none"]), "batch_size": None}
    result = search(own, space=space, train_data={"env": "CartPole"}, max_t=2)
    assert result.finished
    assert not [record for record in result.trials if record.error]
    again = search(own, space=space, train_data={"env": "CartPole"}, max_t=2, resume="must")
    assert again.best_metric == result.best_metric
    with pytest.raises(Exception, match="`train_data` has other content"):
        search(own, space=space, train_data={"env": "Acrobot"}, max_t=2)


def _loop(make: Callable[[Worker, nn.Module], torch.optim.Optimizer]) -> Callable[[Worker], None]:
    def function(worker: Worker) -> None:
        model = worker.model()
        optimizer = make(worker, model)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        state = worker.plain(model).state_dict()
        for _ in range(worker.iteration, MAX_T):
            worker.report({"reward": 0.0}, {"model": state})

    return function


def _told(search: Callable[..., TuneResult], function: Callable[[Worker], None]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        search(function)
    return [str(one.message) for one in caught]


def test_a_loop_is_told_once_which_rates_it_misses(search: Callable[..., TuneResult]) -> None:
    (told,) = _told(search, _loop(lambda worker, model: torch.optim.Adam(model.parameters(), lr=0.1)))
    assert told.startswith("at 1/4 of the width, Adam needs 4 times the learning rate for `2.weight`. `train` gives")
    assert "worker.optimizer(model, Adam, lr=...)" in told


def _in_one_cycle(worker: Worker, model: nn.Module) -> torch.optim.Optimizer:
    optimizer = worker.optimizer(model, torch.optim.Adam, lr=0.1)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    return optimizer


def test_a_loop_is_told_of_a_schedule_that_replaces_its_rates(search: Callable[..., TuneResult]) -> None:
    (told,) = _told(search, _loop(_in_one_cycle))
    assert told.startswith("at 1/4 of the width, Adam needs 4 times the learning rate for `2.weight`. `train` gives")
    assert "the same, as OneCycleLR does" in told


def _warmed_up(worker: Worker, model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer whose first step has a rate of 0."""
    optimizer = worker.optimizer(model, torch.optim.Adam, lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 9)
    return optimizer


@pytest.mark.parametrize(
    "make",
    [
        lambda worker, model: worker.optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9),
        lambda worker, model: torch.optim.Adam(worker.param_groups(model, torch.optim.Adam, lr=0.1), lr=0.1),
        lambda worker, model: torch.optim.Adam([nn.Parameter(torch.zeros(2))]),
        _warmed_up,
    ],
)
def test_others_are_told_nothing(search: Callable[..., TuneResult], make: Any) -> None:
    assert _told(search, _loop(make)) == []


def test_a_loop_that_builds_its_model_itself_is_told_so(search: Callable[..., TuneResult]) -> None:
    def own(worker: Worker) -> None:
        state = {"model": model_fn(worker.config).state_dict()}
        for _ in range(worker.iteration, MAX_T):
            worker.report({"reward": 0.0}, state)

    (told,) = _told(search, own)
    assert "`train` does not call `worker.model()`" in told


@pytest.mark.slow
def test_several_devices_decide_the_same(search: Callable[..., TuneResult]) -> None:
    rule = SweepConfig(reduction_factor=2, surrogate=1 / 4, rule="hyperband")
    one, two = (search(sweep=rule, name=str(count), backend=LocalBackend(["cpu"] * count)) for count in (1, 2))
    assert one.best_config == two.best_config
    assert one.best_metric == pytest.approx(two.best_metric, rel=1e-4)


@pytest.mark.usefixtures("one_process")
def test_copies_go_on_with_the_weights_of_their_source(search: Callable[..., TuneResult]) -> None:
    result = search(sweep=SweepConfig(surrogate=1 / 4, reduction_factor=2, rule="pbt"), num_samples=8, max_t=8)
    assert result.finished
    assert any("copies" in line for line in (result.path / "journal.jsonl").read_text().splitlines())


@pytest.mark.slow
def test_a_kill_at_any_event_changes_nothing(search: Callable[..., TuneResult]) -> None:
    whole, kills = search(name="whole"), 0

    def killed_at(at: int) -> None:
        heard = [0]

        def kill(event: Any) -> None:
            heard[0] += type(event).__name__ in ("EpochsTrained", "CheckpointSaved", "RungDecided")
            if heard[0] > at:
                os.kill(os.getpid(), signal.SIGKILL)

        search(name=f"run-{at}", callbacks=[kill])

    while is_killed(partial(killed_at, kills)):
        again = search(name=f"run-{kills}", resume="must")
        assert (again.best_config, again.best_metric) == (whole.best_config, whole.best_metric)
        assert [record.history for record in again.trials] == [record.history for record in whole.trials]
        kills += 3
    assert kills > 20


@pytest.mark.usefixtures("one_process")
def test_metrics_of_any_name_are_compared_and_shown(search: Callable[..., TuneResult]) -> None:
    result = search(metric=["reward", "val_width"], mode=["max", "min"])
    front = result.pareto
    assert front
    assert result.best_trial in [record.trial for record in front]
    assert result.trials[result.best_trial].metrics["reward"] == result.best_metric
    assert result.hypervolume({"reward": -100.0, "val_width": 2.0}) > 0
    assert {*result.curves()["metric"]} == {"reward", "val_width"}


def test_tensors_may_be_its_data(search: Callable[..., TuneResult]) -> None:
    def own(worker: Worker) -> None:
        state = {"model": worker.plain(worker.model()).state_dict()}
        worker.report({"reward": worker.data[0][0].mean()}, state)

    first = search(own, train_data=(x, y), max_t=1)
    assert search(own, train_data=[x, y], max_t=1).best_metric == first.best_metric == pytest.approx(x.mean().item())


class Caching:
    """Keeps what it has read, as data sets do with examples or an open file."""

    def __init__(self, size: float) -> None:
        self.size, self.cache = size, list[float]()

    def read(self) -> float:
        self.cache.append(self.size)
        return self.size


@pytest.mark.usefixtures("one_process")
def test_data_that_a_call_has_read_are_those_of_the_same_call(search: Callable[..., TuneResult]) -> None:
    def own(worker: Worker) -> None:
        state = {"model": worker.model().state_dict()}
        worker.report({"reward": worker.data[0].read()}, state)

    data = Caching(0.5)
    for count in (2, 3):
        result = search(own, train_data=data, val_data=data, max_t=1, num_samples=count)
        assert len(result.trials) == count
    data.size = 0.25
    with pytest.raises(Exception, match="`train_data` has other content"):
        search(own, train_data=data, val_data=data, max_t=1, num_samples=3)
