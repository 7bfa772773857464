"""HyperSack's policies, and the one that overcommits, against their definitions, written out slowly, and HiGHS."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from hydro_rasda.schedulers.packing_policy import (
    SLACK,
    Job,
    Placed,
    Policy,
    Room,
    beside,
    first_fit,
    first_fit_decreasing,
    needed_of,
    one_a_device,
    worst_fit,
    worst_fit_decreasing,
    worst_fit_overcommitted,
)
from tests.hydro_rasda.schedulers.packing_cases import a_problem, left, most_compute

POLICIES = [first_fit, first_fit_decreasing, worst_fit, worst_fit_decreasing]


def slowly(
    jobs: Sequence[Job],
    rooms: Sequence[Room],
    worst: bool,
    decreasing: bool,
    needed_of: Callable[[float], float] = float,
) -> list[Placed]:
    """The definitions: look at every device for every job."""
    if decreasing:
        jobs = sorted(jobs, key=lambda job: -job.seconds)
    free = {room.device: [room.memory + SLACK, room.compute + SLACK] for room in rooms}
    placed = []
    for job in jobs:
        fits = [device for device, (m, c) in free.items() if job.memory <= m and needed_of(job.compute) <= c]
        if fits:
            device = max(fits, key=lambda device: free[device][1]) if worst else fits[0]
            free[device][0] -= job.memory
            free[device][1] -= job.compute
            placed.append(Placed(job.name, device))
    return placed


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("jobs", "rooms"), [(1, 1), (5, 3), (40, 4), (200, 17)])
def test_a_policy_is_what_the_paper_says(policy: Policy, jobs: int, rooms: int) -> None:
    worst, decreasing = policy.__name__.startswith("worst"), policy.__name__.endswith("decreasing")
    for seed in range(10):
        problem = a_problem(jobs, rooms, seed)
        assert policy(*problem) == slowly(*problem, worst, decreasing)
        assert worst_fit_overcommitted(*problem) == slowly(*problem, True, True, needed_of)


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_and_compute_are_kept_to_and_no_job_that_fits_is_left_out(policy: Policy) -> None:
    for seed in range(10):
        jobs, rooms = a_problem(60, 6, seed)
        placed = policy(jobs, rooms)
        free = left(jobs, rooms, placed)
        assert all(memory >= -1e-6 and compute >= -1e-6 for memory, compute in free.values())
        started = {job for job, _ in placed}
        waiting = [job for job in jobs if job.name not in started]
        assert not [job for job in waiting if any(job.memory <= m and job.compute <= c for m, c in free.values())]


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_packs_more_than_highs_and_each_packs_most_of_it(policy: Policy) -> None:
    for seed in range(4):
        jobs, rooms = a_problem(16, 2, seed)
        best = most_compute(jobs, rooms)
        used = sum(room.compute for room in rooms) - sum(c for _, c in left(jobs, rooms, policy(jobs, rooms)).values())
        assert 0.6 * best <= used <= best + 1e-6


@pytest.mark.parametrize("policy", POLICIES)
def test_what_cannot_be_placed_waits(policy: Policy) -> None:
    job = Job("a", 4, 0.5, 60)
    assert policy([], [Room("gpu", 40, 1)]) == []
    assert policy([job], []) == []
    assert policy([job], [Room("gpu", 3, 1), Room("full", 40, 0)]) == []


@pytest.mark.parametrize("policy", POLICIES)
def test_shares_that_sum_up_to_a_device_fill_it(policy: Policy) -> None:
    jobs = [Job(str(share), 1, share, 60) for share in (0.1, 0.2, 0.7)]
    assert len(policy(jobs, [Room("gpu", 3, 1)])) == 3


def test_first_fit_fills_one_device_and_worst_fit_spreads() -> None:
    jobs = [Job(name, 1, 0.25, 60) for name in "abcd"]
    rooms = [Room("small", 40, 1), Room("large", 40, 1.5)]
    assert {device for _, device in first_fit(jobs, rooms)} == {"small"}
    assert [device for _, device in worst_fit(jobs, rooms)] == ["large", "large", "small", "large"]


def test_a_decreasing_policy_starts_the_longest_job() -> None:
    jobs = [Job("short", 1, 0.6, 10), Job("long", 1, 0.6, 20)]
    for policy in POLICIES:
        ((started, _),) = policy(jobs, [Room("gpu", 40, 1)])
        assert started == ("long" if policy.__name__.endswith("decreasing") else "short")


def test_many_devices_that_only_memory_keeps_jobs_off_are_not_looked_at_for_each_of_them() -> None:
    """20,000 jobs, none of which fits any of 2,000 devices: looking at all for each would take 40 million steps."""

    class Counted(float):
        compared = 0

        def __le__(self, other: float) -> bool:
            Counted.compared += 1
            return float(self) <= other

    jobs = [Job(str(i), Counted(30 + i % 7), 0.1, 60) for i in range(20_000)]
    assert worst_fit(jobs, [Room(str(i), 20, 1) for i in range(2000)]) == []
    assert Counted.compared < 200_000


def test_without_packing_a_device_has_one_job() -> None:
    jobs = [Job(name, 4, 0.2, 60) for name in "abc"]
    rooms = [Room("busy", 40, 0.8, jobs=(jobs[0],)), Room("small", 3, 1), Room("free", 40, 1), Room("faster", 40, 2, 2)]
    assert one_a_device(jobs[1:], rooms) == [Placed("b", "free"), Placed("c", "faster")]


def test_a_job_that_is_larger_than_the_device_starts_only_where_nothing_runs() -> None:
    large, small = Job("large", 50, 1, 0), Job("small", 10, 1, 0)
    assert beside([large, large], Room("cpu", 40, 2)) == ["large"]
    assert beside([large], Room("cpu", 30, 1, jobs=(small,))) == []


def test_a_gap_is_filled_beyond_what_there_is_and_a_full_device_left_alone() -> None:
    jobs = [Job(name, 1, 0.4, 60) for name in "abcdefgh"]
    placed = worst_fit_overcommitted(jobs, [Room("gpu", 40, 1), Room("full", 40, 0.01)])
    assert [device for _, device in placed] == ["gpu"] * 3
    large = [job._replace(memory=15) for job in jobs]
    assert len(worst_fit_overcommitted(large, [Room("gpu", 40, 1)])) == 2


def test_two_large_jobs_share_a_device_only_if_the_gap_is_large() -> None:
    for share, started in ((0.75, 2), (0.85, 1)):
        jobs = [Job(name, 1, share, 60) for name in "ab"]
        assert len(worst_fit_overcommitted(jobs, [Room("gpu", 40, 1)])) == started
