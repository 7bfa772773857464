"""Policies replayed in the searches that were run live."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.replay.live import Agreement, agreement_with_live, agreements, page, replayed, setups
from benchmarks.replay.policies import asha, at_random
from benchmarks.replay.table import About, Table, empty, load, sample_folder, save
from tests.benchmarks.replay.tables import parallel, table_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Tables of two live searches, with seeds 0 and 3, in both of which ASHA ended with the second best."""
    tables = tmp_path / "replay"
    save(table_of(parallel(9)), tables)
    save(of_seed(3, table_of(parallel(9))), sample_folder(3, tables))
    (tmp_path / "vs_asha").mkdir()
    for seed in (0, 3, 4):
        second = {"trial": 7, "test": 2.0, "score": 2.0}
        told = {"winner": second, "floor": {"test": 2.0 + 2**0.5 / 2}, "events": [[1.0, 7, 1, 9, 2.0, 2.0]]}
        cell = {"task": "digits", "method": "ray_asha", "mode": "min", "seed": seed, "settings": {}, **told}
        (tmp_path / "vs_asha" / f"digits-ray_asha-{seed}.json").write_text(json.dumps(cell))
    return tables


def of_seed(seed: int, table: Table) -> Table:
    about: dict[str, Any] = {**vars(table.about), "seeds": [seed]}
    alone = empty(About(**about))
    alone.scores[...], alone.seconds[...] = table.scores[:, :1], table.seconds[:, :1]
    return alone


def test_each_search_has_its_own_table_seed_and_target(folder: Path) -> None:
    found = setups(folder)
    assert [(setup.task, setup.seed) for setup in found] == [("digits", 0), ("digits", 3)]
    assert [(setup.validation, setup.test) for setup in found] == [(-2.0, -2.0)] * 2
    assert found[0].margin == pytest.approx(0.5)


def test_a_winner_is_compared_with_ashas_by_both_scores(folder: Path) -> None:
    (_, setup) = setups(folder)
    best, third = replayed(setup, asha), replayed(setup, at_random(7))
    assert (best.winner, best.reached) == (8, True)
    assert best.test == pytest.approx((2.0 - 1.0) / 0.5)
    assert (third.winner, third.reached) == (6, False)
    assert third.cost == pytest.approx(7.0)
    assert third.test == pytest.approx((2.0 - 3.0) / 0.5)


def test_rows_count_searches(folder: Path) -> None:
    *_, row = page(setups(folder), {"seven": at_random(7)}).splitlines()
    assert [cell.strip() for cell in row.split("|")[1:-1]] == ["seven", "7.00", "0 of 2", "0 of 2", "0 of 2"]


def test_live_runs_are_compared_with_their_replay(folder: Path) -> None:
    """Live, `tune` comes to ASHA's 2.0 with seed 0 alone; replayed, the best does with both, seven at random do not."""
    nobody = agreement_with_live(asha, folder)
    assert nobody == Agreement(0, 0, 0, 0)
    cells = folder.parent / "vs_asha"
    for seed, score in ((0, 1.9), (3, 2.1)):
        cell = json.loads((cells / f"digits-ray_asha-{seed}.json").read_text())
        cell |= {"method": "tune", "events": [[1.0, 8, 1, 1, score, score]]}
        (cells / f"digits-tune-{seed}.json").write_text(json.dumps(cell))
    assert agreement_with_live(asha, folder) == Agreement(2, 1, 1, 2)
    assert agreement_with_live(at_random(7), folder) == Agreement(2, 1, 1, 0)


def test_what_runs_would_have_said_of_their_surrogates_is_counted(folder: Path) -> None:
    """Both widths rank alike in one of the two; in the other, full size ranks the other way."""
    assert "agree in 2 of 2, disagree in 0, too few to tell in 0" in agreements(setups(folder))
    table = load("digits", folder)
    table.scores[1] = table.scores[1, :, ::-1]
    save(table, folder)
    assert "agree in 1 of 2, disagree in 1, too few to tell in 0" in agreements(setups(folder))
    assert agreements([]) == ""


def test_what_is_not_recorded_at_both_widths_is_left_out(folder: Path) -> None:
    table = load("digits", sample_folder(3, folder))
    table.seconds[1, 0, 5] = np.nan
    save(table, sample_folder(3, folder))
    assert [setup.seed for setup in setups(folder)] == [0]
