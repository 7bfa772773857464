from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.replay.horizons import SHARES, chosen, measured
from benchmarks.replay.record import record
from benchmarks.replay.table import Split, load
from benchmarks.replay.truth import Floats
from hydro_rasda.config import TuneConfig
from tests.benchmarks.replay.test_record import digits


@pytest.mark.parametrize(("sign", "more_is_better"), [(1.0, True), (-1.0, False)])
def test_the_epoch_that_validated_best_counts_by_its_better_weights(sign: float, more_is_better: bool) -> None:
    """One configuration, three epochs; its own weights, and two averages."""
    validation = sign * np.array([[[1.0, 2.0, 0.0], [3.0, 1.0, np.nan], [2.0, 4.0, 2.5]]])
    test = np.arange(9.0).reshape(1, 3, 3)
    found, tested = chosen(validation, test, more_is_better)
    assert (sign * found).tolist() == [[3.0, 4.0, 3.0]]
    assert tested.tolist() == [[3.0, 7.0, 3.0]]


def test_training_again_gives_what_the_table_has(tmp_path: Path) -> None:
    """For own weights, and for the average over the share of steps that the table was recorded with."""
    task = digits(trials=2)
    record(task, [1.0], [0], tmp_path)
    table = load("digits", tmp_path)
    validation, test, more_is_better = measured(task, table)
    assert more_is_better
    for place, ema in ((0, False), (1 + SHARES.index(TuneConfig.ema), True)):
        splits: tuple[tuple[Split, Floats], ...] = (("validation", validation), ("test", test))
        for split, scores in splits:
            known = table.curves(1.0, split, ema=ema)[0]
            np.testing.assert_allclose(sorted(scores[..., place].tolist()), sorted(known.tolist()), atol=1e-3)
