"""The tuner's side without guests' processes: the words of a guest, and what is kept of its pieces."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import cloudpickle
import pytest

from hydro_rasda.backends.process_pool import PROBLEM, read_shared
from hydro_rasda.bubbles import BubbleBackend, bubble_backend, bubbles
from hydro_rasda.bubbles.bubble_backend import BubbleDevices
from hydro_rasda.bubbles.rendezvous import connect
from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import Group, History, Outcome, Span, Task, group_key
from hydro_rasda.problem.problem import OwnLoop, Problem
from hydro_rasda.run.state import Run
from hydro_rasda.training.group_training import train_group
from tests.hydro_rasda.scripted import open_run

SPAN = Span(0, 2)
TASK = Task(group_key("sweep", SPAN, (0, 1)), (Group("a", (0, 1), True),), (), SPAN)


def test_a_source_that_is_no_path() -> None:
    with pytest.raises(ValueError, match="`source` is 5, but must be a path"):
        BubbleBackend(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`source` is 5, but must be a path"), bubbles(None, 5):  # type: ignore[arg-type]
        pass


HOST = SimpleNamespace(step=print, _step_microbatches=print)
"""The schedule of a pipeline."""


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"leave_free": -1.0}, "`leave_free` is -1.0, but must be a number >= 0"),
        ({"patience_s": "long"}, "`patience_s` is 'long', but must be a number >= 0"),
        ({"patience_s": -1}, "`patience_s` is -1, but must be a number >= 0"),
        ({"preempt": "no"}, "`preempt` is 'no', but must be None, True or False"),
    ],
)
def test_a_host_with_a_wrong_argument_gets_no_guest(tmp_path: Path, wrong: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule), bubbles(HOST, tmp_path / "bubbles", **wrong):
        pass
    assert not (tmp_path / "bubbles").exists()


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"groups": 0}, "`groups` is 0, but must be an integer >= 1"),
        ({"checkpoint_s": -1}, "`checkpoint_s` is -1, but must be a number >= 0"),
        ({"loader_workers": -1}, "`loader_workers` is -1, but must be"),
        ({"graph": "always"}, "`graph` is 'always', but must be"),
    ],
)
def test_a_backend_with_a_wrong_argument_is_refused(tmp_path: Path, wrong: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        BubbleBackend(tmp_path, **wrong)


class Connection:
    """What the tuner sends to a guest."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def come(self, devices: BubbleDevices, before: tuple[str, int] = ("", 0)) -> None:
        self.says(devices, "came", {"name": "guest", "before": before})

    def says(self, devices: BubbleDevices, kind: str, content: Any = None) -> None:
        devices._heard.put((cast(Any, self), kind, content))

    def send_bytes(self, content: bytes) -> None:
        self.sent.append(cloudpickle.loads(content))

    def close(self) -> None:
        pass

    def fileno(self) -> int:
        raise OSError("there is no socket")


def test_a_source_may_be_in_the_home_and_is_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tuner and hosts met at a folder called "~" of wherever each of them was started."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert BubbleBackend("~/bubbles")._source == tmp_path / "bubbles"
    with bubbles(HOST, "~/bubbles", patience_s=0) as guest:
        assert guest._source == tmp_path / "bubbles"
    with pytest.raises(ValueError, match="`source` is 's3://bucket/bubbles', but must be a folder"):
        BubbleBackend("s3://bucket/bubbles")


@pytest.fixture
def run(problem: Problem, tmp_path: Path) -> Iterator[Run]:
    opened = open_run(tmp_path / "run", problem, 2)
    yield opened
    opened.store.close()


def outcome(epoch: int) -> Outcome:
    history = {n: [(epoch, {"train_loss": 1.0, "val_loss": 1.0})] for n in (0, 1)}
    return Outcome([{"members": [0, 1], "epoch": epoch}], history, {})


def test_a_group_in_pieces_leaves_no_checkpoint_once_it_is_over(run: Run, tmp_path: Path) -> None:
    devices, guest = BubbleDevices(run, tmp_path / "source", tmp_path / "problem", 1, 0.0), Connection()
    try:
        guest.come(devices)
        assert devices.idle() == [0]
        devices.start(0, TASK)
        assert (devices.idle(), devices.busy()) == ([], True)
        assert devices.finished() == []
        opening, (method, task, given, threads) = guest.sent
        assert opening == ("open", tmp_path / "problem")
        assert (method, task, threads, given.trials.keys()) == ("train_piece", TASK, 1, {0, 1})
        # It gives the first epoch, and is handed the rest.
        guest.says(devices, "done", outcome(1))
        assert devices.finished() == []
        (_, rest, _, _) = guest.sent[-1]
        (so_far,) = rest.sources
        assert (rest.span, run.store.has(so_far)) == (Span(1, 2), True)
        guest.says(devices, "done", outcome(2))
        (finished,) = devices.finished()
        assert finished.task == TASK
        assert finished.outcome.checkpoint == outcome(2).checkpoint
        assert [epoch for epoch, _ in finished.outcome.history[0]] == [1, 2]
        assert not devices.busy()
        assert run.store.has(so_far), "the group has yet to be recorded"
        devices.start(0, Task(group_key("sweep", SPAN, (0,)), (Group("a", (0,), False),), (), SPAN))
        assert not run.store.has(so_far)
    finally:
        devices.close()


def test_guests_find_the_problem_in_the_runs_folder_while_the_sweep_lasts(run: Run, tmp_path: Path) -> None:
    with BubbleBackend(tmp_path / "source").open(run):
        assert read_shared(run.store.path / PROBLEM).settings == run.problem.settings
    assert not (run.store.path / PROBLEM).exists()


