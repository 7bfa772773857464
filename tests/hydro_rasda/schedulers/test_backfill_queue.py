"""Placement decisions, by themselves and over a whole simulated run of trials."""

import math
import random
from collections.abc import Iterable
from typing import Any

import pytest

from hydro_rasda.schedulers import Held, Placement, Queue, Waiting, place, worker_slots
from tests.hydro_rasda.schedulers.slow_backfill import Running, slow_place


def held(*running: tuple[int, float]) -> Held:
    """So many workers each, until so many seconds from now."""
    found = Held()
    for i, (workers, seconds) in enumerate(running):
        found.add(f"running-{i}", workers, seconds)
    return found


def unknown(workers: int) -> tuple[int, float]:
    """A trial that gives its workers back at some time."""
    return workers, math.inf


def names(waiting: Iterable[Waiting], running: Held, free: int) -> list[str]:
    """The trials that start, one decision after another."""
    queue, started = Queue(waiting), list[str]()
    while (start := place(queue, running, free).start) is not None:
        queue.start(start.trial)
        running.add(start.trial, start.workers, start.seconds)
        free -= start.workers
        started.append(start.trial)
    return started


def test_promoted_before_new_and_deepest_first() -> None:
    waiting = [Waiting("new", 1), Waiting("shallow", 2, rung=1), Waiting("deep", 4, rung=2)]
    assert names(waiting, held(), 8) == ["deep", "shallow", "new"]


def test_equals_start_in_order_of_arrival() -> None:
    assert names([Waiting(name, 1) for name in "cab"], held(), 2) == ["c", "a"]


def test_a_large_trial_is_reserved_for() -> None:
    queue = Queue([Waiting("new", 1), Waiting("large", 8, rung=3)])
    assert place(queue, held(*[unknown(1)] * 4), free=4) == Placement(None, Waiting("large", 8, rung=3))


def test_backfills_what_ends_before_the_reservation() -> None:
    """4 of 8 are free, 8 are free after 10 s: who needs 9 s may start, who needs 10 s may not."""
    large = Waiting("large", 8, rung=3)
    assert names([large, Waiting("short", 4, seconds=9.0)], held((4, 10.0)), 4) == ["short"]
    assert names([large, Waiting("long", 1, seconds=10.0)], held((4, 10.0)), 4) == []
    assert names([large, Waiting("unknown", 1)], held((4, 10.0)), 4) == []


def test_backfills_workers_that_the_reservation_leaves_over() -> None:
    """When the 6 come back, 8 are free and 4 are reserved: 4 stay, however long they are kept."""
    waiting = [Waiting("large", 4, rung=1), *(Waiting(f"new{i}", 1) for i in range(4))]
    assert names(waiting, held(unknown(6)), 2) == ["new0", "new1"]
    assert names(waiting, held((6, 5.0)), 2) == ["new0", "new1"]
    # Two single workers may come back first: none is left over.
    assert names(waiting, held(*[unknown(1)] * 6), 2) == []


def test_a_lost_node_lowers_what_a_trial_is_due() -> None:
    assert place(Queue([Waiting("large", 8, rung=3)]), held(), 6) == Placement(Waiting("large", 6, rung=3))


def test_the_longest_waiting_gets_its_turn() -> None:
    queue = Queue([Waiting("new", 2)])
    started = []
    for i in range(7):
        queue.add(Waiting(f"deep{i}", 2, rung=3))
        start = place(queue, held(), 2, patience=3).start
        assert start is not None
        queue.start(start.trial)
        started.append(start.trial)
    assert started == ["deep0", "deep1", "deep2", "new", "deep3", "deep4", "deep5"]


def test_nothing_waits_or_nothing_is_free() -> None:
    assert place(Queue(), held(), 8) == Placement()
    queue = Queue([Waiting("a", 1)])
    assert place(queue, held(unknown(8)), 0) == Placement(None, Waiting("a", 1))
    assert list(queue) == [Waiting("a", 1)]


def test_a_place_in_the_queue_counts_as_time_waited() -> None:
    queue = Queue([Waiting("first", 1), Waiting("second", 1)])
    queue.add(Waiting("earlier", 1), place=-2)
    queue.add(Waiting("last", 1))
    queue.remove("first")
    assert [waiting.trial for waiting in queue] == ["earlier", "second", "last"]
    queue.start("last")
    queue.start("second")
    assert (queue.overtaken, queue.longest_waiting().trial, len(queue)) == (2, "earlier", 1)
    queue.start("earlier")
    assert (queue.overtaken, len(queue)) == (0, 0)


@pytest.mark.parametrize("at_once", [0, 2, 3])
def test_who_is_overdue_is_expected_in_order_of_start(at_once: int) -> None:
    """2 workers are missing: at 0 s those of "b" come first, at 6 s either may, and "a" started before."""
    holding = [("a", 4, 5.0), ("b", 2, 3.0), ("c", 8, 9.0)]
    workers = Held(holding[:at_once])
    for name, size, until in holding[at_once:]:
        workers.add(name, size, until)
    assert workers.reservation(2, now=0.0) == (3.0, 0)
    assert workers.reservation(2, now=6.0) == (0.0, 2)
    workers.expect("a", 7.0)
    assert workers.reservation(2, now=6.0) == (0.0, 0)
    workers.remove("b")
    assert (workers.reservation(2, now=6.0), workers.workers) == ((1.0, 2), 12)


