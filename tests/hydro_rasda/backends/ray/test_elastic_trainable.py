"""Elastic trials on a real Ray with real gloo groups: 8 logical CPUs, 1 -> 2 -> 4 workers."""

import contextlib
import hashlib
import socket
import sys
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray import tune
from ray.tune.result_grid import ResultGrid

from hydro_rasda import RASDAScheduler, elastic
from hydro_rasda.backends.ray import JournalEntry, read_journal
from hydro_rasda.processes.hang_detector import HangDetector
from tests.hydro_rasda.backends.ray import trainables
from tests.hydro_rasda.backends.ray.trainables import linear

FAULTS = [None, "dies", "hangs", "raises", "returns"]
TIMEOUT_S = 10


class Curves(tune.Callback):  # type: ignore[misc]
    """The loss after each epoch of each kind of trial."""

    def __init__(self) -> None:
        self.of: dict[str | None, dict[int, float]] = {fault: {} for fault in FAULTS}

    def on_trial_result(self, iteration: int, trials: list, trial: Any, result: dict, **info: Any) -> None:
        self.of[trial.config["fault"]][result["training_iteration"]] = result["val_loss"]


@pytest.fixture(scope="module")
def curves() -> Curves:
    return Curves()


@pytest.fixture(scope="module")
def trials(ray8: None, curves: Curves, tmp_path_factory: pytest.TempPathFactory) -> ResultGrid:
    folder = tmp_path_factory.mktemp("elastic")
    scheduler = RASDAScheduler(max_t=4, max_workers=4)
    tuner = tune.Tuner(
        elastic(linear, scheduler, data=trainables.data(), timeout_s=TIMEOUT_S),
        param_space={"fault": tune.grid_search(FAULTS), "folder": str(folder)},
        tune_config=tune.TuneConfig(metric="loss", mode="min", scheduler=scheduler),
        run_config=tune.RunConfig(
            storage_path=str(folder),
            name="run",
            verbose=0,
            callbacks=[curves],
            failure_config=tune.FailureConfig(max_failures=3),  # on a busy machine, ranks are late without a fault
            checkpoint_config=tune.CheckpointConfig(num_to_keep=1),
        ),
    )
    return tuner.fit()


def of(trials: ResultGrid, fault: str | None) -> tuple[tune.Result, list[JournalEntry]]:
    result = next(r for r in trials if r.config is not None and r.config["fault"] == fault)
    assert result.metrics is not None
    entries = read_journal(str(Path(trials.experiment_path)))
    mine = {e.t: e for e in entries if e.trial == result.metrics["trial_id"]}
    return result, [mine[t] for t in sorted(mine)]


def one_process() -> list[float]:
    """The same training in plain torch: the loss after each epoch."""
    x, y = trainables.data()
    model, optimizer = trainables.build()
    curve = []
    for epoch in range(4):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(130):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        with torch.no_grad():
            curve.append(torch.nn.functional.cross_entropy(model(x), y).item())
    return curve


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_workers_and_faults_leave_each_point_of_the_curve_as_it_was(
    trials: ResultGrid, curves: Curves, fault: str | None
) -> None:
    result, entries = of(trials, fault)
    assert result.error is None
    assert [(e.t, e.workers, e.global_batch_size) for e in entries] == [
        (1, 1, 130),
        (2, 2, 130),
        (3, 4, 130),
        (4, 4, 130),
    ]
    assert curves.of[fault] == pytest.approx(dict(enumerate(one_process(), start=1)), abs=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("dies", ["died"]),
        ("hangs", [f"did not answer for {TIMEOUT_S} s"]),
        ("raises", ["raised an error", "the user's own mistake"]),
        ("returns", ["returned from its training function while others waited for it"]),
    ],
)
def test_the_message_names_trial_rank_and_host(trials: ResultGrid, fault: str, words: list[str]) -> None:
    result, _ = of(trials, fault)
    assert result.metrics is not None
    text = Path(result.path, "error.txt").read_text()
    for word in [f"trial {result.metrics['trial_id']}: rank 1 of 2 on {socket.gethostname()}", *words]:
        assert word in text


@pytest.mark.slow
def test_a_rank_that_nobody_waits_for_is_ended_where_it_hangs(
    ray8: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HangDetector, "TIMES", 10)  # before it is pickled for the trial
    tuner = tune.Tuner(
        elastic(trainables.counting, timeout_s=2, checkpoint_every=1),
        param_space={"fault": "hangs", "folder": str(tmp_path)},
        run_config=tune.RunConfig(
            storage_path=str(tmp_path), name="run", verbose=0, failure_config=tune.FailureConfig(max_failures=3)
        ),
    )
    (result,) = tuner.fit()
    assert result.metrics is not None
    assert result.metrics["training_iteration"] == 4
    assert "rank 0 of 1" in (text := Path(result.path, "error.txt").read_text())
    assert "it was ended as it hung: no iteration was over for" in text


@pytest.mark.slow
def test_a_rank_for_which_no_other_waits_fails_its_trial_at_once(ray8: None, tmp_path: Path) -> None:
    trainable = tune.with_resources(elastic(trainables.apart), tune.PlacementGroupFactory([{"CPU": 1}] * 2))
    run_config = tune.RunConfig(storage_path=str(tmp_path), name="run", verbose=0)
    (result,) = tune.Tuner(trainable, run_config=run_config).fit()
    assert "rank 1 of 2" in str(result.error)
    assert "the user's own mistake" in str(result.error)
    assert result.metrics is None or result.metrics.get("training_iteration", 0) < trainables.MANY


