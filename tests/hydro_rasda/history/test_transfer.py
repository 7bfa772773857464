"""The check of the transfer, as the history has it."""

from __future__ import annotations

import math

import pytest

from hydro_rasda import RaceConfig
from hydro_rasda.history.history import History
from hydro_rasda.history.transfer import check_keys, compare_checked
from hydro_rasda.settings.config import TuneConfig


@pytest.mark.parametrize(("top_k", "counted"), [(1, 1), (2, 2), (8, 3)])
@pytest.mark.parametrize(("twice", "tolerance"), [(0.7, 0.2), (1.1, 0.2), (math.nan, 0.0)])
def test_as_many_as_there_are_finalists_count_but_at_most_three(
    top_k: int, counted: int, twice: float, tolerance: float
) -> None:
    """The two trainings of the best configuration tell how much chance there is in a score."""
    history = History(TuneConfig(race=RaceConfig(top_k=top_k)))
    scores = [0.9, 0.8, 0.4, 0.1, 0.6, twice]
    history.checked = {key: score for (key, _), score in zip(check_keys(range(5)), scores, strict=True)}
    found = compare_checked(history, range(5), [0.1, 0.2, 0.3, 0.4, 0.5])
    assert found.top_k == counted
    assert found.tolerance == pytest.approx(tolerance)
    assert found.regret[1] == pytest.approx(0.8)
