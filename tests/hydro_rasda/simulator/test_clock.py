"""Shared storage, against trials that read bit by bit."""

import math
import random

import pytest

from hydro_rasda.simulator.clock import SharedStorage


def shared(arrivals: dict[float, float], bandwidth: float) -> dict[int, float]:
    """When trials end that come to read so many bytes, by time of arrival, and go once they have."""
    storage, ended = SharedStorage(bandwidth), dict[int, float]()
    waiting, there = list(enumerate(sorted(arrivals.items()))), 0
    while waiting or there:
        if waiting and waiting[0][1][0] < storage.due():
            trial, (now, size) = waiting.pop(0)
            there += 1
            storage.share(there, now)
            storage.begin(trial, size, now)
        else:
            now = storage.due()
            ended[storage.end_next()] = now
            there -= 1
            storage.share(there, now)
    return ended


def bit_by_bit(arrivals: dict[float, float], bandwidth: float) -> dict[int, float]:
    """The same, from what each of them has left to read."""
    left, ended, now = dict[int, float](), dict[int, float](), 0.0
    waiting = list(enumerate(sorted(arrivals.items())))
    while waiting or left:
        step = waiting[0][1][0] - now if waiting else math.inf
        step = min(step, min(left.values(), default=math.inf) * len(left) / bandwidth)
        left = {trial: size - step * bandwidth / len(left) for trial, size in left.items()}
        now += step
        for trial in [trial for trial, size in left.items() if size < 1e-9]:
            ended[trial] = now
            del left[trial]
        if waiting and waiting[0][1][0] <= now:
            trial, (_, left[trial]) = waiting.pop(0)
    return ended


@pytest.mark.parametrize("seed", range(5))
def test_all_that_read_share_alike_while_others_come_and_go(seed: int) -> None:
    rng = random.Random(seed)
    arrivals = {rng.uniform(0, 20): rng.uniform(1, 100) for _ in range(30)}
    assert shared(arrivals, bandwidth=50.0) == pytest.approx(bit_by_bit(arrivals, bandwidth=50.0))


def test_a_reading_that_is_stopped_never_ends() -> None:
    storage = SharedStorage(10.0)
    storage.share(2, now=0.0)
    storage.begin(0, 50.0, now=0.0)
    storage.begin(1, 100.0, now=0.0)
    storage.stop(0)
    storage.share(1, now=10.0)
    assert storage.due() == 10.0 + 50.0 / 10.0
    assert storage.end_next() == 1
    assert storage.due() == math.inf