@pytest.mark.parametrize("seed", range(40))
def test_decides_as_the_slow_reference(seed: int) -> None:
    """Over random starts, ends and delays, with what is kept between decisions; at odd seeds some ends are unknown."""
    rng = random.Random(seed)
    slots, patience, now, count = rng.choice([6, 20, 60]), rng.choice([1, 2, 8]), 0.0, 0
    queue, workers = Queue(), Held()
    waiting, running = list[Waiting](), dict[str, tuple[int, float]]()
    for _ in range(150):
        for _ in range(rng.randrange(4)):
            rung = rng.randrange(4)
            seconds = math.inf if seed % 2 and rng.random() < 0.3 else float(rng.randrange(1, 9))
            waiting.append(Waiting(f"t{count}", rng.choice([1, 2**rung, 3 * 2**rung]), rung, seconds))
            queue.add(waiting[-1])
            count += 1
        while True:
            free = slots - sum(size for size, _ in running.values())
            seen = [Running(size, max(0.0, until - now)) for size, until in running.values()]
            expected = slow_place(waiting, queue.overtaken, seen, free, patience)
            found = place(queue, workers, free, patience, now)
            assert found == expected
            assert list(queue) == waiting
            if found.start is None:
                break
            trial = found.start
            queue.start(trial.trial)
            waiting = [w for w in waiting if w.trial != trial.trial]
            running[trial.trial] = trial.workers, now + trial.seconds
            workers.add(trial.trial, *running[trial.trial])
        now += rng.random() * 3
        for name in rng.sample(sorted(running), min(len(running), rng.randrange(3))):
            if rng.random() < 0.3:
                running[name] = running[name][0], now + 2.0
                workers.expect(name, now + 2.0)
            else:
                del running[name]
                workers.remove(name)


def simulate(estimates: bool, seed: int, slots: int = 8, trials: int = 40) -> tuple[dict[str, float], set[str]]:
    """A RASDA run of virtual time; the longest wait of a trial by rung, and the trials that finished."""
    rng = random.Random(seed)
    queue, workers = Queue(Waiting(f"t{i}", 1, seconds=1.3 if estimates else math.inf) for i in range(trials)), Held()
    since = {waiting.trial: 0.0 for waiting in queue}
    running: dict[str, tuple[float, Waiting]] = {}
    now, waits, finished = 0.0, {}, set[str]()
    while queue or running:
        free = slots - workers.workers
        assert free >= 0
        started = place(queue, workers, free, now=now).start
        if started is not None:
            queue.start(started.trial)
            running[started.trial] = (now + rng.uniform(0.7, 1.3), started)
            workers.add(started.trial, started.workers, running[started.trial][0] if estimates else math.inf)
            waits[f"{started.trial}/{started.rung}"] = now - since[started.trial]
            continue
        assert running, "all workers are free, and nobody starts"
        trial = min(running, key=lambda name: running[name][0])
        now, ended = running.pop(trial)
        workers.remove(trial)
        if ended.rung < 3 and rng.random() < 0.5:
            queue.add(Waiting(trial, ended.workers * 2, ended.rung + 1, ended.seconds))
            since[trial] = now
        else:
            finished.add(trial)
    return waits, finished


@pytest.mark.parametrize("estimates", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_nobody_starves(estimates: bool, seed: int) -> None:
    waits, finished = simulate(estimates, seed)
    assert len(finished) == 40
    # The full cluster is 8 workers and a segment at most 1.3 s: a promoted trial waits for
    # those that run, and for the few that are deeper still.
    assert max(wait for name, wait in waits.items() if not name.endswith("/0")) < 8 * 1.3


def test_worker_slots_count_whole_workers_on_each_node() -> None:
    assert worker_slots([{"CPU": 8, "GPU": 4}, {"CPU": 8, "GPU": 2}], {"CPU": 1, "GPU": 1}) == 6
    assert worker_slots([{"CPU": 4}, {"CPU": 4}], {"CPU": 3}) == 2  # 8 CPUs, yet no third worker
    assert worker_slots([{"CPU": 4}], {"CPU": 1, "GPU": 1}) == 0
    assert worker_slots([{"CPU": 1}], {"CPU": 0.1, "GPU": 0}) == 10
    with pytest.raises(ValueError, match=r"`resources_per_worker` is .*, but must be more than 0 of some resource"):
        worker_slots([{"CPU": 1}], {"CPU": 0})


@pytest.mark.parametrize("given", [3, [3], [("new", 1)], Waiting("new", 1)])
def test_a_queue_of_anything_but_waiting_trials_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r"`waiting` is .*, but must be trials, each a `Waiting`"):
        Queue(given)


@pytest.mark.parametrize("given", [3, [3], ["running"], [("running",)], [("running", "two")]])
def test_anything_but_trials_and_the_workers_that_they_hold_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r"`holding` is .*, but must be tuples of a trial, its workers"):
        Held(given)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="`free` is -1, but must be an integer >= 0"):
        place(Queue(), Held(), -1)
    with pytest.raises(ValueError, match="`patience` is 0, but must be an integer >= 1"):
        place(Queue(), Held(), 1, patience=0)
