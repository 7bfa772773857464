from __future__ import annotations

import math

import pytest

from hydro_rasda.config import Mode
from hydro_rasda.training.kept_epoch import TOLERANCE, bettered, epochs_since, kept_epoch


@pytest.mark.parametrize(("mode", "sign"), [("min", 1.0), ("max", -1.0)])
@pytest.mark.parametrize("unit", [1.0, 1e-6, 1e6])
@pytest.mark.parametrize("zero", [0.0, -50.0])
def test_the_last_epoch_that_is_as_good_as_the_best_but_for_the_tolerance(
    mode: Mode, sign: float, unit: float, zero: float
) -> None:
    """In which unit a score is, and from which zero it counts, does not matter: the training gains 1 in all."""
    just, more = 0.9 * TOLERANCE, 1.1 * TOLERANCE

    def kept(*losses: float) -> int:
        return kept_epoch({epoch: sign * (zero + unit * loss) for epoch, loss in enumerate(losses, 1)}, mode)

    assert kept(1.0, 0.5, 0.0, just) == 4
    assert kept(1.0, 0.5, 0.0, more) == 3
    assert kept(1.0, 0.0, more, just, more) == 4
    assert kept(1.0, 2.0, 3.0) == 1  # nothing was gained
    assert kept(1.0, 0.5, 0.25, 0.0) == 4


def test_what_is_not_finite_is_never_kept() -> None:
    assert kept_epoch({1: math.nan, 2: 0.5, 3: -math.inf}, "min") == 2
    assert kept_epoch({1: math.nan}, "min") == 0


def test_patience_counts_from_the_best_and_not_from_what_is_kept() -> None:
    best = None
    for epoch, score in enumerate([1.0, 0.0, 0.5 * TOLERANCE, 0.7 * TOLERANCE], 1):
        best = bettered(best, epoch, score, "min", dict)
    assert best is not None
    assert (best["epoch"], best["top_epoch"], epochs_since(best, 4)) == (4, 2, 2)
    assert epochs_since(None, 4) == 0


def test_what_an_earlier_version_kept_goes_on_as_the_best() -> None:
    kept = {"epoch": 3, "score": 0.4, "model": {"old": 1}}
    assert epochs_since(kept, 5) == 2
    worse = bettered(dict(kept), 4, 0.5, "min", dict)
    assert worse is not None
    assert (worse["epoch"], worse["model"]) == (3, {"old": 1})
    better = bettered(dict(kept), 4, 0.3, "min", dict)
    assert better is not None
    assert (better["epoch"], better["score"]) == (4, 0.3)
