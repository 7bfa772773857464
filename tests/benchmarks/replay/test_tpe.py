"""TPE on a replay table: it trains what is nearest to its proposals, and prunes as ASHA's rungs say."""

import sys
from dataclasses import replace

import numpy as np
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution

from benchmarks.replay.policies import Search
from benchmarks.replay.table import Table
from benchmarks.replay.tpe import STARTUP, TPE, distributions, nearest
from tests.benchmarks.replay.tables import parallel, search, table_of


def bowl(configs: int = 64) -> Table:
    """Scores are a bowl over the logarithm of lr, lowest at 0.1; the first configurations lie far from its ground."""
    rates = np.concatenate([np.logspace(-3, -4, STARTUP), np.logspace(-2.9, 0, configs - STARTUP)])
    table = table_of(np.repeat((np.log10(rates) + 1)[:, None] ** 2, 9, 1))
    numbered = [{"lr": float(rate), "schedule": "cosine", "batch_size": 32} for rate in rates]
    return replace(table, about=replace(table.about, configs=numbered))


def trained(run: Search) -> dict[int, int]:
    return {number: epochs for (_, number), epochs in run._paid.items()}


def test_it_samples_what_configurations_differ_in() -> None:
    low = {"lr": 1e-3, "momentum": 0.5, "batch_size": 64, "schedule": "cosine", "optimizer": "sgd"}
    high = {"lr": 1e-1, "momentum": 0.9, "batch_size": 32, "schedule": "constant", "optimizer": "sgd"}
    assert distributions([low, high]) == {
        "lr": FloatDistribution(1e-3, 1e-1, log=True),
        "momentum": FloatDistribution(0.5, 0.9),
        "batch_size": CategoricalDistribution([32, 64]),
        "schedule": CategoricalDistribution(["constant", "cosine"]),
    }


def test_the_nearest_is_that_on_the_scale_of_sampling() -> None:
    """A tenth of the decades of lr is as far as a tenth of the range of momentum; another choice is farther."""
    space = distributions(
        [{"lr": 1e-3, "momentum": 0.5, "schedule": "cosine"}, {"lr": 1e-1, "momentum": 0.9, "schedule": "constant"}]
    )
    asked = {"lr": 1e-2, "momentum": 0.7, "schedule": "cosine"}
    by_lr = {**asked, "lr": 10**-1.8}
    by_momentum = {**asked, "momentum": 0.7 + 0.09 * 0.4}
    other = {**asked, "schedule": "constant"}
    assert nearest(asked, {4: other, 7: by_lr, 8: by_momentum}, space) == 8
    assert nearest(asked, {4: other, 7: by_lr, 8: {**by_momentum, "momentum": 0.7 + 0.11 * 0.4}}, space) == 7
    assert nearest(asked, {4: other, 7: {**asked, "lr": 1e-3, "momentum": 0.5}}, space) == 7
    assert nearest(asked, {9: asked, 3: asked}, space) == 9


def test_none_begins_once_the_budget_is_spent() -> None:
    """Each is better than those before it, and comes to the end."""
    run = search(table_of(parallel(16)))
    assert TPE(3.5)(run) == 3
    assert run.spent == pytest.approx(4.0)


def test_what_is_behind_at_a_rung_is_pruned_there() -> None:
    """Each is worse than those before it, and stops after an epoch: only what is among the best third goes on."""
    run = search(table_of(parallel(16)[::-1]))
    assert TPE(7.5)(run) == 0
    assert trained(run) == {0: 9, **dict.fromkeys(range(1, 16), 1)}
    assert run.spent == pytest.approx(1 + 15 / 9)


def test_it_brings_in_what_lies_near_the_best() -> None:
    """Few after the first ten; the next in order would have come to a learning rate of 0.003."""
    table = bowl()
    run = search(table)
    winner = TPE(5.0)(run)
    assert 0.05 < table.about.configs[winner]["lr"] < 0.2
    assert len(trained(run)) < 20


def test_the_same_seed_tries_the_same() -> None:
    runs = [search(bowl()) for _ in range(3)]
    for run, seed in zip(runs, (0, 0, 1)):
        TPE(5.0, seed)(run)
    assert runs[0].trained == runs[1].trained != runs[2].trained


def test_what_diverged_is_never_chosen() -> None:
    """The fourth would be the best so far, but is lost at the second rung; the fifth comes to the end."""
    curves = parallel(16)
    curves[3, 1:] = np.nan
    run = search(table_of(curves))
    assert TPE(3.2)(run) == 2
    assert trained(run)[3] == 3
    assert TPE(3.4)(search(table_of(curves))) == 4


def test_without_optuna_it_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r"TPE is replayed by Optuna.*hydro-rasda\[searchers\]"):
        TPE(1.0)(search(table_of(parallel(4))))
