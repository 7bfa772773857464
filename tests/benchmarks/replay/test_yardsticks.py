"""Both yardsticks, and what either half of the tasks chooses, on tables that were made for it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.replay.__main__ import main
from benchmarks.replay.policies import Search, asha, swept, today
from benchmarks.replay.table import Table, save
from benchmarks.replay.yardsticks import AGAIN, TODAY, Judge, PolicyRow, chosen, halves, mean, races, rows
from tests.benchmarks.replay.tables import parallel, table_of


def apart(configs: int = 16, branches: tuple[tuple[int, float], ...] = ()) -> Table:
    """Seeds lie half a unit apart, configurations a whole one."""
    table = table_of(parallel(configs), branches=branches)
    table.scores[1, 1] += 0.5
    return table


def test_a_policy_that_chooses_what_asha_does_is_no_worse_and_one_that_chooses_the_worst_is() -> None:
    judge = Judge(apart(), resamples=5)
    itself = judge.row(asha, "last")
    assert (itself.reaches, itself.handed, itself.retrained) == (1.0, 1.0, 1.0)
    worst = judge.row(lambda search: min(search.numbers), "last")
    assert (worst.reaches, worst.handed, worst.retrained) == (0.0, 0.0, 0.0)
    assert judge.row(today).quality == 1.0


def test_what_is_handed_back_and_what_is_trained_again_are_two_things() -> None:
    """Averaged weights of the worst configuration test best; trained again, it is what it is."""
    table = apart()
    places = [table.about.metrics.index(f"{split}_score_ema") for split in ("validation", "test")]
    table.scores[1, :, 0][..., places] = -5.0
    judge = Judge(table, resamples=5)

    def first(search: Search) -> int:
        search.look(1.0, 0, search.max_t)
        return 0

    row = judge.row(first, "best")
    assert (row.handed, row.retrained) == (1.0, 0.0)
    assert judge.row(first, "last").handed == 0.0


def test_asha_with_another_seed_is_as_good_as_the_samples_are_alike() -> None:
    """Half of the configurations each: one of the two samples has the best of all, and is no worse than the other."""
    assert 0 < Judge(apart(4), resamples=40).again().retrained < 1
    equal = table_of(np.ones((8, 9)))
    equal.scores[1, 1] += 0.5
    assert Judge(equal, resamples=5).again().retrained == 1.0


def test_each_half_chooses_what_is_best_by_both_and_affordable() -> None:
    found = {
        AGAIN: {"a": PolicyRow(8, 1, 1, 1)},
        "dear": {"a": PolicyRow(9, 1, 1, 1)},
        "handed": {"a": PolicyRow(3, 1, 1, 0.2)},
        "both": {"a": PolicyRow(3, 0, 0.8, 0.8)},
    }
    assert chosen(found, ["dear", "handed", "both"]) == "both"
    found[AGAIN]["spoken_digits"] = PolicyRow(8, 1, 1, 1)
    assert chosen(found, ["dear", "handed", "both"]) == "both"
    assert mean([PolicyRow(1, 0, 0, 1, 2, 4), PolicyRow(3, 1, 0, 0, 4, 5)]) == PolicyRow(2, 0.5, 0, 0.5, 3, 4.5)


def test_halves_are_those_that_chose_and_those_that_did_not() -> None:
    tables = {"digits": apart(), "few_rows": apart(), "one_seed": table_of(parallel(8), seeds=1)}
    assert [[*half] for half in halves(tables)] == [["digits"], ["few_rows"]]
    found = rows({"few_rows": apart(branches=((1, 0.1),))}, {TODAY: today, "Hydro": swept(1)}, resamples=3)
    assert {*found} == {AGAIN, TODAY, "Hydro", f'{TODAY}, `keep="last"`'}


def test_stated_probabilities_are_of_winners() -> None:
    """Where curves never cross, the winner is the best, and nearly certain to be."""
    found = list(races(apart(), resamples=5))
    assert len(found) == 10
    assert all(race.best and race.probability > 0.8 for race in found)


@pytest.mark.slow
def test_the_page_has_what_the_tables_say(tmp_path: Path) -> None:
    for name in ("digits", "few_rows"):
        table = apart(branches=((1, 0.1),))
        table.cooled[...] = table.scores[..., -1, :6][:, :, :, None]
        save(replace(table, about=replace(table.about, task=name)), tmp_path / "tables")
    main(["write", "--folder", str(tmp_path / "tables")])
    page = (tmp_path / "replay.md").read_text()
    assert "The first half chooses" in page
    assert "![Regret by cost of each method](replay.png)" in page
    assert (tmp_path / "replay.png").stat().st_size > 10_000
    assert "| digits | 0.125 | 0 | 16 of 16 |" in page
