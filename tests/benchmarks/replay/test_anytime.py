"""What a method has in hand before it is over."""

import numpy as np
import pytest

from benchmarks.replay.anytime import GRID, LAST, Curve, ahead_from, in_time, incumbents, regrets
from benchmarks.replay.policies import Search, Tables, Tune, asha, swept
from benchmarks.replay.table import Table, goodness, seed_spread
from benchmarks.replay.yardsticks import MOST, draws
from tests.benchmarks.replay.tables import parallel, search, table_of


def noisy(deviation: float = 1.0) -> Table:
    """Curves that cross if they deviate enough, other ones with each seed."""
    generator = np.random.default_rng(0)
    table = table_of(parallel(16))
    table.scores[...] += deviation * generator.normal(size=(*table.scores.shape[:-1], 1))
    return table


def test_the_best_so_far_is_followed_through_every_epoch() -> None:
    """What a surrogate trains is paid, and nothing to hand over; a training counts as far as it has come."""
    run = search(table_of(np.array([[5.0, 4.0, 3.0], [4.5, 3.5, 9.0], [9.0, 9.0, 9.0]]), max_t=3))
    run.look(1 / 8, 2, 3)
    run.look(1.0, 0, 2)
    run.look(1.0, 1, 3)
    run.look(1.0, 0, 1)
    run.look(1.0, 0, 3)
    costs, numbers, epochs = incumbents(run)
    assert costs.tolist() == pytest.approx(np.array([1, 2, 3, 4, 5, 6]) / 3 + 0.1)
    assert numbers.tolist() == [0, 0, 0, 1, 1, 0]
    assert epochs.tolist() == [1, 2, 2, 2, 3, 3]


def test_of_equal_scores_the_lower_number_counts() -> None:
    run = search(table_of(np.full((3, 2), 1.0), max_t=2))
    for number in (1, 2, 0):
        run.look(1.0, number, 1)
    assert incumbents(run)[1].tolist() == [1, 1, 0]


def test_a_curve_ends_where_the_search_does() -> None:
    """At the regret of its winner, where that is the best of all that it trained at full width."""
    table = noisy()
    kept = goodness(table, 1.0, keep="best")
    for policy in (Tune(by="best epochs"), Tune(by="best epochs", width=1.0), swept(1)):
        found, cost = regrets(table, policy, resamples=5)
        behind, costs = [], []
        for draw in draws(table, 5, "best"):
            run = Search(Tables(table), draw.seed, draw.subset.tolist())
            winner = policy(run)
            behind.append(draw.best - kept[draw.others, winner, run.reached(winner) - 1].mean())
            costs.append(run.spent)
        spread = seed_spread(table, [0, 1], keep="best")
        assert found[-1] == pytest.approx(np.minimum(np.array(behind) / spread, MOST).mean())
        assert cost == pytest.approx(np.median(costs))
        assert (found[max(costs) < GRID] == found[-1]).all()


def test_before_anything_is_trained_at_full_width_there_is_nothing_in_hand() -> None:
    """8 at a tenth of the price: for an epoch, 2 of them to the third; then the best trains its first epoch."""
    found, _ = regrets(noisy(), swept(1), resamples=5)
    begins = (8 + 2 * 2) / 9 / 10 + 1 / 9
    assert (found[begins > GRID] == MOST).all()
    assert found[begins + 0.01 < GRID][0] < MOST
    assert regrets(noisy(), asha, resamples=5)[0][0] < MOST


def test_a_leader_that_trains_to_its_end_first_is_in_hand_sooner() -> None:
    """8 configurations whose surrogates rank as full size does: the leader ends before others begin."""
    first, at_once, *_ = in_time(noisy(0.2), resamples=5)
    assert first[1] == pytest.approx(at_once[-1])
    assert first[1] + 0.5 < at_once[1]


def test_from_where_on_it_is_ahead_of_asha() -> None:
    """The latest cost at which it is not counts; a method that is equal is not ahead, nor what comes after `LAST`."""
    flat, later = np.ones_like(GRID), np.where(GRID < 2, 2.0, np.where(LAST < GRID, 2.0, 0.5))
    ours, asha_ = "today: tune's defaults", "ASHA"
    assert float(ahead_from({ours: Curve(later, []), asha_: Curve(flat, [])}, asha_)) == pytest.approx(2, abs=0.03)
    assert float(ahead_from({ours: Curve(flat / 2, []), asha_: Curve(flat, [])}, asha_)) == GRID[0]
    assert float(ahead_from({ours: Curve(flat, []), asha_: Curve(flat, [])}, asha_)) == LAST
