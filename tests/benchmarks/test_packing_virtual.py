"""Makespans that can be worked out by hand, and what holds for any policy."""

from __future__ import annotations

import math

import pytest

from benchmarks.packing_virtual import Interference, Machine, simulate_packing
from hydro_rasda.schedulers import (
    Job,
    Policy,
    first_fit,
    first_fit_decreasing,
    one_a_device,
    worst_fit,
    worst_fit_decreasing,
    worst_fit_overcommitted,
)
from tests.hydro_rasda.schedulers.packing_cases import a_problem, shortest

NONE = Interference()
POLICIES = [one_a_device, first_fit, first_fit_decreasing, worst_fit, worst_fit_decreasing, worst_fit_overcommitted]


def test_one_after_another_and_side_by_side() -> None:
    jobs = [Job(name, 4, 0.5, 60) for name in "abc"]
    alone = simulate_packing(one_a_device, jobs, [Machine("gpu", 40)], NONE)
    assert (alone.seconds, alone.busy, alone.ended) == (180, 0.5, {"a": 60, "b": 120, "c": 180})
    packed = simulate_packing(worst_fit, jobs, [Machine("gpu", 40)], NONE)
    assert (packed.seconds, packed.busy, packed.ended) == (120, 1.0, {"a": 60, "b": 60, "c": 120})


def test_neighbours_slow_each_other_until_one_of_them_ends() -> None:
    """Two of 0.75 get on at 2/3 each; the first is over after 45 s, when the second has 30 s of its 60 left."""
    jobs = [Job("short", 4, 0.75, 30), Job("long", 4, 0.75, 60)]
    outcome = simulate_packing(worst_fit_overcommitted, jobs, [Machine("gpu", 40)], NONE)
    assert outcome.ended == pytest.approx({"short": 45, "long": 75})
    assert math.isnan(outcome.busy)


def test_a_machine_has_a_rate_and_a_speed() -> None:
    """Beside each other on twice the room, at 1.5 times the speed, 1.2 times slower by each other."""
    jobs = [Job(name, 4, 1.0, 60, "x") for name in "ab"]
    known = Interference({("x", "x"): 1.2})
    assert simulate_packing(worst_fit, jobs, [Machine("gpu", 40, 2.0, 1.5)], known).seconds == pytest.approx(48)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_job_ends_once_within_what_devices_can_do(policy: Policy) -> None:
    for seed in range(3):
        jobs, rooms = a_problem(30, 3, seed)
        outcome = simulate_packing(policy, jobs, [Machine(room.device, 40, room.rate) for room in rooms], NONE)
        assert outcome.ended.keys() == {job.name for job in jobs}
        work = sum(job.compute * job.seconds for job in jobs) / sum(room.rate for room in rooms)
        assert outcome.seconds >= max(work, *(job.seconds for job in jobs)) - 1e-6
        assert outcome.seconds == max(outcome.ended.values())


def test_ours_comes_close_to_the_shortest_makespan_and_is_ahead_of_worst_fit_decreasing() -> None:
    ratios = []
    for seed in range(3):
        jobs, _ = a_problem(16, 2, seed)
        jobs = [job._replace(memory=1.0) for job in jobs]
        machines = [Machine(f"gpu-{i}", 40) for i in range(2)]
        best = shortest(jobs, 2)
        ours = simulate_packing(worst_fit_overcommitted, jobs, machines, NONE).seconds
        assert best - 1e-6 <= ours <= 1.2 * best
        ratios.append(simulate_packing(worst_fit_decreasing, jobs, machines, NONE).seconds / ours)
    assert sum(ratios) / 3 > 1.03


def test_a_job_that_fits_nowhere_is_named() -> None:
    with pytest.raises(ValueError, match="'large'"):
        simulate_packing(worst_fit, [Job("large", 50, 0.5, 60)], [Machine("gpu", 40)], NONE)


@pytest.mark.parametrize("name", ["memory", "rate", "speed"])
def test_a_machine_without_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Machine(**{"device": "gpu", "memory": 40, name: 0})  # type: ignore[arg-type]
