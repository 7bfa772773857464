from __future__ import annotations

import math
from itertools import pairwise

import pytest

from hydro_rasda.run.time_left import LEAST_NEWS, OVERHEAD, Piece, TimeLeft, roughly


def planned(sweep: float = 0.1, full: float = 2.0) -> TimeLeft:
    """100 epochs of surrogates, 20 at full size."""
    left = TimeLeft()
    left.plan("sweep", [Piece(60, sweep), Piece(40, sweep)])
    left.plan("race", [Piece(20, full)])
    left.begin("sweep", 0.0)
    return left


def test_before_anything_is_measured_it_is_what_was_foreseen() -> None:
    assert planned().foreseen() == pytest.approx(OVERHEAD * (100 * 0.1 + 20 * 2.0))
    assert planned(sweep=math.nan).foreseen() is None
    assert TimeLeft().foreseen() is None


def test_no_more_is_left_than_the_time_budget_leaves() -> None:
    left = planned()
    assert left.foreseen(60.0) == left.left(0.0, 60.0) == 60.0
    assert left.left(30.0, 30.0) == pytest.approx(30.0)
    assert planned(sweep=math.nan).foreseen(60.0) is None
    left.advance(1, 40.0)
    assert left.news(40.0, LEAST_NEWS - 1.0) is None
    assert left.news(40.0, LEAST_NEWS + 1.0) == LEAST_NEWS + 1.0


def test_what_is_measured_takes_the_place_of_what_was_foreseen() -> None:
    """Surrogates take four times as long as foreseen, which says nothing of full-size models."""
    left, at = planned(), 0.0
    for _ in range(90):
        left.advance(1, at := at + 0.4)
    foreseen = left.foreseen()
    assert foreseen is not None
    assert 0.9 < (foreseen - OVERHEAD * 20 * 2.0) / (10 * 0.4) <= 1
    left.advance(10, at := at + 4.0)
    assert left.foreseen() == pytest.approx(OVERHEAD * 20 * 2.0)
    left.begin("race", at)
    for _ in range(19):
        left.advance(1, at := at + 1.0)
    foreseen = left.foreseen()
    assert foreseen is not None
    assert 1.0 <= foreseen < 2.0


def test_without_foreseen_times_measured_ones_tell() -> None:
    left = planned(sweep=math.nan, full=1.0)
    left.advance(50, 25.0)
    assert left.foreseen() == pytest.approx(50 * 0.5 + OVERHEAD * 20)


def test_it_is_told_once_a_stage_as_soon_as_it_is_measured() -> None:
    """With two lanes, both have to report; of what nothing was foreseen, a tenth has to be trained as well."""
    left, told = planned(sweep=math.nan, full=6.0), list[float | None]()
    left.lanes = 2
    for at in range(1, 11):
        left.advance(1, float(at))
        assert (left.foreseen() is None) == (at < 2)
        told.append(left.news(float(at)))
    assert told == [*[None] * 9, 90 * 1.0 + OVERHEAD * 20 * 6.0]
    assert left.left(10.0) == told[-1]
    left.begin("race", 10.0)
    left.plan("sweep", [])
    told = []
    for at in range(3):
        left.advance(1, 16.0 + 6 * at)
        told.append(left.news(16.0 + 6 * at))
    assert [each is None for each in told] == [True, False, True]


def test_a_short_time_is_not_told_until_measurements_say_that_it_is_long() -> None:
    """Batches of some tenths of a millisecond foresee 4 s; each epoch then takes a second, most of it for processes."""
    left, told = planned(sweep=0.02, full=0.05), list[float | None]()
    for at in range(1, 101):
        left.advance(1, float(at))
        told.append(left.news(float(at)))
    (first,) = [each for each in told if each is not None]
    assert told[0] is None
    assert first >= LEAST_NEWS
    short = planned(sweep=0.02, full=0.05)
    for at in range(1, 101):
        short.advance(1, 0.2 * at)
        assert short.news(0.2 * at) is None


def test_the_estimate_does_not_jump() -> None:
    """The first full-size epochs turn out to take five times as long."""
    left, at, shown = planned(), 0.0, []
    for _ in range(100):
        left.advance(1, at := at + 0.1)
        shown.append(left.left(at))
    left.begin("race", at)
    for _ in range(20):
        left.advance(1, at := at + 10.0)
        shown.append(left.left(at))
    assert shown[-1] == pytest.approx(0.0, abs=1.0)
    steps = [b - a for a, b in pairwise(shown) if a is not None and b is not None]
    assert max(map(abs, steps[:99])) < 1.5  # a tenth of a second each
    raw = planned()
    raw.begin("race", 0.0)
    raw.advance(1, 10.0)
    assert max(map(abs, steps)) < (raw.foreseen() or 0.0)


def test_more_epochs_than_planned_leave_nothing() -> None:
    left = planned()
    left.plan("race", [])
    left.advance(150, 30.0)
    assert left.foreseen() == 0.0
    assert left.left(30.0) == 0.0


def test_an_estimated_time_is_told_in_one_unit() -> None:
    seconds = (0.4, 119.4, 120, 7_199, 7_200, 172_799, 172_800, 1_000_000)
    told = ("0 s", "119 s", "2 min", "120 min", "2 h", "48 h", "2 d", "12 d")
    assert tuple(map(roughly, seconds)) == told
