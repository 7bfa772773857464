from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.answers.tune import against_peers
from benchmarks.peers import Scored, handed_back, wins

PEER = "Optuna, random search"
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


@pytest.mark.parametrize("mode", ["max", "min"])
def test_worse_by_no_more_than_the_margin_counts_too(mode: str) -> None:
    ours, theirs = {"mode": mode, "`tune`": 0.5}, 0.75 if mode == "max" else 0.25
    assert [wins([ours], [theirs], margin) for margin in (0.125, 0.25)] == [0, 1]
    assert not wins([{**ours, "`tune`": None}], [theirs], math.inf)


def test_answers_of_peers_count_seeds(tmp_path: Path) -> None:
    given = {
        "task": "digits",
        "mode": "max",
        "seconds": 8.0,
        "`tune`": 0.9,
        **{name: [0.8, 0.95] for name in peers.PEERS},
    }
    write(tmp_path, peers.FILE, [{**given, "seed": 0}, {**given, "seed": 1}])
    (found,) = against_peers(tmp_path)
    assert [row[1:] for row in found.rows] == [(name, "2 of 2", "2 of 2", "0 of 2") for name in peers.PEERS]
    assert f"in {2 * len(peers.PEERS)} of {2 * len(peers.PEERS)} comparisons" in found.meaning
    assert f"in 0 others. 0 of {len(peers.PEERS)}" in found.meaning
    assert not [*against_peers(tmp_path / "empty")]


def test_a_wide_task_is_compared_with_what_asha_had_at_that_time(tmp_path: Path) -> None:
    cells, own = tmp_path / "vs_asha", {"task": "wide_lstm", "seed": 0, "mode": "min"}
    cells.mkdir()
    events = [
        [1.0, 0, 1, 1, 0.9, 0.8],
        [5.0, 1, 1, 1, None, None],
        [11.0, 1, 1, 2, 0.3, 0.4],
        [39.0, 1, 1, 3, 0.5, 0.1],
    ]
    ours = [[2.0, 0, 0, 1, 0.1, 0.1], [4.0, 0, 1, 1, 0.8, 0.9], [7.0, 1, 1, 1, 0.6, 0.7], [8.0, 2, 1, 1, 0.9, 0.2]]
    # Trained again, the winner of `tune` scores 0.3, and that of ASHA the same: a seed's spread of 0.1.
    for method, wall, seen, test, again in (("asha", 41.0, events, 0.4, 0.4), ("tune", 10.0, ours, 0.5, 0.3)):
        cell = {**own, "method": method, "wall": wall, "events": seen, "settings": {}}
        cell |= {"winner": {"test": test}, "floor": {"test": again}}
        (cells / f"wide_lstm-{method}-0.json").write_text(json.dumps(cell))
    (row,) = peers.of_cells(cells)
    in_hand = {peers.OURS: [None, 0.9, 0.7, 0.5], peers.IN_ONE_PROCESS: [0.8, 0.8, 0.8, 0.8]}
    assert row == {
        **own,
        "seconds": 10.0,
        peers.OURS: 0.5,
        peers.IN_ONE_PROCESS: [0.8, 0.4],
        "in hand": in_hand,
    }
    shown = [cells for _, _, *cells in peers.over_time([row])]
    assert shown == [
        [peers.OURS, "no model", "0.9", "0.7", "0.5"],
        [peers.IN_ONE_PROCESS, "0.8 (0 of 1)", "0.8 (0 of 1)", "0.8 (1 of 1)", "0.8 (1 of 1)"],
    ]
    assert "ASHA, one after another | 0.8 (1 of 1) | 0.4 (0 of 1) |" in peers.markdown(
        {"environment": WHERE, "rows": [row]}
    )
    # A search by Optuna had the time that `tune` took just before it.
    run = {**own, "seconds": 12.0, "`tune`": 0.5, PEER: [0.45]}
    assert f"{PEER} | 0.45 (0 of 1) | not run |" in peers.markdown({"environment": WHERE, "rows": [run, row]})
    write(tmp_path, peers.FILE, [run, row])
    (found,) = against_peers(tmp_path)
    assert [row[2:] for row in found.rows if row[1] == PEER] == [("0 of 1", "1 of 1", "not run")]
    assert found.rows[-1][1] == PEER  # the best first


def test_a_smaller_budget_of_full_trainings_is_compared_apart_with_optuna_alone() -> None:
    whole = {"task": "digits", "seed": 0, "mode": "max", "seconds": 8.0, "`tune`": 0.9, PEER: [0.8, 0.95]}
    brief = {**whole, "full_trainings": 1.0, PEER: [0.92]}
    assert [*peers.compared([whole, brief])] == [(PEER, [whole], [[0.8], [0.95]]), (PEER, [brief], [[0.92]])]
    assert peers.named(brief) == f"{peers.named(whole)}, `full_trainings=1`"
    assert {*peers.missing(brief), PEER} == {*peers.OPTUNA}
    assert "Ray Tune, ASHA" in peers.missing(whole)
