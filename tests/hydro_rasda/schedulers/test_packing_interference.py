"""The policy that reckons in what jobs get done together, against its definition and against HiGHS."""

from __future__ import annotations

import random

import pytest

from hydro_rasda.schedulers.packing_interference import LEAST, LOOK, FastestTogether, Interference
from hydro_rasda.schedulers.packing_policy import Job, Placed, Room
from tests.hydro_rasda.schedulers.packing_cases import a_problem, left, shortest


def measured(seed: int) -> Interference:
    rng = random.Random(seed)
    kinds = [f"kind-{i}" for i in range(8)]
    return Interference({(a, b): rng.uniform(1, 1.3) for a in kinds for b in kinds}, otherwise=1.1)


def work(interference: Interference, jobs: list[Job], rate: float) -> float:
    """What some jobs do together in a second, in what a reference device does."""
    return sum(job.compute * speed for job, speed in zip(jobs, interference.speeds(jobs, rate)))


def slowly(interference: Interference, jobs: list[Job], rooms: list[Room]) -> list[Placed]:
    """The definition, everything worked out anew at every step; memory never binds."""
    waiting = sorted(jobs, key=lambda job: -job.seconds)
    left, together = [room.compute for room in rooms], [list(room.jobs) for room in rooms]
    closed: set[int] = set()
    placed = []
    while waiting and len(closed) < len(rooms):
        at = max(set(range(len(rooms))) - closed, key=lambda i: (left[i], -i))
        rate = rooms[at].rate
        now = work(interference, together[at], rate)
        best = max(waiting[:LOOK], key=lambda job: round(work(interference, [*together[at], job], rate), 12))
        added = work(interference, [*together[at], best], rate) - now
        if left[at] < LEAST * rate or added < min(LEAST * rate, best.compute / 2):
            closed.add(at)
            continue
        waiting.remove(best)
        left[at] -= best.compute
        together[at].append(best)
        placed.append(Placed(best.name, rooms[at].device))
    return placed


@pytest.mark.parametrize("seed", range(6))
def test_it_is_its_definition(seed: int) -> None:
    jobs, rooms = a_problem(60, 5, seed)
    rooms = [room._replace(memory=1e9) for room in rooms]
    rooms[0] = rooms[0]._replace(jobs=tuple(jobs[:2]), compute=rooms[0].rate - jobs[0].compute - jobs[1].compute)
    for interference in (Interference(), measured(seed)):
        assert FastestTogether(interference)(jobs[2:], rooms) == slowly(interference, jobs[2:], rooms)


def test_memory_is_kept_to_and_what_fits_behind_long_jobs_that_do_not_is_found() -> None:
    for seed in range(10):
        jobs, rooms = a_problem(80, 4, seed)
        free = left(jobs, rooms, FastestTogether(measured(seed))(jobs, rooms))
        assert all(memory >= -1e-6 for memory, _ in free.values())
    large = [Job(f"large-{i}", 50, 0.5, 100) for i in range(3 * LOOK)]
    small = Job("small", 1, 0.5, 1)
    rooms = [Room("gpu", 40, 1), Room("gpu-2", 40, 1)]
    assert FastestTogether()([*large, small], rooms) == [Placed("small", "gpu")]
    assert FastestTogether(measured(0))([*large, small], rooms) == [Placed("small", "gpu")]


def test_speeds_are_shares_of_what_there_is_and_factors_of_neighbours() -> None:
    jobs = [Job("a", 1, 0.8, 1, "x"), Job("b", 1, 0.8, 1, "y"), Job("c", 1, 0.4, 1, "z")]
    interference = Interference({("x", "y"): 1.25, ("x", "z"): 2.0, ("z", "x"): 1.5}, otherwise=1.0)
    assert interference.speeds(jobs) == pytest.approx([0.5 / 2.5, 0.5, 0.5 / 1.5])
    assert interference.speeds(jobs, rate=2.0) == pytest.approx([1 / 2.5, 1.0, 1 / 1.5])
    assert interference.speeds(jobs[:1]) == [1.0]


def test_a_neighbour_is_chosen_that_slows_little() -> None:
    room = Room("gpu", 40, 0.5, jobs=(Job("there", 1, 0.5, 60, "bandwidth"),))
    jobs = [Job("alike", 1, 0.5, 60, "bandwidth"), Job("other", 1, 0.5, 50, "compute")]
    known = Interference({("bandwidth", "bandwidth"): 1.4})
    assert FastestTogether(known)(jobs, [room]) == [Placed("other", "gpu")]
    assert FastestTogether()(jobs, [room]) == [Placed("alike", "gpu")]


def test_nothing_is_added_where_it_would_slow_the_others_by_what_it_does() -> None:
    room = Room("gpu", 40, 0.4, jobs=(Job("there", 1, 0.6, 60, "x"),))
    known = Interference({("x", "x"): 1.8})
    assert FastestTogether(known)([Job("a", 1, 0.45, 60, "x")], [room]) == []


def test_a_gap_is_filled_beyond_what_there_is_and_a_full_device_left_alone() -> None:
    jobs = [Job(name, 1, 0.4, 60) for name in "abcdefgh"]
    placed = FastestTogether()(jobs, [Room("gpu", 40, 1), Room("full", 40, 0.01)])
    assert [device for _, device in placed] == ["gpu"] * 3


def test_what_hardly_computes_starts_all_the_same() -> None:
    """Where it was measured, the cores were busy, or it slept."""
    asleep = [Job("a", 1, LEAST, 60), Job("b", 1, LEAST, 60)]
    assert FastestTogether()(asleep, [Room("cpu", 40, 4, 4)]) == [Placed("a", "cpu"), Placed("b", "cpu")]


def test_nothing_to_decide() -> None:
    assert FastestTogether()([], [Room("gpu", 40, 1)]) == []
    assert FastestTogether()([Job("a", 1, 1, 1)], []) == []


@pytest.mark.parametrize("seed", range(3))
def test_all_at_once_it_shares_work_nearly_as_evenly_as_highs(seed: int) -> None:
    """With room for all jobs at once, each device's work is the makespan."""
    jobs, _ = a_problem(18, 3, seed)
    jobs = [job._replace(memory=0, seconds=100.0) for job in jobs]
    rooms = [Room(f"gpu-{i}", 40, 3, 3) for i in range(3)]
    placed = FastestTogether()(jobs, rooms)
    assert len(placed) == len(jobs)
    most = max(3 - compute for _, compute in left(jobs, rooms, placed).values())
    best = shortest(jobs, 3) / 100
    assert best - 1e-9 <= most <= 1.15 * best


@pytest.mark.parametrize(("argument", "value"), [("beside", {("a", "b"): 0.9}), ("otherwise", 0.5)])
def test_a_neighbour_that_speeds_up_is_refused(argument: str, value: object) -> None:
    with pytest.raises(ValueError, match=argument):
        Interference(**{argument: value})  # type: ignore[arg-type]