@pytest.mark.slow
def test_time_may_be_counted_by_a_nested_number_of_the_trials(ray8: None, tmp_path: Path) -> None:
    scheduler = RASDAScheduler(max_t=80, grace_period=15, time_attr="ep/n")
    tuner = tune.Tuner(
        elastic(trainables.in_tens, scheduler),
        tune_config=tune.TuneConfig(metric="loss", mode="min", scheduler=scheduler),
        run_config=tune.RunConfig(storage_path=str(tmp_path), name="run", verbose=0),
    )
    (result,) = tuner.fit()
    entries = read_journal(str(tmp_path / "run"))
    times = list(range(10, 90, 10))
    assert [(e.t, e.workers) for e in entries] == list(zip(times, [1, 1, 2, 4, 4, 4, 8, 8]))
    assert [e.milestone for e in entries] == [None, 15, 30, None, None, 60, None, None]
    assert result.checkpoint is not None  # of the end
    frame = result.metrics_dataframe
    assert frame is not None
    assert list(frame["ep/n"]) == times


@pytest.mark.slow
def test_data_is_in_memory_once_on_a_node(trials: ResultGrid) -> None:
    result, _ = of(trials, None)
    assert result.metrics is not None
    assert result.metrics["private_mb"] < 8  # of 32


@pytest.mark.slow
def test_older_checkpoints_are_removed(trials: ResultGrid) -> None:
    result, _ = of(trials, None)
    assert [p.name for p in Path(result.path).glob("checkpoint_*")] == [Path(result.checkpoint.path).name]


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"train": None}, ValueError, "`train` is None, but must be a function of a Worker"),
        ({"scheduler": "asha"}, ValueError, "`scheduler` is 'asha', but must be one of Ray Tune's"),
        ({"checkpoint_every": 0}, ValueError, "`checkpoint_every` is 0, but must be None or an integer >= 1"),
        ({"timeout_s": 0}, ValueError, "`timeout_s` is 0, but must be a number of seconds > 0"),
        ({"backend": "mpi"}, ValueError, r"`backend` is 'mpi', but must be one of \('gloo', 'nccl'\)"),
        (
            {"scheduler": RASDAScheduler(time_attr="time_total_s")},
            ValueError,
            "`time_attr` is 'time_total_s', but must be 'training_iteration', or the name",
        ),
    ],
)
def test_bad_input(wrong: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        elastic(**{"train": linear, **wrong})


class Pickled:
    """Data that count how often they are pickled."""

    times = 0

    def __reduce__(self) -> Any:
        type(self).times += 1
        return Pickled, ()


def test_data_are_pickled_and_hashed_once_however_often_a_trial_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's fork server keeps what it loaded under this digest: it must be that of the content, at each start."""
    hashed: list[int] = []
    started: list[tuple[str, bytes]] = []

    def sha256(content: Any) -> Any:
        hashed.append(len(content))
        return hashlib.sha256(content)

    @contextlib.contextmanager
    def fork_rank(digest: str, payload: Any, job: Any) -> Iterator[None]:
        started.append((digest, bytes(payload)))
        yield

    resources = SimpleNamespace(bundles=[{"CPU": 1}])
    context = SimpleNamespace(get_trial_resources=lambda: resources, get_trial_id=lambda: "t")
    module = sys.modules[elastic.__module__]
    monkeypatch.setattr(module, "hashlib", SimpleNamespace(sha256=sha256))
    monkeypatch.setattr(module, "fork_rank", fork_rank)
    monkeypatch.setattr(module, "_follow", lambda *_: None)
    monkeypatch.setattr(module, "RankActors", lambda *_: None)
    monkeypatch.setattr(tune, "get_context", lambda: context)
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_job_id=lambda: "01000000"))
    monkeypatch.setattr(tune, "get_checkpoint", lambda: None)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    # A trial sets it for its process, which here is that of all tests, whose later Rays would inherit it.
    monkeypatch.setenv("TUNE_FUNCTION_THREAD_TIMEOUT_S", "2")
    trainable = elastic(linear, data=Pickled())
    for _ in range(3):
        trainable({})
    assert Pickled.times == 1
    assert [digest for digest, _ in started] == [hashlib.sha256(started[0][1]).hexdigest()] * 3
    assert hashed == [len(started[0][1])]


def test_many_reports_ask_ray_seldom_for_failed_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    module, asked = sys.modules[elastic.__module__], [0]

    class Actors:
        def failed(self) -> dict[int, Any]:
            asked[0] += 1
            return {}

        def endings(self, timeout: float) -> dict[int, Any]:
            return {}

    rank, head = Pipe()
    for _ in range(20):
        rank.send(("report", ({}, None)))
    rank.send(("done", None))
    monkeypatch.setattr(module, "_report", lambda *_: None)
    monkeypatch.setattr(module, "_LOOK_S", 60.0)
    module._follow(head, Actors(), ("", None, {"timeout_s": 60.0}))
    assert asked == [1]
