"""Policies on a replay table: they find and pay what the searches that they stand for do."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm, rankdata, spearmanr
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF

from benchmarks.replay.__main__ import main
from benchmarks.replay.calibration import apart, look
from benchmarks.replay.guided import NOISE, Guided, features, normal_ranks, predicted
from benchmarks.replay.policies import (
    Policy,
    asha,
    halved,
    one_epoch,
    race,
    swept,
    today,
)
from benchmarks.replay.recall import losses, recall, spearman
from benchmarks.replay.record import record
from benchmarks.replay.shares import Rule, telescoped
from benchmarks.replay.study import POLICIES, replay
from benchmarks.replay.table import load, save, widened
from benchmarks.replay.truth import Keep, after_each_epoch, goodness, seed_spread, truth
from benchmarks.tasks.load import load_task
from benchmarks.vs_asha.methods import asha as live_asha
from benchmarks.vs_asha.methods import hydro_rasda
from tests.benchmarks.replay.tables import parallel, search, table_of


@pytest.mark.parametrize("policy", [name for name in POLICIES if not {"all", "random", "TPE,"} & {*name.split()}])
def test_where_curves_never_cross_every_policy_finds_the_best(policy: str) -> None:
    assert POLICIES[policy](search(table_of(parallel(64)))) == 63


def test_a_policy_pays_for_the_epochs_that_it_looks_at() -> None:
    """64 at 1/8 for an epoch, 21 to the third; four at full size for one, then the one."""
    table = table_of(parallel(64))
    tenths = (64 + 21 * 2) / 9 / 10
    for policy, cost in (
        (one_epoch(2), 62 / 9 + 2),
        (swept(1), tenths + 1),
        (swept(4), tenths + 4),
        (today, tenths + (3 * 1 + 9) / 9),
        (halved, tenths + (3 * 1 + 9) / 9),
    ):
        run = search(table)
        policy(run)
        assert run.spent == pytest.approx(cost)


@pytest.mark.slow
def test_policies_do_what_the_searches_do(tmp_path: Path) -> None:
    """On recorded curves, today's rule and ASHA train the epochs of the live runs and end with their winners."""
    task = replace(load_task("digits", tmp_path), num_samples=9, max_t=4)
    record(task, [1 / 8, 1.0], [0], tmp_path)
    table = load("digits", tmp_path)
    asked: list[tuple[Policy, Any, Keep]] = [(today, hydro_rasda, "best"), (asha, live_asha, "last")]
    for policy, live, keep in asked:
        run, outcome = search(table, keep), live(task, 0)
        assert policy(run) == outcome.winner
        epochs: dict[tuple[float, int], int] = {}
        for event in outcome.events:
            key = (1.0 if event.full_size else 1 / 8, event.trial)
            epochs[key] = max(event.epoch, epochs.get(key, 0))
        assert run._paid == epochs


def test_a_rule_tries_its_share_and_drops_its_shares() -> None:
    """16 of 64 to the third epoch, 6 of them to the ninth, 2 to the end; with them a quarter of the width for 8."""
    table = table_of(parallel(64))
    run = search(table)
    assert Rule(1 / 8, 1 / 4, ((1 / 3, 1 / 3), (1.0, 1.0)), 2)(run) == 15
    assert run.spent == pytest.approx((16 * 3 + 6 * 6) / 9 / 10 + 2)
    run = search(widened(table, [1 / 4], [], {}))
    run.tables.curves[1 / 4, False] = run.tables.curves[1 / 8, False]
    run.tables.costs[1 / 4] = 0.2 / 9
    assert telescoped(1)(run) == 63
    assert run.spent == pytest.approx((64 * 3 + 43 * 6) / 9 / 10 + 8 * 0.2 + 1)


def test_a_model_of_scores_brings_in_what_nobody_has_tried() -> None:
    """Scores are a bowl over the logarithm of lr; the first eighth lies far from its ground."""
    rates = np.concatenate([np.logspace(-4, -3, 8), np.logspace(-2.9, 0, 56)])
    curves = np.repeat((np.log10(rates) + 1)[:, None] ** 2, 9, 1)
    table = table_of(curves)
    configs = [{"lr": float(rate), "schedule": "cosine", "batch_size": 32} for rate in rates]
    table = replace(table, about=replace(table.about, configs=configs))
    without, with_model = search(table), search(table)
    rungs = ((1.0, 1.0),)
    assert Rule(1 / 8, 1 / 8, rungs, 1)(without) == 7
    winner = Guided(1 / 8, 1 / 8, (4, 4, 4, 4), rungs, 1)(with_model)
    assert abs(np.log10(rates[winner]) + 1) < 0.3
    assert with_model.spent == pytest.approx((8 + 16) / 10 + 1)
    assert Guided(1 / 8, 1 / 2, (64,), rungs, 1)(search(table)) == int(np.argmin(curves[:, -1]))


