from __future__ import annotations

import math
import random

import pytest

from hydro_rasda.schedulers.bubble_policy import CONTROL, SHORTEST_S, Guard, Margin, WaitForecast


def test_a_forecast_is_of_a_position_and_of_the_last_steps() -> None:
    forecast = WaitForecast()
    for seconds in [9.0] * 8 + [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]:
        forecast.saw("a", seconds)
        forecast.saw("b", 1.0)
    assert forecast.expects("a") == 3.0  # of eight, two took less
    assert forecast.expects("b") == 1.0


def asked_for(cost: float, steps: int = 40 * CONTROL, spread: float = 0.02) -> Guard:
    """The guard of a host whose steps take a second, a share longer with guests, and noise."""
    drawn, guard = random.Random(0), Guard()
    for _ in range(steps):
        guard.saw((1 + cost * guard.lets_in) * (1 + drawn.gauss(0, spread)))
    return guard


def test_bubbles_must_be_the_longer_the_more_guests_cost_the_host() -> None:
    assert asked_for(0.0).least == asked_for(0.01).least == SHORTEST_S
    assert asked_for(0.1).least >= 4 * SHORTEST_S
    assert asked_for(0.1, steps=7 * CONTROL, spread=0).cost == pytest.approx(0.1)
    assert math.isnan(Guard().cost)
    assert math.isnan(asked_for(0.1, steps=CONTROL - 1).cost)  # there was no control step yet


def test_shorter_bubbles_do_once_guests_cost_less() -> None:
    guard, least = Guard(), []
    for cost in (0.1, 0.0):
        for _ in range(40 * CONTROL):
            guard.saw(1 + cost * guard.lets_in)
        least.append(guard.least)
    assert least[0] > least[1] == SHORTEST_S


def test_one_step_in_so_many_is_a_control_step() -> None:
    guard, let_in = Guard(), []
    for _ in range(3 * CONTROL):
        let_in.append(guard.lets_in)
        guard.saw(1.0)
    assert let_in == [i % CONTROL != CONTROL - 1 for i in range(3 * CONTROL)]


def test_the_margin_grows_with_what_outlasts_a_bubble() -> None:
    margin = Margin()
    assert margin.fits("step", 1e-9)
    assert not margin.fits("step", 0.0)
    for in_time in (True, True, False):
        assert margin.fits("step", 0.1)  # it is not known yet
        margin.saw("step", 1.0, in_time)
    assert (margin.fits("step", 1.385), margin.fits("step", 1.384)) == (True, False)  # 0.2 * 0.98**2, doubled
    for _ in range(100):
        margin.saw("step", 1.0, in_time=True)
    assert (margin.fits("step", 1.1), margin.fits("step", 1.09)) == (True, False)
    for _ in range(10):
        margin.saw("step", 1.0, in_time=False)
    assert (margin.fits("step", 5.0), margin.fits("step", 4.99)) == (True, False)
