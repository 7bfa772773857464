"""The verdict on runs, from their records alone."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from hydro_rasda.records.comparison_of_runs import verdict
from hydro_rasda.settings.config import Mode
from tests.hydro_rasda.records.test_report import RECORD


@pytest.mark.parametrize(
    ("scores", "mode", "told"),
    [
        ((0.3, 0.25), "min", "b is better: val_loss 0.25 against 0.3"),
        ((0.3, 0.25), "max", "a is better: val_loss 0.3 against 0.25"),
        ((0.3, 0.25, 0.4), "min", "b is best: val_loss 0.25 against 0.3 and 0.4"),
        ((0.3, 0.25, 0.4), "max", "c is best: val_loss 0.4 against 0.3 and 0.25"),
        ((0.25, 0.25), "min", "both reached val_loss 0.25"),
        ((0.25, 0.3, 0.25), "min", "the best two reached val_loss 0.25"),
        ((0.25, math.nan, 0.3), "min", "not to be compared yet: one has no full-size model"),
    ],
)
def test_the_best_of_two_or_more_runs_is_named(scores: tuple[float, ...], mode: Mode, told: str) -> None:
    records = [
        replace(RECORD, path=Path("runs") / name, best_metric=score, mode=mode)
        for name, score in zip("abc", scores, strict=False)
    ]
    assert verdict(records, [{"seed": 0}] * len(records)) == told