def test_a_model_learns_that_early_ranks_say_much() -> None:
    """Only they tell the configurations apart: the best after one epoch join, and then those that rank next."""
    curves = parallel(32)[::-1]
    run = search(table_of(curves[np.random.default_rng(0).permutation(32)]))
    scores = {n: run.look(1 / 8, n, 1) for n in run.numbers}
    assert Guided(1 / 8, 1 / 8, (8,), ((1.0, 1.0),), 1, early=4)(run) == max(scores, key=lambda n: scores[n])
    long = {n for (width, n), epochs in run._paid.items() if width < 1 and epochs == 9}
    best = sorted(run.numbers, key=lambda n: -scores[n])
    assert len(long) == 16
    assert {*best[:8]} <= long


def test_the_model_is_scikit_learns_gaussian_process() -> None:
    generator = np.random.default_rng(0)
    known, values, asked = generator.normal(size=(12, 3)), generator.normal(size=12), generator.normal(size=(5, 3))
    oracle = GaussianProcessRegressor(RBF(1.0), alpha=NOISE**2, optimizer=None).fit(known, values)
    np.testing.assert_allclose(predicted(known, values, asked), oracle.predict(asked))


def test_ranks_become_blom_scores() -> None:
    values = [3.0, 1.0, 1.0, 7.0]
    np.testing.assert_allclose(normal_ranks(values), norm.ppf((rankdata(values) - 0.375) / 4.25))


def test_configurations_that_differ_in_nothing_lie_at_one_place() -> None:
    config = {"lr": 0.1, "momentum": 0.9, "schedule": "cosine", "batch_size": 32}
    rows = features([config, config, {**config, "schedule": "constant"}])
    assert np.isfinite(rows).all()
    assert (rows[0] == rows[1]).all()
    assert np.linalg.norm(rows[0] - rows[2]) == pytest.approx(1.0)


def test_the_race_expects_what_surrogates_did_later() -> None:
    """Behind at full size after half of the training, but its surrogate gained the most from there on."""
    curves = np.array([[3.0, 2.0, 2.0, 2.0], [4.0, 3.0, 2.0, 1.0], [5.0, 5.0, 5.0, 5.0], [5.0, 5.0, 5.0, 5.0]])
    table = table_of(curves, max_t=4)
    run = search(table)
    for n in range(4):
        run.look(1 / 8, n, 4)
    assert race(run, [0, 1, 2, 3], full_trainings=0) == 1
    assert race(run, [0, 1, 2, 3], full_trainings=0, prior=False) == 0
    assert race(search(table), [0, 1, 2, 3], full_trainings=0) == 0


def test_what_diverged_is_never_chosen() -> None:
    curves = parallel(8)
    curves[7, 1:] = np.nan
    table = table_of(curves)
    for policy in (today, asha, one_epoch(2), swept(2)):
        assert policy(search(table)) == 6


def test_recall_knows_perfect_and_reversed_ranks() -> None:
    table = table_of(parallel(16))
    table.scores[1, 1] += 0.5
    found = recall(table, 1 / 8, 9)
    assert found.rho == pytest.approx(1.0)
    assert (found.best, found.regret, found.rank) == ((1.0, 1.0, 1.0), 0.0, 1.0)
    table.scores[0] *= -1
    found = recall(table, 1 / 8, 9)
    assert found.rho == pytest.approx(-1.0)
    assert (found.best, found.rank) == ((0.0, 0.0, 1.0), 16.0)
    # The best of the four worst of 8 of 16 is on average far behind; one standard deviation is 0.5 / sqrt(2).
    assert found.regret > 4 / (0.5 / np.sqrt(2))


def test_one_seed_is_ranked_against_its_own_end() -> None:
    found = recall(table_of(parallel(16), seeds=1), 1.0, 3)
    assert found.rho == pytest.approx(1.0)
    assert found.best == (1.0, 1.0, 1.0)
    assert np.isnan(found.regret)


def test_it_is_told_at_which_rung_the_best_falls() -> None:
    curves = parallel(64)
    assert losses(table_of(curves)) == {0: pytest.approx(1.0), 1: 0.0, 3: 0.0}
    curves = np.where(np.arange(9) < 2, -curves, curves)
    table = table_of(curves)
    assert losses(table)[1] == pytest.approx(1.0)
    table.about.configs[0] = {**table.about.configs[0], "warmup_epochs": 2}
    assert losses(table) == {0: pytest.approx(1.0), 3: 0.0}


def test_rank_correlation_is_scipys() -> None:
    values = np.random.default_rng(0).integers(0, 5, (2, 30)).astype(float)
    assert spearman(*values) == pytest.approx(spearmanr(*values).statistic)


def test_truth_is_the_mean_over_seeds_and_better_is_higher() -> None:
    table = table_of(parallel(8))
    table.scores[1, 1, :, -1] += 2.0
    assert truth(table, [0, 1]).tolist() == pytest.approx(-(np.arange(8, 0, -1) + 1.0))
    assert seed_spread(table, [0, 1]) == pytest.approx(np.sqrt(2.0))
    table.scores[1, 0, 3, -1] = np.nan
    assert goodness(table, 1.0)[0, 3, -1] == -np.inf


