"""What a survivor's workers may depend on."""

import pytest

from hydro_rasda.simulator import FillCluster, Growth, WhilePaying, as_due


def growth(
    held: int = 2, due: int = 4, alive: int = 8, capacity: int = 64, seconds: dict[int, float] | None = None
) -> Growth:
    return Growth(held, due, 2, alive, capacity, seconds or {})


def test_as_due() -> None:
    assert as_due(growth(due=16)) == 16


def test_grows_while_the_last_growth_paid() -> None:
    """From 2 to 4 at half the time: efficiency 1. From 4 to 8 at 0.8 of the time: 0.625."""
    measured = {2: 10.0, 4: 5.0, 8: 4.0}
    assert WhilePaying(0.7)(growth(due=4, seconds={2: 10.0})) == 4
    assert WhilePaying(0.7)(growth(held=4, due=8, seconds={2: 10.0, 4: 5.0})) == 8
    assert WhilePaying(0.7)(growth(held=4, due=8, seconds=measured)) == 4
    assert WhilePaying(0.6)(growth(held=4, due=8, seconds=measured)) == 8
    assert WhilePaying(0.7)(growth(held=8, due=16, seconds=measured)) == 8


def test_a_probe_spares_the_first_try_and_a_measurement_overrules_it() -> None:
    rule = WhilePaying(0.7, probed={2: 10.0, 4: 9.0})
    assert rule(growth(due=4)) == 2
    assert rule(growth(due=4, seconds={4: 5.0})) == 4


def test_fills_the_cluster_with_who_is_left() -> None:
    """64 workers for 8 trials: 8 each; for 5: 8 each, since 16 each would be 80."""
    assert FillCluster()(growth(alive=8)) == 8
    assert FillCluster()(growth(alive=5)) == 8
    assert FillCluster()(growth(alive=4)) == 16
    assert FillCluster()(growth(alive=1)) == 64
    assert FillCluster()(growth(held=32, alive=4)) == 32
    assert FillCluster(surviving=0.5)(growth(alive=8)) == 16


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"`threshold` is 0.0, but must be a number > 0"):
        WhilePaying(0.0)
    with pytest.raises(ValueError, match=r"`step` is 1, but must be an integer >= 2"):
        FillCluster(1)
