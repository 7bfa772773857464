"""Few configurations: what each policy pays, by hand."""

import numpy as np
import pytest

from benchmarks.replay.few import COUNTS, page
from tests.benchmarks.replay.tables import parallel, table_of


def test_of_four_the_sweep_decides_nothing_and_is_paid() -> None:
    """All four race, with their surrogates, which cost a tenth, for one epoch of nine, and without."""
    table = table_of(parallel(16))
    table.scores[...] += np.random.default_rng(0).normal(0, 0.01, table.scores.shape)
    _, _, head, _, four, *more = page({"digits": table}, resamples=5).splitlines()
    assert len(more) == len(COUNTS) - 1
    count, narrow, lost, wide, _, raced, lost_too, asha, _ = (float(cell) for cell in four.split("|")[1:-1])
    assert (head.count("|"), count) == (four.count("|"), 4)
    assert narrow - raced == pytest.approx(4 * 0.1 / 9, abs=0.01)
    assert lost == lost_too
    assert max(narrow, wide) < asha


def test_tables_of_one_seed_have_no_rows() -> None:
    assert page({"one": table_of(parallel(16), seeds=1)}) == ""
