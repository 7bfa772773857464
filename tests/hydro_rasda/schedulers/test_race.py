from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hydro_rasda.schedulers import Outlook, Race, chances, expected_gain
from hydro_rasda.schedulers.race import ERROR


def race(**changed: Any) -> Race:
    return Race(**{"max_t": 4, "mode": "min", "keep": "last", "reduction_factor": 2, "full_trainings": 2.5, **changed})


def ends(scores: dict[int, float], narrow: dict[int, dict[int, float]], epoch: int) -> list[float]:
    full = {n: {epoch: score} for n, score in scores.items()}
    return [found.end for found in race().outlooks(dict.fromkeys(full, epoch), full, narrow).values()]


def test_of_two_that_are_alike_now_the_one_whose_surrogate_still_improved_is_the_better_one() -> None:
    narrow = {0: {1: 0.9, 2: 0.8, 4: 0.8}, 1: {1: 0.9, 2: 0.8, 4: 0.5}}
    first, second = ends({0: 0.4, 1: 0.4}, narrow, 1)
    assert first + second == pytest.approx(2 * 0.4 + (0.8 - 0.9) + (0.5 - 0.9))  # together, the whole change
    # A quarter trained: of the surrogates' difference, three quarters count in full, and a quarter by half.
    assert first - second == pytest.approx(0.3 * (3 / 4 + 1 / 4 / 2))


def test_of_two_whose_surrogates_are_alike_the_one_that_is_ahead_is_the_better_one_the_more_so_the_later() -> None:
    narrow = {n: {1: 0.9, 3: 0.8, 4: 0.7} for n in (0, 1)}
    for epoch, share in ((1, 3 / 4 / 2 + 1 / 4), (3, 1 / 4 / 2 + 3 / 4)):
        first, second = ends({0: 0.4, 1: 0.6}, narrow, epoch)
        assert second - first == pytest.approx(0.2 * share)


def test_what_is_common_to_all_surrogates_tells_none_apart() -> None:
    narrow = {0: {2: 0.9, 4: 0.8}, 1: {2: 0.7, 4: 0.5}}
    shifted = {n: {epoch: 3 + value for epoch, value in curve.items()} for n, curve in narrow.items()}
    assert ends({0: 0.4, 1: 0.6}, shifted, 2) == pytest.approx(ends({0: 0.4, 1: 0.6}, narrow, 2))


def test_one_that_is_far_off_does_not_shift_the_others() -> None:
    """Nor does it keep them from being better in the end than they are."""
    narrow = {n: {1: 0.9, 4: 0.7} for n in range(4)}
    found = ends({0: 0.4, 1: 0.42, 2: 0.44, 3: 1e6}, narrow, 1)
    assert found[:3] == pytest.approx([0.2, 0.22, 0.24], abs=0.02)


def test_surrogates_count_as_far_as_all_of_them_went() -> None:
    narrow = {0: {1: 0.9, 2: 0.8, 3: 0.2}, 1: {1: 0.9, 2: 0.7}}
    cut = {0: {1: 0.9, 2: 0.8}, 1: {1: 0.9, 2: 0.7}}
    assert ends({0: 0.4, 1: 0.4}, narrow, 1) == ends({0: 0.4, 1: 0.4}, cut, 1)


def test_past_the_end_of_surrogates_scores_are_what_they_are_and_nothing_is_known() -> None:
    full = {0: {2: 0.4}, 1: {2: 0.5}}
    for narrow in ({0: {1: 0.9, 2: 0.8}, 1: {1: 0.9, 2: 0.1}}, {0: {}, 1: {3: 0.1}}, {}):
        found = race().outlooks({0: 2, 1: 2}, full, narrow)
        assert found == {0: Outlook(None, 0.4, math.inf), 1: Outlook(None, 0.5, math.inf)}
        assert chances(found, "min") == {0: 0.5, 1: 0.5}


def test_what_is_not_finite_stays_so_and_tells_nothing_of_the_others() -> None:
    narrow = {0: {1: math.nan, 2: 0.5}, 1: {1: 0.9, 2: 0.5}, 2: {1: 0.8, 2: 0.5}}
    found = ends({0: 0.4, 1: math.nan, 2: 0.6}, narrow, 1)
    assert math.isnan(found[1])
    assert [found[0], found[2]] == pytest.approx([0.4 - 0.3, 0.6 - 0.3])


def test_ends_are_as_uncertain_as_surrogates_still_changed() -> None:
    narrow = {0: {1: 0.9, 4: 0.6}, 1: {1: 0.9, 4: 0.5}}
    found = race().outlooks({0: 1, 1: 4}, {0: {1: 0.5}, 1: {1: 0.6, 4: 0.3}}, narrow)
    assert found[0].deviation == ERROR * math.sqrt((0.3**2 + 0.4**2) / 2)
    assert found[1] == Outlook(None, 0.3, 0.0)


