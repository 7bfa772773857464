"""Jobs and devices to pack in tests, and the same problems for HiGHS."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from hydro_rasda.schedulers.packing_policy import Job, Placed, Room


def a_problem(jobs: int, rooms: int, seed: int) -> tuple[list[Job], list[Room]]:
    """Jobs of 22 to 50 % of a device and of memory that binds where they are small; devices of two rates."""
    rng = random.Random(seed)
    kinds = [(rng.uniform(1, 24), rng.uniform(0.22, 0.5)) for _ in range(8)]
    picked = [rng.randrange(8) for _ in range(jobs)]
    found = [Job(f"job-{i}", *kinds[k], rng.uniform(10, 300), f"kind-{k}") for i, k in enumerate(picked)]
    rates = [rng.choice((1.0, 1.5)) for _ in range(rooms)]
    return found, [Room(f"gpu-{i}", 40.0, rate, rate) for i, rate in enumerate(rates)]


def left(jobs: Sequence[Job], rooms: Sequence[Room], placed: Sequence[Placed]) -> dict[str, tuple[float, float]]:
    """Memory and compute that are left on each device."""
    of = {job.name: job for job in jobs}
    assert len({job for job, _ in placed}) == len(placed), "a job was placed twice"
    found = {room.device: (room.memory, room.compute) for room in rooms}
    for name, device in placed:
        memory, compute = found[device]
        found[device] = memory - of[name].memory, compute - of[name].compute
    return found


def most_compute(jobs: Sequence[Job], rooms: Sequence[Room]) -> float:
    """The most compute that can be in use at once, by HiGHS: a knapsack for each device, of memory and compute."""
    n, d = len(jobs), len(rooms)
    memory, compute = (np.array([getattr(job, name) for job in jobs]) for name in ("memory", "compute"))
    limits = [np.array([getattr(room, name) for room in rooms]) for name in ("memory", "compute")]
    each = np.eye(d)
    constraints = [
        LinearConstraint(np.kron(np.ones(d), np.eye(n)), ub=np.ones(n)),
        LinearConstraint(np.kron(each, memory), ub=limits[0]),
        LinearConstraint(np.kron(each, compute), ub=limits[1]),
    ]
    found = milp(-np.tile(compute, d), integrality=np.ones(n * d), bounds=Bounds(0, 1), constraints=constraints)
    assert found.success, found.message
    return -float(found.fun)


def shortest(jobs: Sequence[Job], devices: int) -> float:
    """The least makespan of jobs that never move between devices of the rate 1 and slow nobody beyond their shares."""
    n, d = len(jobs), devices
    work = np.array([job.compute * job.seconds for job in jobs])
    wholly_placed = np.hstack([np.kron(np.ones(d), np.eye(n)), np.zeros((n, 1))])
    over = np.hstack([np.kron(np.eye(d), work), -np.ones((d, 1))])
    constraints = [LinearConstraint(wholly_placed, 1, 1), LinearConstraint(over, ub=np.zeros(d))]
    longest = max(job.seconds for job in jobs)
    bounds = Bounds(np.append(np.zeros(n * d), longest), np.append(np.ones(n * d), np.inf))
    found = milp(
        np.append(np.zeros(n * d), 1),
        integrality=np.append(np.ones(n * d), 0),
        bounds=bounds,
        constraints=constraints,
    )
    assert found.success, found.message
    return float(found.fun)