def test_the_best_epoch_so_far_is_that_of_validation() -> None:
    """Losses; the test score is the one of the epoch that validated best, the first where two did."""
    table = table_of(np.array([[3.0, 1.0, 2.0, 1.0], [np.nan, np.nan, np.nan, np.nan]]), max_t=4, seeds=1)
    test = table.about.metrics.index("test_score_ema")
    table.scores[1, 0, 0, :, test] = [7.0, 8.0, 5.0, 6.0]
    assert goodness(table, 1.0, keep="best")[0, 0].tolist() == [-3.0, -1.0, -1.0, -1.0]
    assert goodness(table, 1.0, "test", keep="best")[0, 0].tolist() == [-7.0, -8.0, -8.0, -8.0]
    assert goodness(table, 1.0, "test", ema=True)[0, 0].tolist() == [-7.0, -8.0, -5.0, -6.0]
    assert (goodness(table, 1.0, keep="best")[0, 1] == -np.inf).all()


def test_averaged_weights_count_at_full_width() -> None:
    """Losses; whichever of an epoch's two count, their test score does."""
    table = table_of(np.array([[3.0, 2.0, 4.0]]), max_t=3, seeds=1)
    places = {name: i for i, name in enumerate(table.about.metrics)}
    for width in (0, 1):
        table.scores[width, 0, 0, :, places["validation_score_ema"]] = [2.5, 2.0, 1.0]
        table.scores[width, 0, 0, :, places["test_score"]] = [7.0, 6.0, 8.0]
        table.scores[width, 0, 0, :, places["test_score_ema"]] = [5.0, 9.0, 4.0]
    assert after_each_epoch(table, 1.0, keep="best")[0, 0].tolist() == [-2.5, -2.0, -1.0]
    assert goodness(table, 1.0, "test", keep="best")[0, 0].tolist() == [-5.0, -9.0, -4.0]
    assert goodness(table, 1.0, "test", keep="better")[0, 0].tolist() == [-5.0, -6.0, -4.0]
    assert goodness(table, 1.0, keep="own")[0, 0].tolist() == [-3.0, -2.0, -2.0]
    assert goodness(table, 1 / 8, keep="best")[0, 0].tolist() == [-3.0, -2.0, -2.0]
    assert goodness(table, 1.0, keep="last")[0, 0].tolist() == [-3.0, -2.0, -4.0]


def test_no_rung_of_todays_rule_lies_before_a_warm_up_is_over() -> None:
    table = table_of(parallel(64))
    configs = [*table.about.configs[1:], {**table.about.configs[0], "warmup_epochs": 4}]
    run = search(replace(table, about=replace(table.about, configs=configs)))
    today(run)
    assert run._paid[1 / 8, 0] == 9
    assert {epochs for (width, _), epochs in run._paid.items() if width == 1} == {4, 9}


def test_what_a_surrogate_changes_by_is_foreseen_in_full_or_in_part() -> None:
    """Where curves at full size are those of the surrogates, by all of the change; where they are half, by half."""
    generator = np.random.default_rng(0)
    table = table_of(parallel(16) + generator.normal(size=(16, 9)))
    table.scores[1, 1] += 0.5
    found = look(table, 1 / 3)
    assert (found.change, found.share, found.shared) == pytest.approx((0.0, 1.0, 0.0), abs=1e-4)
    assert found.alone > 1
    assert apart(table)[1] == pytest.approx(0.0, abs=1e-4)
    table.scores[1] = table.scores[1] / 2
    found = look(table, 1 / 3)
    assert (found.share, found.shared) == pytest.approx((0.5, 0.0), abs=1e-4)
    assert found.change > found.shared


def test_policies_are_compared_on_the_same_runs() -> None:
    """The best surrogate alone, where surrogates rank the other way, is behind ASHA's winner by the test's spread."""
    table = table_of(parallel(16))
    table.scores[0] *= -1
    table.scores[1, 1] += 0.5
    found = replay(table, {"ASHA": asha, "Hydro": swept(1)})
    assert (found["ASHA"].regret == 0).all()
    assert (found["Hydro"].regret > 4).all()
    assert np.array_equal(found["ASHA"].test - found["Hydro"].test, found["Hydro"].regret)
    assert (found["Hydro"].cost < found["ASHA"].cost).all()


def test_the_commands_print_what_the_tables_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = table_of(parallel(16))
    table.scores[1, 1] += 0.5
    save(table, tmp_path / "tables")
    monkeypatch.setattr("benchmarks.replay.family.rules", lambda widths: iter([Rule(1 / 8, 1.0, ((1.0, 1.0),), 1)]))
    monkeypatch.setattr("benchmarks.replay.family.guided", lambda width: iter([]))
    for command in ("recall", "policies", "foresight", "frontier"):
        main([command, "--folder", str(tmp_path / "tables")])
        told = capsys.readouterr().out
        assert "digits" in told
    main(["write", "--folder", str(tmp_path / "tables")])
    page = (tmp_path / "replay.md").read_text()
    assert page.count("## Policies") == 2
    assert "![Regret by cost of each method](replay.png)" in page
    assert (tmp_path / "replay.png").stat().st_size > 10_000
    assert "| today |" in page
    assert "| digits | 0.125 | 0 | 16 of 16 |" in page
