"""Today's rule with one thing changed does that thing."""

import numpy as np
import pytest

from benchmarks.replay.ablations import ABLATIONS, page
from benchmarks.replay.bring_back import BringBack
from benchmarks.replay.policies import Tune, best_of_each_schedule, today
from benchmarks.replay.study import compared, replay
from benchmarks.replay.table import Table
from benchmarks.replay.truth import Keep
from tests.benchmarks.replay.tables import parallel, search, table_of


def averaged(best: int) -> Table:
    """By averaged weights alone, one configuration is better than all others."""
    table = table_of(parallel(16))
    table.scores[1, 1] += 0.5
    for place, name in enumerate(table.about.metrics):
        if name.endswith("_ema"):
            table.scores[:, :, best, :, place] -= 30.0
    return table


@pytest.mark.parametrize(("grace_period", "epochs"), [(1, {1, 3}), (3, {3}), (9, {9}), (27, {9})])
def test_the_first_rung_comes_at_the_grace_period(grace_period: int, epochs: set[int]) -> None:
    run = search(table_of(parallel(64)))
    assert Tune(grace_period=grace_period)(run) == 63
    assert {reached for (width, _), reached in run._paid.items() if width < 1} == epochs


def test_who_is_unlikely_stops_as_soon_as_something_is_known() -> None:
    """Curves never cross: surrogates tell at the first look, the trials' own curves at the second."""
    second = {Tune(): 1, Tune(prior=False): 2, Tune(stop_unlikely=False): 9}
    for policy, reached in second.items():
        run = search(table_of(parallel(64)))
        assert policy(run) == 63
        assert [run.reached(n) for n in range(60, 64)] == [1, 1, reached, 9]


def test_averaged_weights_may_rank_the_sweep() -> None:
    """The fifth is then a finalist, and wins where averages count at full size."""
    table = averaged(5)
    keeps: list[tuple[Keep, int]] = [("own", 15), ("best", 5)]
    for policy, tried in ((Tune(), False), (Tune(ema=True), True)):
        for keep, winner in keeps:
            run = search(table, keep=keep)
            assert policy(run) == (winner if tried else 15)
            assert (run.reached(5) > 0) == tried


def test_each_schedule_keeps_its_share_at_every_rung() -> None:
    """A quarter of 36 is cosine, and worst: so is a quarter of the 12 and of the 4 that two rungs keep."""
    table = table_of(parallel(36))
    for n in range(36):
        table.about.configs[n] = {**table.about.configs[n], "schedule": "cosine" if n < 9 else "constant"}
    scores = {n: float(n) for n in range(36)}
    assert best_of_each_schedule(search(table), scores, 12) == [*range(35, 26, -1), 8, 7, 6]
    run = search(table)
    assert Tune(by_schedule=True)(run) == 35
    assert [n for n in range(36) if run.reached(n)] == [8, 33, 34, 35]


def test_a_sweep_at_full_width_is_gone_on_from() -> None:
    """16 for one epoch, then 5 to the third: the winner's other 6 are all that the race adds, but for the second's."""
    run = search(table_of(parallel(16)))
    assert Tune(width=1.0)(run) == 15
    assert not any(width < 1 for width, _ in run._paid)
    assert [run.reached(n) for n in range(10, 16)] == [1, 3, 3, 3, 3, 9]
    assert run.spent == pytest.approx((11 + 4 * 3 + 9) / 9)


@pytest.mark.parametrize(("below", "joined"), [(2.0, True), (0.0, True), (-1.5, False)])
def test_what_full_size_says_of_learning_rates_brings_back_what_was_dropped(below: float, joined: bool) -> None:
    """Surrogates like low rates best; full size ranks the finalists the other way, and likes best what was dropped."""
    table = table_of(parallel(16))
    rates = np.geomspace(1, 1e-3, 16)
    for n in range(16):
        table.about.configs[n] = {**table.about.configs[n], "lr": float(rates[n])}
    table.scores[1] -= table.scores[1] - 20.0
    table.scores[1, :, 11] = 10.0
    table.scores[1, :, 12:] += np.linspace(0, 1, 4)[None, :, None, None]
    assert (BringBack(1, "rate", below)(search(table)) == 11) == joined


def test_what_is_judged_is_what_is_handed_over() -> None:
    table = averaged(5)
    found = replay(table, {"averages": Tune(ema=True), "weights": today}, resamples=5, keep="best")
    there = found["averages"].validation > 10
    assert there.any()
    assert (found["weights"].validation < 0).all()
    assert (found["averages"].test[there] > 10).all()
    assert (found["averages"].regret[there] == 0).all()
    assert (found["weights"].regret[there] > 10).all()


def test_a_row_has_the_means_over_tasks() -> None:
    table = table_of(parallel(16))
    table.scores[...] += np.random.default_rng(0).normal(size=table.scores.shape)
    other = table_of(parallel(16))
    other.scores[1, 1] += 0.5
    rows = page({"one": table, "other": other}, resamples=5).splitlines()
    assert len(rows) == 4 + len(ABLATIONS) + 2
    asked: list[tuple[str, list[Keep]]] = [(rows[4], ["best", "last"]), (rows[-2], ["better"]), (rows[-1], ["own"])]
    for row, keeps in asked:
        expected = []
        for keep in keeps:
            found = [compared(each, {"today": today}, keep, 5)["today"] for each in (table, other)]
            cost, regret, _, not_worse, reaches = np.mean(found, 0)
            expected += [f"{cost:.2f}", f"{regret:.2f}", f"{not_worse:.0%}", f"{reaches:.0%}"]
        assert [cell.strip() for cell in row.split("|")[2:-1] if cell.strip()] == expected


def test_tables_of_one_seed_have_no_rows() -> None:
    assert page({"one": table_of(parallel(16), seeds=1)}) == ""
