"""The queue of trials that wait for workers: their order, and the time for which trials of a rung hold theirs."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from hydro_rasda.backends.ray import waiting
from hydro_rasda.backends.ray.waiting import WaitingQueue
from tests.hydro_rasda.conftest import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(waiting, "time", found)
    return found


def trial(name: str, status: str = "PENDING", rung: int = 0) -> Any:
    return SimpleNamespace(trial_id=name, status=status, rung=rung)


def queue_of(*trials: Any) -> WaitingQueue:
    queue = WaitingQueue(lambda trial: (trial.rung, 1))
    for each in trials:
        queue.join(each)
    return queue


def names(trials: list[Any]) -> str:
    return "".join(each.trial_id for each in trials)


def test_workers_are_expected_back_after_the_median_time_of_the_rung(clock: Clock) -> None:
    queue, now = queue_of(), trial("now")
    assert queue.usual_seconds(0) == math.inf
    for held, usual in ((10.0, 10.0), (2.0, 6.0), (5.0, 5.0), (8.0, 6.5)):
        each = trial(f"held for {held}")
        queue.join(each)
        queue.start(each, 0)
        clock.now += held
        queue.leave(each)
        assert queue.usual_seconds(0) == usual
    assert queue.usual_seconds(1) == math.inf
    queue.join(now)
    queue.start(now, 0)
    began = clock.now
    clock.now += 3.0
    of_ray, deeper = trial("started by Ray itself"), trial("deeper")
    found = queue.expected_back([now, of_ray, deeper], {"deeper": 1}, clock.now)
    assert found == [began + 6.5, clock.now + 6.5, math.inf]


def test_new_trials_and_the_first_paused_one_of_each_kind_are_next_in_order_of_arrival() -> None:
    a, b, c, d = trial("a"), trial("b", "PAUSED", 1), trial("c", "PAUSED", 1), trial("d", "PAUSED", 2)
    e, saves = trial("e"), trial("f", "RUNNING")
    queue = queue_of(a, b, c, d, e, saves)
    assert names(queue.waiting()) == "abde"
    assert names(queue.holding()) == "f", "it still saves a checkpoint"
    queue.start(b, 1)
    b.status = "RUNNING"
    assert names(queue.waiting()) == "acde"
    assert (names(queue.given()), names(queue.holding()), queue.idle()) == ("b", "bf", 5)
    queue.leave(c)
    assert names(queue.waiting()) == "ade"
    b.status = "PAUSED"
    queue.join(b)
    assert names(queue.waiting()) == "adeb", "it waits again, behind all others"
    place = queue.place(a)
    queue.start(a, 0)
    queue.join(a, place)
    assert names(queue.waiting()) == "adeb", "it waits again in its former place"
    queue.leave(a)
    assert queue.place(a) is None
