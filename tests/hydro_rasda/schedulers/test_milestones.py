"""Who waits for whom, and until when."""

import math
import random

import pytest

from hydro_rasda.schedulers import MilestoneBarrier, first_milestone, milestones


@pytest.mark.parametrize(
    ("min_t", "max_t", "factor", "expected"),
    [
        (1, 243, 3, (1, 3, 9, 27, 81, 243)),  # int(log(243) / log(3)) is 4: float logarithms lose a rung
        (1, 1000, 10, (1, 10, 100, 1000)),  # int(log(1000) / log(10)) is 2
        (5, 40, 2, (5, 10, 20, 40)),  # RASDA, section 4.1
        (5, 20, 2, (5, 10, 20)),  # RASDA, section 4.2
        (5, 30, 2, (5, 10, 20, 30)),
        (7, 7, 2, (7,)),
        (1, 2, 3, (1, 2)),
    ],
)
def test_milestones(min_t: int, max_t: int, factor: int, expected: tuple[int, ...]) -> None:
    assert milestones(min_t, max_t, factor) == expected


def test_large_numbers_stay_exact() -> None:
    assert milestones(1, 3**60, 3) == tuple(3**k for k in range(61))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 9, 3), ValueError, "`min_t` is 0, but must be an integer >= 1"),
        ((10, 9, 3), ValueError, "`max_t` is 9, but must be an integer >= 10"),
        ((1, 9, 1), ValueError, "`factor` is 1, but must be an integer >= 2"),
        ((1.0, 9, 3), ValueError, "`min_t` is 1.0, but must be an integer"),
        ((True, 9, 3), ValueError, "`min_t` is True, but must be an integer"),
    ],
)
def test_bad_input(arguments: tuple[int, int, int], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        milestones(*arguments)


@pytest.mark.parametrize(("warmup", "expected"), [(0, 1), (1, 1), (1.1, 3), (3, 3), (10, 27), (27, 27), (99, 27)])
def test_no_rung_before_the_warmup_is_over(warmup: float, expected: int) -> None:
    assert first_milestone(1, 27, 3, warmup) == expected


@pytest.mark.parametrize("warmup", [0, 1.5, 5, 11, 20, 30])
def test_what_is_left_are_the_milestones_that_are_not_before(warmup: float) -> None:
    left = milestones(first_milestone(5, 30, 2, warmup), 30, 2)
    assert left == tuple(m for m in milestones(5, 30, 2) if m >= warmup)


def begun(wait: float, **since: float) -> MilestoneBarrier:
    """Trials on their way to the milestone 5."""
    gathering = MilestoneBarrier(wait)
    for trial, begin in sorted(since.items(), key=lambda entry: entry[1]):
        gathering.begin(trial, 5, begin)
    return gathering


def test_fellows_that_come_in_time_are_decided_together() -> None:
    gathering = begun(0.1, a=0.0, b=0.0, c=0.0)
    gathering.come("b", 5, 0.3, now=10.0)
    assert (gathering.take(10.0), gathering.until(5)) == ({}, 11.0)
    gathering.come("a", 5, 0.2, now=10.5)
    assert (gathering.take(10.5), gathering.until(5), gathering.waits("a")) == ({}, 11.0, True)
    gathering.come("c", 5, 0.1, now=10.9)
    assert {m: list(scores.items()) for m, scores in gathering.take(10.9).items()} == {
        5: [("b", 0.3), ("a", 0.2), ("c", 0.1)]
    }
    assert (gathering.take(99.0), gathering.until(5), gathering.waits("a")) == ({}, math.inf, False)


def test_a_fellow_that_stalls_holds_nobody_beyond_the_bound() -> None:
    gathering = begun(0.1, a=0.0, stalls=0.0)
    gathering.come("a", 5, 0.3, now=10.0)
    assert gathering.take(math.nextafter(11.0, 0.0)) == {}
    assert gathering.take(11.0) == {5: {"a": 0.3}}
    gathering.come("stalls", 5, 0.1, now=80.0)
    assert gathering.take(80.0) == {5: {"stalls": 0.1}}


def test_a_fellow_that_dies_is_not_waited_for() -> None:
    gathering = begun(0.1, a=0.0, dies=0.0)
    gathering.come("a", 5, 0.3, now=10.0)
    gathering.leave("dies")
    assert gathering.take(10.2) == {5: {"a": 0.3}}


def test_one_that_waits_and_dies_is_not_decided_and_its_bound_is_forgotten() -> None:
    gathering = begun(0.1, dies=0.0, a=0.0, b=0.0)
    gathering.come("dies", 5, 0.3, now=10.0)
    gathering.come("a", 5, 0.2, now=10.5)
    gathering.leave("dies")
    gathering.leave("dies")
    assert gathering.take(11.0) == {}
    assert gathering.take(gathering.until(5)) == {5: {"a": 0.2}}


@pytest.mark.parametrize(("begin", "waits"), [(1.0, True), (1.01, False)])
def test_who_began_too_late_to_be_there_in_time_is_no_fellow(begin: float, waits: bool) -> None:
    """As fast as the first, it would be there at 10 + `begin`; the first waits until 11."""
    gathering = begun(0.1, a=0.0, later=begin)
    gathering.come("a", 5, 0.3, now=10.0)
    assert (gathering.take(10.0) == {}) is waits


def test_the_shortest_bound_holds_for_all() -> None:
    gathering = begun(0.1, slow=0.0, fast=8.0, never=8.0)
    gathering.come("slow", 5, 0.3, now=10.0)
    gathering.come("fast", 5, 0.2, now=10.0)
    assert gathering.until(5) == pytest.approx(10.2)
    assert gathering.take(gathering.until(5)) == {5: {"slow": 0.3, "fast": 0.2}}


def test_milestones_are_apart() -> None:
    gathering = begun(0.1, a=0.0, b=0.0)
    gathering.begin("deeper", 10, 0.0)
    gathering.come("deeper", 10, 0.5, now=9.0)
    assert gathering.take(9.0) == {10: {"deeper": 0.5}}
    gathering.come("a", 5, 0.3, now=10.0)
    gathering.come("b", 10, 0.2, now=10.0)  # reports seldom, and passed 5 without a word
    assert gathering.take(10.0) == {5: {"a": 0.3}, 10: {"b": 0.2}}


def test_who_begins_again_is_on_its_way_from_then_on() -> None:
    gathering = begun(0.1, a=0.0, fails=0.0)
    gathering.expect("fails", 5)
    gathering.come("a", 5, 0.3, now=10.0)
    assert gathering.take(10.0) == {5: {"a": 0.3}}
    gathering.begin("fails", 5, 20.0)
    gathering.begin("b", 5, 20.0)
    gathering.come("fails", 5, 0.2, now=30.0)
    assert (gathering.take(30.0), gathering.until(5)) == ({}, 31.0)


def test_without_bound_all_are_waited_for_that_are_to_come() -> None:
    gathering = MilestoneBarrier(math.inf)
    for trial in "abc":
        gathering.expect(trial, 5)
    for trial, now in (("a", 10.0), ("b", 1e9)):
        gathering.begin(trial, 5, now)
        gathering.come(trial, 5, now, now)
        assert (gathering.take(now), gathering.until(5)) == ({}, math.inf)
    gathering.begin("c", 5, 2e9)
    assert gathering.take(3e9) == {}
    gathering.leave("c")
    assert gathering.take(3e9) == {5: {"a": 10.0, "b": 1e9}}


@pytest.mark.parametrize("seed", range(20))
def test_no_trial_ever_waits_beyond_its_bound(seed: int) -> None:
    """Whoever comes, stalls or dies: where one asks when a bound runs out, and whenever anything happens."""
    rng, wait = random.Random(seed), 0.1
    gathering = MilestoneBarrier(wait)
    since = {f"t{i}": rng.choice([0.0, rng.uniform(0, 5)]) for i in range(30)}
    happens = [(begin, trial, "begins") for trial, begin in since.items()]
    for trial, begin in since.items():
        then = begin + rng.choice([10.0, rng.uniform(5, 30)])
        happens += rng.choice([[(then, trial, "comes")]] * 3 + [[(then, trial, "dies")], []])
    came: dict[str, float] = {}
    decided: dict[str, float] = {}

    def take(now: float) -> None:
        decided.update(dict.fromkeys((trial for scores in gathering.take(now).values() for trial in scores), now))

    for now, trial, what in sorted(happens):
        while (until := gathering.until(1)) <= now:
            take(until)
        if what == "begins":
            gathering.begin(trial, 1, now)
        elif what == "dies":
            gathering.leave(trial)
        else:
            gathering.come(trial, 1, 0.0, now)
            came[trial] = now
        take(now)
    while (until := gathering.until(1)) < math.inf:
        take(until)
    assert decided.keys() == came.keys()
    assert all(came[t] <= decided[t] <= came[t] + wait * (came[t] - since[t]) for t in came)
    assert any(decided[t] > came[t] for t in came)
    assert len(set(decided.values())) < len(decided)


@pytest.mark.parametrize("wait", [-0.1, math.nan, True, "short"])
def test_bad_input_milestone_barrier(wait: float) -> None:
    with pytest.raises(ValueError, match=r"`wait` is .*, but must be a number >= 0"):
        MilestoneBarrier(wait)
