"""What a survivor's workers may depend on."""

import math
from dataclasses import replace
from typing import Any

import pytest

from hydro_rasda.schedulers import RASDA, Growth, efficient, parallel_efficiency


def survivor(**known: Any) -> Growth:
    """It had 2 workers, is due 8, and could have them."""
    plain = Growth(held=2, due=8, base=2, alive=4, capacity=64, seconds={}, free=64, sharing=4)
    return plain._replace(**known)


@pytest.mark.parametrize(
    ("free", "sharing", "workers"), [(32, 4, 8), (31, 4, 4), (16, 4, 4), (15, 4, 2), (0, 4, 2), (8, 1, 8), (8, 0, 8)]
)
def test_the_smaller_of_what_is_due_and_an_even_share(free: int, sharing: int, workers: int) -> None:
    assert efficient(survivor(free=free, sharing=sharing)) == workers


def test_never_fewer_than_it_has() -> None:
    assert efficient(survivor(held=4, due=16, free=4, sharing=9)) == 4
    assert efficient(survivor(held=3, free=4, sharing=1)) == 4  # a node that was down left it 3


def test_sizes_are_powers_of_the_factor_or_what_is_due() -> None:
    assert efficient(survivor(due=12, free=47, sharing=4), factor=3) == 6
    assert efficient(survivor(due=12, free=48, sharing=4), factor=3) == 12


@pytest.mark.parametrize(("seconds", "workers"), [(51.0, 8), (99.0, 8), (100.0, 4), (120.0, 4)])
def test_grows_while_its_own_epochs_show_more_than_half_the_efficiency(seconds: float, workers: int) -> None:
    """On 2 workers 100 s: 100 s on 4 is an efficiency of a half."""
    assert efficient(survivor(held=4, due=8, own={2: 100.0, 4: seconds})) == workers


def test_the_batch_stays_within_the_noise_scale() -> None:
    assert [efficient(survivor(noise_scale=n)) for n in (1.0, 3.9, 4.0, 7.9, 8.0)] == [2, 2, 4, 4, 8]


def test_what_decides_can_be_moved_or_switched_off() -> None:
    lossy, noisy = survivor(efficiency=0.3), survivor(noise_scale=3.0)
    assert [RASDA(40, grow="efficient", least_efficiency=least).resize(lossy) for least in (0.5, 0.2, 0.0)] == [2, 8, 8]
    assert [RASDA(40, 1, 2, 2, 2, grow="efficient", batch_over_noise=n).resize(noisy) for n in (1, 2, math.inf)] == [
        2,
        4,
        8,
    ]
    stuck = survivor(efficiency=0.0, noise_scale=0.0)
    assert RASDA(40, grow="efficient", least_efficiency=0.0, batch_over_noise=math.inf).resize(stuck) == 2


@pytest.mark.parametrize(("argument", "value"), [("least_efficiency", 1.0), ("batch_over_noise", 0.0)])
def test_bounds_have_rules(argument: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"`{argument}` is {value}, but must be a number"):
        replace(RASDA(40, grow="efficient"), **{argument: value})  # type: ignore[arg-type]  # one name or the other


def test_parallel_efficiency() -> None:
    assert parallel_efficiency({}, 4) == parallel_efficiency({2: 10.0}, 4) == parallel_efficiency({2: 9.0}, 2) == 1.0
    assert parallel_efficiency({1: 80.0, 2: 50.0, 4: 40.0}, 4) == 0.5


def test_as_due_whatever_is_known() -> None:
    known = survivor(free=0, noise_scale=1.0, own={1: 1.0, 2: 9.0})
    assert RASDA(40).resize(known) == 8
    assert RASDA(40, grow="efficient").resize(known) == 2


def test_the_rule_grows_by_its_own_factor() -> None:
    rule = RASDA(40, scaling_factor=4, grow="efficient")
    assert rule.resize(survivor(held=1, base=1, due=16, free=15, sharing=1)) == 4
