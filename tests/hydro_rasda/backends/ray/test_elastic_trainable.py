"""Elastic trials on a real Ray with real gloo groups: 8 logical CPUs, 1 -> 2 -> 4 workers."""

import contextlib
import hashlib
import os
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
from hydro_rasda.backends.ray.rank_actors import Ending
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


Started = list[tuple[str, bytes, dict[str, Any]]]
"""The digest, the payload and the job of each rank 0 that was started."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Stand in for Ray: a trial has two bundles, and its ranks are noted instead of forked."""
    found: Started = []

    @contextlib.contextmanager
    def fork_rank(digest: str, payload: Any, job: Any) -> Iterator[None]:
        found.append((digest, bytes(payload), job))
        yield

    resources = SimpleNamespace(bundles=[{"CPU": 3.0, "GPU": 0.5}] * 2)
    context = SimpleNamespace(get_trial_resources=lambda: resources, get_trial_id=lambda: "t")
    module = sys.modules[elastic.__module__]
    monkeypatch.setattr(module, "fork_rank", fork_rank)
    monkeypatch.setattr(module, "_follow", lambda *_: None)
    monkeypatch.setattr(module, "RankActors", lambda *_: None)
    monkeypatch.setattr(tune, "get_context", lambda: context)
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_job_id=lambda: "01000000"))
    monkeypatch.setattr(tune, "get_checkpoint", lambda: None)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    # A trial sets it for its process, which here is that of all tests, whose later Rays would inherit it.
    monkeypatch.setenv("TUNE_FUNCTION_THREAD_TIMEOUT_S", "2")
    return found


