"""Policies on a replay table: they find and pay what the searches that they stand for do."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.replay.policies import TOP_K, Policy, Tune, asha, best_epoch, one_epoch, played, swept, today
from benchmarks.replay.record import record
from benchmarks.replay.table import goodness, load, seed_spread, truth
from benchmarks.replay.yardsticks import RULES
from benchmarks.tasks.load import load_task
from benchmarks.vs_asha.methods import asha as live_asha
from benchmarks.vs_asha.methods import hydro_rasda
from hydro_rasda.schedulers.named_rules import named_rule
from hydro_rasda.training.best_weights import kept_epoch
from tests.benchmarks.replay.tables import parallel, search, table_of


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if 1 / 4 not in getattr(rule, "widths", ())])
def test_where_curves_never_cross_every_rule_finds_the_best(rule: str) -> None:
    assert RULES[rule](search(table_of(parallel(64)))) == 63


def test_a_policy_pays_for_the_epochs_that_it_looks_at() -> None:
    """64 at 1/8 for an epoch, 21 to the third; four at full size for five, two of them for two more, one to the end."""
    table = table_of(parallel(64))
    tenths = (64 + 21 * 2) / 9 / 10
    for policy, cost in (
        (one_epoch(2), 62 / 9 + 2),
        (swept(1), tenths + 1),
        (swept(4), tenths + 4),
        (today, tenths + (2 * 5 + 7 + 9) / 9),
        (Tune(last_look=False), tenths + (2 * 5 + 2 * 9) / 9),
        (Tune(width=1.0, last_look=False), (64 + 21 * 2 + 4 * 6) / 9),  # from the third epoch on, within 3 trainings
    ):
        run = search(table)
        policy(run)
        assert run.spent == pytest.approx(cost)


def test_a_sweep_that_its_rule_plays_is_todays_sweep() -> None:
    table = table_of(np.random.default_rng(0).normal(size=(48, 9)))
    halving = named_rule("halving", (1, 3), 3, "max", TOP_K)
    theirs, ours = search(table), search(table)
    assert played(halving, theirs, 1 / 8, TOP_K) == Tune().sweep(ours)
    assert theirs.spent == pytest.approx(ours.spent)


def test_a_cooldown_is_compared_and_paid_and_leaves_the_training_as_it_was() -> None:
    """By scores as they are the last is the best, after a cooldown the first."""
    table = table_of(parallel(8), branches=((1, 0.5), (5, 0.25)))
    table.cooled[...] = np.arange(8)[:, None, None]
    run = search(table)
    assert run.look_cooled(1 / 8, 3, 1, 0.5) == -3.0
    assert run.spent == pytest.approx(1.5 / 9 / 10)
    assert run.look_cooled(1 / 8, 3, 3, 0.5) == run.look(1 / 8, 3, 3)
    assert Tune(cooldown=0.5).sweep(search(table)) == [0, 1, 2, 3]
    assert Tune(race_cooldown=0.25, by="last weights")(search(table)) == 5  # of 4 to 7, the two first go on
    assert today(search(table)) == 7


def test_ends_decide_or_best_epochs() -> None:
    """The first is ahead early by averaged weights; the last ends best by its own."""
    table = table_of(np.array([[3.0, 3.0, 3.0, 3.0], [4.0, 3.0, 2.0, 1.0]]), max_t=4)
    averaged = table.about.metrics.index("validation_score_ema")
    table.scores[..., averaged] = np.array([[4.0, 0.5, 0.9, 0.9], [4.0, 3.0, 2.0, 1.0]])
    assert today(run := search(table)) == 1
    assert best_epoch(run, 0) == pytest.approx(-0.5)
    assert Tune(by="best epochs")(search(table)) == 0


@pytest.mark.slow
def test_policies_do_what_the_searches_do(tmp_path: Path) -> None:
    """On recorded curves, today's rule and ASHA train the epochs of the live runs and end with their winners."""
    task = replace(load_task("digits", tmp_path), num_samples=9, max_t=4)
    record(task, [1 / 8, 1.0], [0], tmp_path)
    table = load("digits", tmp_path)
    asked: list[tuple[Policy, Any]] = [(today, hydro_rasda), (asha, live_asha)]
    for policy, live in asked:
        run, outcome = search(table), live(task, 0)
        assert policy(run) == outcome.winner
        epochs: dict[tuple[float, int], int] = {}
        for event in outcome.events:
            key = (1.0 if event.full_size else 1 / 8, event.trial)
            epochs[key] = max(event.epoch, epochs.get(key, 0))
        assert run._paid == epochs


def test_what_diverged_is_never_chosen() -> None:
    curves = parallel(8)
    curves[7, 1:] = np.nan
    table = table_of(curves)
    for policy in (today, asha, one_epoch(2), swept(2)):
        assert policy(search(table)) == 6


def test_no_rung_of_todays_rule_lies_before_a_warm_up_is_over() -> None:
    table = table_of(parallel(64))
    configs = [*table.about.configs[1:], {**table.about.configs[0], "warmup_epochs": 7}]
    run = search(replace(table, about=replace(table.about, configs=configs)))
    today(run)
    assert run._paid[1 / 8, 0] == 9
    assert {epochs for (width, _), epochs in run._paid.items() if width == 1} == {9}


def test_truth_is_the_mean_over_seeds_and_better_is_higher() -> None:
    table = table_of(parallel(8))
    table.scores[1, 1, :, -1] += 2.0
    assert truth(table, [0, 1]).tolist() == pytest.approx(-(np.arange(8, 0, -1) + 1.0))
    assert seed_spread(table, [0, 1]) == pytest.approx(np.sqrt(2.0))
    table.scores[1, 0, 3, -1] = np.nan
    assert goodness(table, 1.0)[0, 3, -1] == -np.inf


def test_the_epoch_that_is_kept_is_the_last_that_is_as_good_as_the_best_validation() -> None:
    """Losses; 1 % of what was gained does not count."""
    table = table_of(np.array([[3.0, 1.0, 2.0, 1.015], [np.nan, np.nan, np.nan, np.nan]]), max_t=4, seeds=1)
    test = table.about.metrics.index("test_score_ema")
    table.scores[1, 0, 0, :, test] = [7.0, 8.0, 5.0, 6.0]
    assert goodness(table, 1.0, keep="best")[0, 0].tolist() == pytest.approx([-3.0, -1.0, -1.0, -1.015])
    assert goodness(table, 1.0, "test", keep="best")[0, 0].tolist() == [-7.0, -8.0, -8.0, -6.0]
    assert goodness(table, 1.0, "test", ema=True)[0, 0].tolist() == [-7.0, -8.0, -5.0, -6.0]
    assert (goodness(table, 1.0, keep="best")[0, 1] == -np.inf).all()


def test_tables_keep_the_epoch_that_a_training_does() -> None:
    """Losses; after each epoch of random curves, some of which diverge for a while."""
    curves = np.random.default_rng(0).normal(size=(40, 12)).cumsum(1)
    curves[np.random.default_rng(1).random(curves.shape) < 0.1] = np.nan
    table = table_of(curves, max_t=12, seeds=1)
    found = goodness(table, 1.0, keep="best")[0]
    for number, curve in enumerate(table.curves(1.0, ema=True)[0]):
        for epoch in range(1, 13):
            kept = kept_epoch({at: float(score) for at, score in enumerate(curve[:epoch], 1)}, "min")
            assert found[number, epoch - 1] == (-curve[kept - 1] if kept else -np.inf)
