"""Searchers on a replay table: which configurations they try, and what they learn."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.replay.policies import Search
from benchmarks.replay.searchers import Domains, Searched, distance, domains_of
from benchmarks.replay.table import Table
from hydro_rasda.schedulers import Range
from hydro_rasda.sweep_config import SearcherName
from tests.benchmarks.replay.tables import parallel, search, table_of


def drawn(best_first: bool = False) -> Table:
    """48 configurations with different learning rates; the last one is the best, or the first."""
    curves = parallel(48)[::-1] if best_first else parallel(48)
    generator, table = np.random.default_rng(0), table_of(curves)
    configs = [
        {"optimizer": "sgd", "lr": 10 ** generator.uniform(-4, 0), "momentum": generator.uniform(), "batch_size": size}
        for size in generator.choice([32, 64], 48).tolist()
    ]
    return replace(table, about=replace(table.about, configs=configs))


def tried(name: SearcherName, table: Table) -> list[int]:
    return [number for number, _ in Searched(name).tried(search(table))]


@pytest.mark.parametrize("name", ["random", "qmc", "tpe"])
def test_a_suggestion_counts_as_the_nearest_configuration_that_is_left(name: SearcherName) -> None:
    table = drawn()
    configs, left = table.about.configs, set(range(48))
    domains = domains_of(configs)
    assert domains.keys() == {"lr", "momentum", "batch_size"}
    for number, suggested in Searched(name).tried(search(table)):
        apart = {n: distance(suggested, configs[n], domains) for n in left}
        assert apart[number] == min(apart.values())
        left.remove(number)
    assert len(left) == 24


def test_distances_are_those_of_the_unit_cube() -> None:
    domains: Domains = {"lr": Range(1e-4, 1.0, log=True), "momentum": Range(0.0, 0.5), "batch_size": [32, 64]}
    config = {"lr": 1e-3, "momentum": 0.1, "batch_size": 32}
    assert distance(config, {**config, "lr": 1e-1}, domains) == pytest.approx(0.5)
    assert distance(config, {"lr": 1e-3, "momentum": 0.35, "batch_size": 64}, domains) == pytest.approx(
        math.hypot(0.5, 1)
    )


def test_tpe_learns_from_the_first_rung_and_the_others_do_not() -> None:
    for name in ("random", "qmc", "tpe"):
        there, upside_down = tried(name, drawn()), tried(name, drawn(best_first=True))
        assert there[:10] == upside_down[:10]
        assert (there == upside_down) is (name != "tpe")
        assert tried(name, drawn()) == there


def test_every_half_costs_the_same_and_the_best_of_it_wins() -> None:
    costs = []
    for name in ("random", "qmc", "tpe"):
        run: Search = search(drawn())
        winner = Searched(name)(run)
        assert winner == max(run.numbers)
        costs.append(run.spent)
    assert costs[1:] == pytest.approx(costs[:1] * 2)