def test_data_are_pickled_and_hashed_once_however_often_a_trial_starts(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node's fork server keeps what it loaded under this digest: it must be that of the content, at each start."""
    hashed: list[int] = []

    def sha256(content: Any) -> Any:
        hashed.append(len(content))
        return hashlib.sha256(content)

    monkeypatch.setattr(sys.modules[elastic.__module__], "hashlib", SimpleNamespace(sha256=sha256))
    trainable = elastic(linear, data=Pickled())
    for _ in range(3):
        trainable({})
    assert Pickled.times == 1
    assert [digest for digest, *_ in started] == [hashlib.sha256(started[0][1]).hexdigest()] * 3
    assert hashed == [len(started[0][1])]


def test_ranks_are_told_what_their_scheduler_decides_and_how_they_save(started: Started) -> None:
    scheduler = RASDAScheduler(max_t=8, grace_period=2, workers=1, time_attr="steps")
    elastic(linear, scheduler, checkpoint_every=3, timeout_s=5, backend="gloo")({"lr": 0.1})
    elastic(linear)({"lr": 0.2})
    (_, _, scheduled), (_, _, alone) = started
    asked = {"checkpoint_every": 3, "timeout_s": 5, "backend": "gloo", "config": {"lr": 0.1}}
    assert scheduled.items() >= ({"milestones": (2, 4, 8), "time_attr": "steps", "workers": 1} | asked).items()
    default = {"checkpoint_every": None, "timeout_s": 1800.0, "backend": None, "config": {"lr": 0.2}}
    assert alone.items() >= ({"milestones": (), "time_attr": "training_iteration", "workers": 2} | default).items()
    place = {"rank": 0, "world_size": 2, "gpus": 0.5, "threads": 3, "trial": "t", "checkpoint": None}
    assert scheduled.items() >= place.items()
    assert alone.items() >= place.items()


VAIN = "RuntimeError: [gloo/transport/tcp/pair.cc] Connection closed by peer"
"""The error of a rank that waited for one that has ended."""

MISTAKE = "ArithmeticError: the user's own mistake"

RAISED = f"raised an error\n{MISTAKE}"

RETURNED = "returned from its training function while others waited for it: all ranks must report as often\n"


class OtherRanks:
    """The actors of a trial's other ranks, which end after the first look at them, or are silent."""

    def __init__(self, *endings: tuple[str, str]) -> None:
        self._looks = 0
        self._endings: dict[int, Ending] = {r: (*ending, "", 10 + r) for r, ending in enumerate(endings, 1)}
        self.orders: list[Any] = []

    def start(self, *order: Any) -> None:
        self.orders.append(order)

    def failed(self) -> dict[int, Ending]:
        self._looks += 1
        if self._looks == 1:
            return {}
        return {rank: ending for rank, ending in self._endings.items() if ending[0] not in ("done", "silent")}

    def endings(self, timeout: float) -> dict[int, Ending]:
        return self._endings

    def host(self, rank: int) -> str:
        return f"host-{rank}"


def follow(
    monkeypatch: pytest.MonkeyPatch,
    said: list[Any],
    *others: tuple[str, str],
    ends: bool = False,
    timeout_s: float = 60.0,
) -> list[Any]:
    """Follow rank 0 of a trial, which says all of this and then ends or is silent.

    Return what rank 0 was told, and how the other ranks were started.
    """
    module = sys.modules[elastic.__module__]
    monkeypatch.setattr(module, "_FINAL_MESSAGE_S", 0.0)
    monkeypatch.setattr(module, "_report", lambda *_: None)
    actors, (rank, head) = OtherRanks(*others), Pipe()
    for message in said:
        rank.send(message)
    if ends:
        rank.close()
    job = {"trial": "t", "world_size": 1 + len(others), "timeout_s": timeout_s}
    module._follow(head, actors, ("digest", "payload", job))
    told = list[Any]()
    while rank.poll():
        told.append(rank.recv())
    return [*told, *((*order, rest is job) for *order, rest in actors.orders)]


def test_reports_are_passed_on_until_all_ranks_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    said = [("hello", 7), ("store", ("address", 9)), ("report", ({}, None)), ("report", ({}, None)), ("done", None)]
    goes_on, started = None, (("address", 9), "digest", "payload", True)
    assert follow(monkeypatch, said, ("done", "")) == [goes_on, goes_on, started]


@pytest.mark.parametrize(
    ("said", "others", "told"),
    [
        ([("error", MISTAKE)], [("silent", "")], f"rank 0 of 2 on HERE {RAISED}"),
        ([("hello", 7), ("error", MISTAKE)], [], f"rank 0 of 1 on HERE (process 7) {RAISED}"),
        ([("hello", 7)], [("error", VAIN)], "rank 0 of 2 on HERE (process 7) died\n"),
        ([("error", VAIN)], [("died", "")], "rank 1 of 2 on host-1 (process 11) died\n"),
        ([("error", VAIN)], [("done", ""), ("error", VAIN)], f"rank 1 of 3 on host-1 (process 11) {RETURNED}"),
        ([("done", None)], [("silent", "")], "rank 1 of 2 on host-1 (process 11) did not answer for 60.0 s\n"),
        ([("done", None)], [("done", ""), ("error", MISTAKE)], f"rank 2 of 3 on host-2 (process 12) {RAISED}"),
        ([("done", None)], [("error", VAIN)], f"rank 0 of 2 on HERE {RETURNED}"),
    ],
)
def test_a_failure_names_the_rank_that_caused_it(
    said: list[Any], others: list[tuple[str, str]], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError) as failure:
        follow(monkeypatch, said, *others, ends=True)
    assert str(failure.value) == f"trial t: {told.replace('HERE', socket.gethostname())}"


def test_a_rank_that_fails_while_rank_0_still_trains_ends_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[elastic.__module__], "_LOOK_S", 0.01)
    with pytest.raises(RuntimeError, match=r"rank 2 of 3 on host-2 \(process 12\) raised an error\n.*own mistake"):
        follow(monkeypatch, [("hello", 7)], ("silent", ""), ("error", MISTAKE))


def test_rank_0_is_ended_if_it_is_silent_for_much_longer_than_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HangDetector, "TIMES", 0)
    monkeypatch.setattr(sys.modules[elastic.__module__], "_LOOK_S", 0.01)
    with pytest.raises(RuntimeError, match=r"rank 0 of 1 on .* did not answer for 0.05 s\nit was ended as it hung"):
        follow(monkeypatch, [("report", ({}, None))], timeout_s=0.05)


@pytest.mark.parametrize("fails", [False, True])
def test_a_reported_checkpoint_is_removed_once_tune_has_it(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[Any]()

    def report(metrics: dict[str, Any], checkpoint: Any = None) -> None:
        seen.append((metrics, checkpoint and sorted(os.listdir(checkpoint.path))))
        if fails:
            raise OSError("the storage is full")

    monkeypatch.setattr(tune, "report", report)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "worker.pt").touch()
    with pytest.raises(OSError, match="full") if fails else contextlib.nullcontext():
        sys.modules[elastic.__module__]._report({"loss": 1.0}, str(folder))
    assert seen == [({"loss": 1.0}, ["worker.pt"])]
    assert not folder.exists()
    with pytest.raises(OSError, match="full") if fails else contextlib.nullcontext():
        sys.modules[elastic.__module__]._report({"loss": 2.0}, None)
    assert seen[1:] == [({"loss": 2.0}, None)]


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