def test_a_problem_that_no_other_process_can_have_is_refused(run: Run, tmp_path: Path) -> None:
    lock = threading.Lock()
    run.problem = replace(run.problem, model_fn=lambda config: lock)  # type: ignore[arg-type,return-value]
    with pytest.raises(ValueError, match="anything but a `BubbleBackend`"), BubbleBackend(tmp_path).open(run):
        pass


def test_the_user_is_told_once_whenever_no_host_is_there(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bubble_backend, "LOOK_S", 0)
    devices, guest = BubbleDevices(run, tmp_path / "source", tmp_path / "problem", 1, 0.0), Connection()
    said = list[str]()
    monkeypatch.setattr(run, "say", said.append)

    def lines() -> int:
        devices.finished()
        return len(said)

    try:
        assert (lines(), lines()) == (1, 1)
        guest.come(devices)
        assert (lines(), lines()) == (1, 1)
        guest.says(devices, "died")
        assert (lines(), lines(), lines()) == (1, 2, 2)
        assert "waiting for hosts: none has come" in said[0]
    finally:
        devices.close()


def test_a_guest_that_comes_as_the_sweep_ends_is_sent_away(run: Run, tmp_path: Path) -> None:
    devices = BubbleDevices(run, tmp_path / "source", tmp_path / "problem", 1, 0.0)
    early = connect(tmp_path / "source")
    early.send_bytes(json.dumps({"name": "guest", "before": ("", 0)}).encode())
    while devices._heard.empty():
        time.sleep(0.02)
    devices.close()
    late, ours = Pipe()
    threading.Thread(target=devices._listen, args=[ours], daemon=True).start()
    for guest in (early, late):
        assert guest.poll(60)
        with pytest.raises(EOFError):
            guest.recv_bytes()


def trained(run: Run, task: Task, stop: int) -> Outcome:
    """What a guest gives of a task until this epoch."""
    return train_group(run.problem, run.history.trials, replace(task, span=Span(task.span.start, stop)), run.store.load)


def last_scores(found: Mapping[int, History]) -> dict[int, float]:
    assert {history[-1][0] for history in found.values()} == {3}
    return {number: history[-1][1]["val_loss"] for number, history in found.items()}


@pytest.mark.parametrize("first", [1, 0], ids=["after a piece", "before any"])
@pytest.mark.parametrize("halves", [1, 0], ids=["one half trains", "neither does"])
def test_a_half_that_is_given_up_goes_on_later_from_all_that_it_had(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, halves: int
) -> None:
    """Two guests die of a group, after its first epoch or before it; then the time ends, for both halves or for one."""
    run.history.trials |= {n: Trial(n, {"lr": 0.1 / (n + 1), "momentum": 0.5}) for n in range(4)}
    task = Task(group_key("sweep", Span(0, 3), range(4)), (Group("a", (0, 1, 2, 3), True),), (), Span(0, 3))
    unbroken = trained(run, task, 3)
    devices = BubbleDevices(run, tmp_path / "source", tmp_path / "problem", 1, 0.0)

    def handed() -> Task:
        found: Task = guest.sent[-1][1]
        return found

    try:
        guest = Connection()
        guest.come(devices)
        devices.start(0, task)
        assert devices.finished() == []
        if first:
            guest.says(devices, "done", trained(run, handed(), first))
            assert devices.finished() == []
        for _ in range(2):
            assert (handed().members, handed().span) == ((0, 1, 2, 3), Span(first, 3))
            guest.says(devices, "died")
            guest = Connection()
            guest.come(devices, ("guest", -9))
            assert devices.finished() == []
        for half in [(0, 1), (2, 3)][:halves]:
            assert handed().members == half
            guest.says(devices, "done", trained(run, handed(), 3))
            assert devices.finished() == []
        guest.says(devices, "died")  # with its host
        monkeypatch.setattr(run, "out_of_time", lambda heat: True)
        monkeypatch.setattr(devices, "_opened", -math.inf)
        finished = devices.finished()
    finally:
        devices.close()
    whole, ended = range(4), [n for n in range(4) if n < 2 * halves]
    there = [*(whole if first else ended)]
    if not there:
        assert finished == []
        return
    ((got, kept),) = [(each.task, each.outcome) for each in finished]
    assert [*got.members] == [*kept.history] == there, "the others go on from where they did before"
    assert sorted(n for part in kept.checkpoint for n in part["members"]) == there
    run.save(got.key, {"parts": kept.checkpoint}, got.members)
    left = tuple(n for n in there if n not in ended)
    if left:
        rest = Task(group_key("sweep", Span(1, 3), left), (Group("a", left, True),), (got.key,), Span(1, 3))
        kept.history |= trained(run, rest, 3).history
    expected = last_scores({n: unbroken.history[n] for n in there})
    assert last_scores(kept.history) == pytest.approx(expected, rel=1e-5)


def test_each_trial_of_the_users_own_loop_goes_on_from_its_own_checkpoint(run: Run, tmp_path: Path) -> None:
    run.problem = replace(run.problem, own_loop=OwnLoop(print, None, sweeps=True))
    groups = Group("a", (0,), False), Group("a", (1,), False)
    task = Task(group_key("sweep", Span(1, 2), (0, 1)), groups, ("of 0", "of 1"), Span(1, 2))
    devices = BubbleDevices(run, tmp_path / "source", tmp_path / "problem", 2, 0.0)
    try:
        devices.start(0, task)
        pieces = [piece.task for piece in devices._waiting]
    finally:
        devices.close()
    assert [(piece.members, piece.sources) for piece in pieces] == [((0,), ("of 0",)), ((1,), ("of 1",))]
    assert [piece.apart() for piece in pieces] == [[piece] for piece in pieces]
