from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks import front, peers, structures
from benchmarks.claims.rules import by_structure, several_metrics
from benchmarks.claims.tune import against_peers
from benchmarks.peers import Scored, handed_back, wins

WHERE = {"cpu": "a CPU", "cores": 2, "torch": "2", "date": "2026-01-01"}


def write(folder: Path, name: str, rows: list[dict]) -> None:
    (folder / name).write_text(json.dumps({"environment": WHERE, "rows": rows}))


def test_the_best_epoch_by_validation_until_then_is_handed_back() -> None:
    epochs = [Scored(1, 0.5, 0.4), Scored(2, math.nan, 0.9), Scored(3, 0.7, 0.6), Scored(4, 0.6, 0.8)]
    assert [handed_back(epochs, at, "max") for at in (0.5, 1, 2.5, 9)] == [None, 0.4, 0.4, 0.6]
    assert handed_back(epochs, 9, "min") == 0.4


@pytest.mark.parametrize(("mode", "won"), [("max", 4), ("min", 2)])
def test_as_good_is_won_and_so_is_a_search_without_a_model(mode: str, won: int) -> None:
    rows = [{"mode": mode, "`tune`": 0.5}] * 4
    assert wins(rows, [None, 0.5, 0.4, 0.3]) == won


def test_claims_of_peers_count_seeds(tmp_path: Path) -> None:
    given = {
        "task": "digits",
        "mode": "max",
        "seconds": 8.0,
        "`tune`": 0.9,
        **{name: [0.8, 0.95] for name in peers.PEERS},
    }
    write(tmp_path, peers.FILE, [{**given, "seed": 0}, {**given, "seed": 1}])
    found = against_peers(tmp_path)
    assert [claim.measured for claim in found] == ["as good or better in 2 of 2 runs; given four times it, in 0"] * len(
        peers.PEERS
    )
    assert all(claim.met for claim in found)
    assert not against_peers(tmp_path / "empty")


def test_a_front_is_met_if_it_is_ahead_of_all(tmp_path: Path) -> None:
    others = [{"method": name, "seed": 0, "cost": 2.0} for name in ("tune", "Optuna, TPE", "Optuna, random")]
    rows = [
        {**row, "budget": b, "volume": v} for b, vs in ((2, (3, 2, 1)), (4, (2, 3, 1))) for row, v in zip(others, vs)
    ]
    write(tmp_path, front.FILE, rows)
    assert [claim.met for claim in several_metrics(tmp_path)] == [True, False]


def test_structures_are_judged_by_the_median_over_seeds(tmp_path: Path) -> None:
    seconds = [(9.0, 3.0, 2.0), (4.0, 4.0, 2.0), (2.0, 1.0, 1.0)]
    rows = [
        {"seed": seed, "way": way, "sweep_seconds": took}
        for seed, of_seed in enumerate(seconds)
        for way, took in zip(structures.WAYS, of_seed)
    ]
    write(tmp_path, structures.FILE, rows)
    (claim,) = by_structure(tmp_path)
    assert claim.measured == "1.50x (1.00 to 2.00), 3 pairs; 2.00x against one after another"
    assert claim.met
