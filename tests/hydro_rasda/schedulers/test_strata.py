from __future__ import annotations

import math

import pytest

from hydro_rasda.schedulers.strata import first_shares, later_shares


@pytest.mark.parametrize("structures", [1, 2, 5, 12, 100])
@pytest.mark.parametrize("samples", [1, 2, 7, 64])
def test_no_more_than_all_samples_are_shared(structures: int, samples: int) -> None:
    first = first_shares(structures, samples)
    given = sum(count for _, count in first)
    assert 1 <= given <= samples
    assert len({count for _, count in first}) == 1
    if left := samples - given:
        later = later_shares({index: float(index) for index, _ in first}, left)
        assert sum(count for _, count in later) == left
        assert min(count for _, count in later) >= 1


def test_the_best_structures_get_the_rest_and_diverged_ones_come_last() -> None:
    assert later_shares({0: math.inf, 1: 3.0, 2: 1.0}, 5) == [(2, 5)]
    assert later_shares({0: math.inf, 1: math.inf}, 4) == [(0, 4)]
