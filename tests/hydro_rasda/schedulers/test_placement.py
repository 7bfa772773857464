"""Placement decisions, by themselves and over a whole simulated run of trials."""

import math
import random

import pytest

from hydro_rasda.schedulers import Queue, Running, Waiting, place, worker_slots


def names(queue: Queue, running: list[Running], free: int, **options: int) -> list[str]:
    """The trials that start, one decision after another."""
    started: list[str] = []
    while True:
        queue, placement = place(queue, running, free, **options)
        if placement.start is None:
            return started
        started.append(placement.start.trial)
        running = [*running, Running(placement.start.workers, placement.start.seconds)]
        free -= placement.start.workers


def test_promoted_before_new_and_deepest_first() -> None:
    queue = Queue((Waiting("new", 1), Waiting("shallow", 2, rung=1), Waiting("deep", 4, rung=2)))
    assert names(queue, [], 8) == ["deep", "shallow", "new"]


def test_equals_start_in_order_of_arrival() -> None:
    assert names(Queue(tuple(Waiting(name, 1) for name in "cab")), [], 2) == ["c", "a"]


def test_a_large_trial_is_reserved_for() -> None:
    queue = Queue((Waiting("new", 1), Waiting("large", 8, rung=3)))
    _, placement = place(queue, [Running(1)] * 4, free=4)
    assert placement.start is None
    assert placement.reserved == Waiting("large", 8, rung=3)


def test_backfills_what_ends_before_the_reservation() -> None:
    """4 of 8 are free, 8 are free after 10 s: who needs 9 s may start, who needs 10 s may not."""
    large = Waiting("large", 8, rung=3)
    running = [Running(4, seconds=10.0)]
    assert names(Queue((large, Waiting("short", 4, seconds=9.0))), running, 4) == ["short"]
    assert names(Queue((large, Waiting("long", 1, seconds=10.0))), running, 4) == []
    assert names(Queue((large, Waiting("unknown", 1))), running, 4) == []


def test_backfills_workers_that_the_reservation_leaves_over() -> None:
    """When the 6 come back, 8 are free and 4 are reserved: 4 stay, however long they are kept."""
    queue = Queue((Waiting("large", 4, rung=1), *(Waiting(f"new{i}", 1) for i in range(4))))
    assert names(queue, [Running(6)], 2) == ["new0", "new1"]
    assert names(queue, [Running(6, seconds=5.0)], 2) == ["new0", "new1"]
    assert names(queue, [Running(1)] * 6, 2) == []  # two single workers may come back first: none is left over


def test_a_lost_node_lowers_what_a_trial_is_due() -> None:
    assert place(Queue((Waiting("large", 8, rung=3),)), [], 6)[1].start == Waiting("large", 6, rung=3)


def test_the_longest_waiting_gets_its_turn() -> None:
    queue = Queue((Waiting("new", 2),))
    started = []
    for i in range(7):
        queue, placement = place(queue.add(Waiting(f"deep{i}", 2, rung=3)), [], 2, patience=3)
        assert placement.start is not None
        started.append(placement.start.trial)
    assert started == ["deep0", "deep1", "deep2", "new", "deep3", "deep4", "deep5"]


def test_nothing_waits_or_nothing_is_free() -> None:
    assert place(Queue(), [], 8)[1].start is None
    queue = Queue((Waiting("a", 1),))
    left, placement = place(queue, [Running(8)], 0)
    assert (left, placement.start, placement.reserved) == (queue, None, Waiting("a", 1))


def simulate(estimates: bool, seed: int, slots: int = 8, trials: int = 40) -> tuple[dict[str, float], set[str]]:
    """A RASDA run of virtual time; the longest wait of a trial by rung, and the trials that finished."""
    rng = random.Random(seed)
    queue = Queue(tuple(Waiting(f"t{i}", 1, seconds=1.3 if estimates else math.inf) for i in range(trials)))
    since = dict.fromkeys((w.trial for w in queue.waiting), 0.0)
    running: dict[str, tuple[float, Waiting]] = {}
    now, waits, finished = 0.0, {}, set[str]()
    while queue.waiting or running:
        held = [Running(w.workers, end - now if estimates else math.inf) for end, w in running.values()]
        free = slots - sum(r.workers for r in held)
        assert free >= 0
        queue, placement = place(queue, held, free)
        if placement.start is not None:
            started = placement.start
            running[started.trial] = (now + rng.uniform(0.7, 1.3), started)
            waits[f"{started.trial}/{started.rung}"] = now - since[started.trial]
            continue
        assert running, "all workers are free, and nobody starts"
        trial = min(running, key=lambda name: running[name][0])
        now, ended = running.pop(trial)
        if ended.rung < 3 and rng.random() < 0.5:
            queue = queue.add(Waiting(trial, ended.workers * 2, ended.rung + 1, ended.seconds))
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
    with pytest.raises(ValueError, match=r"`resources_per_worker` is .*, but must ask for some resource"):
        worker_slots([{"CPU": 1}], {"CPU": 0})


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="`free` is -1, but must be >= 0"):
        place(Queue(), [], -1)
    with pytest.raises(ValueError, match="`patience` is 0, but must be >= 1"):
        place(Queue(), [], 1, patience=0)