def test_surrogates_that_were_stopped_leave_the_rest_more_uncertain() -> None:
    """Half of the way to the end is known, in the logarithm of epochs."""
    full = {0: {1: 0.4}, 1: {1: 0.5}}
    found = race().outlooks({0: 1, 1: 1}, full, {0: {1: 0.9, 2: 0.8}, 1: {1: 0.9, 2: 0.6}})
    assert found[0].deviation == pytest.approx(2 * ERROR * math.sqrt((0.1**2 + 0.3**2) / 2))


def test_past_the_end_of_surrogates_trials_are_as_uncertain_as_they_have_changed() -> None:
    """From 1 to 3 of 27 epochs they went a third of the way, in the logarithm of epochs: two thirds are left."""
    full = {0: {1: 0.9, 3: 0.4}, 1: {1: 0.9, 3: 0.6}, 2: {1: math.nan, 3: math.nan}}
    found = race(max_t=27).outlooks({0: 3, 1: 3, 2: 3}, full, {0: {1: 0.9, 3: 0.8}, 1: {1: 0.9, 3: 0.8}})
    assert (found[0].end, found[1].end) == (0.4, 0.6)
    assert found[0].deviation == pytest.approx(2 * ERROR * math.sqrt((0.5**2 + 0.3**2) / 2))


def test_a_stopped_trial_is_expected_to_change_as_those_that_went_on() -> None:
    """Where surrogates say nothing."""
    full = {0: {2: 0.5}, 1: {2: 0.6, 4: 0.3}, 2: {2: 0.6, 4: 0.5}}
    found = race().outlooks({0: 2, 1: 4, 2: 4}, full, {})
    assert found[0].end == pytest.approx(0.5 - 0.2)
    assert found[0].deviation == pytest.approx(ERROR * math.sqrt((0.3**2 + 0.1**2) / 2))


@pytest.mark.parametrize(("keep", "so_far"), [("best", 0.2), ("last", None)])
def test_the_best_so_far_counts_where_it_is_kept(keep: str, so_far: float | None) -> None:
    (found,) = race(keep=keep).outlooks({0: 3}, {0: {1: math.nan, 2: 0.2, 3: 0.7, 4: 0.1}}, {}).values()
    assert found == Outlook(so_far, 0.7, math.inf)
    assert found.expected("min") == (0.7 if so_far is None else so_far)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_chances_are_those_of_a_simulation(mode: Any) -> None:
    sign = 1.0 if mode == "max" else -1.0
    outlooks = {
        0: Outlook(None, sign * 0.5, 0.1),
        1: Outlook(sign * 0.45, sign * 0.2, 0.2),
        2: Outlook(None, sign * 0.48, 0.0),
        3: Outlook(None, sign * 0.4, 0.3),
    }
    drawn = np.random.default_rng(0).standard_normal((200_000, 4))
    values = np.array([0.5, 0.2, 0.48, 0.4]) + np.array([0.1, 0.2, 0.0, 0.3]) * drawn
    values[:, 1] = np.maximum(values[:, 1], 0.45)
    expected = np.bincount(values.argmax(1), minlength=4) / len(values)
    found = chances(outlooks, mode)
    assert sum(found.values()) == pytest.approx(1.0)
    assert [*found.values()] == pytest.approx(expected.tolist(), abs=0.01)


def test_what_is_shared_moves_all_together() -> None:
    outlooks = {0: Outlook(None, 0.5, 0.0), 1: Outlook(None, 0.6, 0.1, 0.3), 2: Outlook(0.55, 0.6, 0.2, 0.1)}
    drawn = np.random.default_rng(0).standard_normal((200_000, 4))
    values = np.array([0.5, 0.6, 0.6]) + np.array([0.0, 0.1, 0.2]) * drawn[:, :3]
    values += np.array([0.0, 0.3, 0.1]) * drawn[:, 3:]
    values[:, 2] = np.minimum(values[:, 2], 0.55)
    expected = np.bincount(values.argmin(1), minlength=3) / len(values)
    assert [*chances(outlooks, "min").values()] == pytest.approx(expected.tolist(), abs=0.015)


@pytest.mark.parametrize("narrow", [{}, {n: {1: 0.9, 2: 0.8, 4: 0.7} for n in range(4)}])
def test_going_on_makes_none_of_those_that_were_alike_better_or_worse(narrow: dict[int, dict[int, float]]) -> None:
    """Whatever the one that went on came to."""
    for end in (0.1, 0.5, 0.9):
        full = {0: {1: 0.95, 4: end}, **{n: {1: 0.95} for n in (1, 2, 3)}}
        found = chances(race().outlooks({0: 4, 1: 1, 2: 1, 3: 1}, full, narrow), "min")
        assert [*found.values()] == pytest.approx([0.25] * 4, abs=0.02)


