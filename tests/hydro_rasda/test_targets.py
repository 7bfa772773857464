from __future__ import annotations

import math

from hydro_rasda.targets import expected


def test_a_trial_changes_as_its_surrogate_did() -> None:
    """Of two that are alike now, the one whose surrogate still improved is the better one."""
    curves = {0: {1: 0.9, 2: 0.8, 3: 0.8}, 1: {1: 0.9, 2: 0.8, 3: 0.5}}
    assert expected({0: 0.4, 1: 0.5}, curves, epoch=1) == {0: 0.4 + (0.8 - 0.9), 1: 0.5 + (0.5 - 0.9)}


def test_curves_count_as_far_as_all_of_them_go() -> None:
    curves = {0: {1: 0.9, 2: 0.8, 3: 0.2}, 1: {1: 0.9, 2: 0.7}}
    assert expected({0: 0.4, 1: 0.4}, curves, epoch=1) == {0: 0.4 + (0.8 - 0.9), 1: 0.4 + (0.7 - 0.9)}


def test_past_the_end_of_the_curves_scores_are_what_they_are() -> None:
    curves = {0: {1: 0.9, 2: 0.8}, 1: {1: 0.9, 2: 0.1}}
    assert expected({0: 0.4, 1: 0.5}, curves, epoch=2) == {0: 0.4, 1: 0.5}
    assert expected({0: 0.4, 1: 0.5}, {0: {}, 1: {1: 0.1}}, epoch=1) == {0: 0.4, 1: 0.5}


def test_what_is_not_finite_stays_so_and_curves_do_not_spread_it() -> None:
    curves = {0: {1: math.nan, 2: 0.5}, 1: {1: 0.9, 2: 0.5}}
    found = expected({0: 0.4, 1: math.nan}, curves, epoch=1)
    assert found[0] == 0.4
    assert math.isnan(found[1])
