"""Tables of several samples, and what is handed back by them."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.replay.table import goodness, halvings, pooled, sample_folder, samples, save
from tests.benchmarks.replay.tables import parallel, table_of


def test_samples_are_pooled_where_they_are_recorded_alike(tmp_path: Path) -> None:
    save(table_of(parallel(4)), tmp_path)
    save(table_of(parallel(3) - 0.5), sample_folder(1, tmp_path))
    save(table_of(parallel(2), seeds=1), sample_folder(2, tmp_path))
    begun = table_of(parallel(3))
    begun.seconds[1, 1, 2] = np.nan
    save(begun, sample_folder(3, tmp_path))
    assert [*samples(tmp_path)] == [0, 1, 2, 3]
    table = pooled(tmp_path)["digits"]
    assert [round(config["lr"], 1) for config in table.about.configs] == [0.1, 0.2, 0.3, 0.4, 0.1, 0.2, 0.3]
    assert table.recorded.shape == (2, 2, 7)
    assert (-goodness(table, 1.0)[0, :, -1]).tolist() == [4, 3, 2, 1, 2.5, 1.5, 0.5]


def test_a_search_and_another_sample_share_no_configuration() -> None:
    for size in (8, 9):
        for half, rest in halvings(size, 5):
            assert len(half) == len(rest) == size // 2
            assert len({*half.tolist(), *rest.tolist()}) == 2 * (size // 2)


def test_in_the_end_the_better_of_averaged_and_other_weights_is_handed_back() -> None:
    """The first configuration's averages are worse by 1 throughout; before the end they count all the same."""
    table = table_of(parallel(2))
    scores = table.scores.copy()
    scores[:, :, 0, :, [table.about.metrics.index(f"{split}_score_ema") for split in ("validation", "test")]] += 1.0
    table = replace(table, scores=scores)
    own, kept = goodness(table, 1.0, "test"), goodness(table, 1.0, "test", keep="best")
    assert (kept[:, 0, :-1] == own[:, 0, :-1] - 1).all()
    assert (kept[:, 0, -1] == own[:, 0, -1]).all()
    assert (kept[:, 1] == own[:, 1]).all()