@pytest.mark.parametrize("keep", ["best", "last"])
def test_what_all_came_to_is_no_reason_to_prefer_those_that_were_stopped(keep: str) -> None:
    """Surrogates foretold 0.2: full-size models that go on are all better, or all worse, by as much."""
    narrow = {n: {1: 0.9, 4: 0.3 - 0.02 * n} for n in range(4)}
    start = {n: 0.8 - 0.02 * n for n in range(4)}
    found = []
    for miss in (-0.1, 0.0, 0.3):
        full = {n: {1: start[n]} | ({4: 0.25 - 0.03 * n + miss} if n > 1 else {}) for n in range(4)}
        epochs = {n: 4 if n > 1 else 1 for n in range(4)}
        found.append(chances(race(keep=keep).outlooks(epochs, full, narrow), "min"))
    assert found[1] == pytest.approx(found[0], abs=1e-6)
    assert found[2] == pytest.approx(found[0], abs=1e-6)
    assert max(found[0], key=found[0].__getitem__) == 3


def test_one_whose_training_ended_by_itself_is_certain() -> None:
    full = {0: {1: 0.5, 2: 0.4}, 1: {1: 0.6, 2: 0.45, 4: 0.2}}
    found = race(keep="best").outlooks({0: 2, 1: 4}, full, {}, over=[0])
    assert found == {0: Outlook(0.4, 0.4, 0.0), 1: Outlook(0.2, 0.2, 0.0)}


def test_what_ended_is_certain_and_equals_share() -> None:
    known = {0: Outlook(None, 0.5, 0.0), 1: Outlook(0.4, 0.6, 0.0), 2: Outlook(None, 0.4, 0.0)}
    assert chances(known, "min") == {0: 0.0, 1: 0.5, 2: 0.5}
    assert chances({n: Outlook(None, math.inf, 1.0) for n in known}, "min") == {0: 0.0, 1: 0.0, 2: 0.0}
    assert chances({}, "min") == {}


NARROW = {n: {1: 0.9, 4: 0.7} for n in range(4)}


@pytest.mark.parametrize(
    ("scores", "full_trainings", "kept"),
    [
        ([0.9, 0.50, 0.52, 0.54], 4, [1, 2, 3]),  # deviation 0.07: three times behind is no chance
        ([0.9, 0.50, 0.52, 0.54], 2.5, [1, 2]),  # what the budget is enough for
        ([0.9, 0.50, 0.52, 0.54], 0, [1, 2]),  # one in two, whatever the budget
        ([0.9, 0.40, 0.85, 0.90], 4, [1]),  # a clear winner
        ([0.9, math.nan, math.inf, 0.9], 4, [0, 3]),
        ([math.nan] * 4, 4, []),
    ],
)
def test_who_may_still_be_the_best_goes_on(scores: list[float], full_trainings: float, kept: list[int]) -> None:
    full = {n: {1: score} for n, score in enumerate(scores)}
    assert race(full_trainings=full_trainings).promote(1, full, NARROW, trained=4) == kept


def test_however_many_race_those_that_are_alike_go_on() -> None:
    full = {n: {1: 0.5 + n / 1000} for n in range(30)}
    assert race(full_trainings=30).promote(1, full, {}, trained=30) == [*range(30)]


def test_who_was_better_than_another_will_be_goes_on_where_best_epochs_count() -> None:
    full, narrow = {0: {1: 0.3, 2: 0.9}, 1: {1: 0.9, 2: 0.6}}, {n: {2: 0.6, 4: 0.5} for n in (0, 1)}
    assert race(keep="best").promote(2, full, narrow, trained=4) == [0]
    assert race(keep="last").promote(2, full, narrow, trained=4) == [1]


def test_the_gain_of_another_one_is_that_of_another_draw() -> None:
    """Of four exponential draws, the last one beats the best of the first three by as much, on average."""
    drawn = np.random.default_rng(0).exponential(size=(20_000, 4))
    foretold = [expected_gain([Outlook(None, end, 0.0) for end in three], "max") for three in drawn[:, :3].tolist()]
    gains = np.maximum(drawn[:, 3] - drawn[:, :3].max(1), 0)
    assert np.mean(foretold) == pytest.approx(gains.mean(), rel=0.05)


def test_the_gain_of_another_one_counts_what_may_be_kept() -> None:
    found = [Outlook(0.2, 0.5, 0.0), Outlook(None, 0.5, 0.3), Outlook(None, math.nan, 0.0)]
    assert expected_gain(found, "min") == pytest.approx(0.3 / 3)
    assert math.isnan(expected_gain(found[1:], "min"))
