"""The tuner's side without guests' processes: the words of a guest, and what is kept of its pieces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import cloudpickle
import pytest

from hydro_rasda.bubbles.bubble_backend import BubbleDevices
from hydro_rasda.contracts import Group, GroupOutcome, GroupTask, Span, group_key
from hydro_rasda.problem import Problem
from hydro_rasda.run.state import Run
from tests.hydro_rasda.scripted import open_run

SPAN = Span(0, 2)
TASK = GroupTask(group_key(SPAN, (0, 1)), (Group("a", (0, 1), True),), (), SPAN)


class Connection:
    """What the tuner sends to a guest."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send_bytes(self, content: bytes) -> None:
        self.sent.append(cloudpickle.loads(content))

    def fileno(self) -> int:
        raise OSError("there is no socket")


@pytest.fixture
def run(problem: Problem, tmp_path: Path) -> Iterator[Run]:
    opened = open_run(tmp_path / "run", problem, 2)
    yield opened
    opened.store.close()


def outcome(epoch: int) -> GroupOutcome:
    history = {n: [(epoch, {"train_loss": 1.0, "val_loss": 1.0})] for n in (0, 1)}
    return GroupOutcome([{"members": [0, 1], "epoch": epoch}], history, {})


def test_a_group_in_pieces_leaves_no_checkpoint_once_it_is_over(run: Run, tmp_path: Path) -> None:
    devices, guest = BubbleDevices(run, tmp_path / "source", tmp_path / "problem", 1, 0.0), Connection()
    try:
        devices._heard.put((cast(Any, guest), "came", {"name": "guest", "before": ["", 0]}))
        assert devices.idle() == [0]
        devices.start(0, TASK)
        assert (devices.idle(), devices.busy()) == ([], True)
        assert devices.finished() == []
        opening, (method, task, given, threads) = guest.sent
        assert opening == ("open", tmp_path / "problem")
        assert (method, task, threads, given.trials.keys()) == ("train_part", TASK, 1, {0, 1})
        # It gives the first epoch, and is handed the rest.
        devices._heard.put((cast(Any, guest), "done", (outcome(1), 0.5)))
        assert devices.finished() == []
        (_, rest, _, _) = guest.sent[-1]
        (so_far,) = rest.sources
        assert (rest.span, run.store.has(so_far)) == (Span(1, 2), True)
        devices._heard.put((cast(Any, guest), "done", (outcome(2), 0.5)))
        (finished,) = devices.finished()
        assert finished.task == TASK
        assert finished.outcome.checkpoint == outcome(2).checkpoint
        assert [epoch for epoch, _ in finished.outcome.history[0]] == [1, 2]
        assert not devices.busy()
        assert run.store.has(so_far), "the group has yet to be recorded"
        devices.start(0, GroupTask(group_key(SPAN, (0,)), (Group("a", (0,), False),), (), SPAN))
        assert not run.store.has(so_far)
    finally:
        devices.close()
