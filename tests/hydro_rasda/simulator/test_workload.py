"""Learning curves as a table."""

from typing import Any

import numpy as np
import pytest

from hydro_rasda.simulator import Workload, power_law


def test_best_leaves_out_what_diverged() -> None:
    scores = np.array([[3.0, 1.0], [2.0, np.nan], [4.0, 2.0]])
    assert Workload(scores, np.ones(3), "min").best(2) == 1.0
    assert Workload(scores, np.ones(3), "max").best(1) == 4.0
    assert np.isnan(Workload(np.full((1, 1), np.nan), np.ones(1)).best(1))


def test_resampling_repeats_only_where_it_must() -> None:
    table = Workload(np.arange(5.0)[:, None], np.arange(1.0, 6.0), "max")
    fewer, more = table.resampled(3, seed=1), table.resampled(12, seed=1)
    assert len(set(fewer.scores[:, 0])) == 3
    counts = np.bincount(more.scores[:, 0].astype(int))
    assert counts.min() == 2
    assert counts.sum() == 12
    assert (more.work == more.scores[:, 0] + 1).all()
    assert (table.resampled(5, 7).scores == table.resampled(5, 7).scores).all()


def test_what_numpy_makes_an_array_of_will_do() -> None:
    table: Any = [[3, 1], [2, 4]]
    work: Any = (1, 2)
    listed = Workload(table, work)
    assert (listed.trials, listed.epochs, listed.best(2)) == (2, 2, 1.0)
    assert listed.scores.dtype == listed.work.dtype == np.float64
    assert listed.resampled(2, seed=0).work.sum() == 3


def test_power_law_without_noise_falls_and_is_of_its_seed() -> None:
    curves = power_law(20, 30, seed=3, noise=0.0)
    assert (np.diff(curves.scores, axis=1) < 0).all()
    assert (curves.scores > 0.1).all()
    assert (curves.scores == power_law(20, 30, seed=3, noise=0.0).scores).all()
    assert (curves.scores != power_law(20, 30, seed=4, noise=0.0).scores).any()
    assert (curves.work == 1.0).all()


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"`scores` has shape \(3,\), but must be \[trials, epochs\]"):
        Workload(np.ones(3), np.ones(3))
    with pytest.raises(ValueError, match=r"`work` has shape \(2,\), but must be \(3,\)"):
        Workload(np.ones((3, 1)), np.ones(2))
    with pytest.raises(ValueError, match=r"`work` is \[0\. 0\. 0\.\], but must be finite and > 0"):
        Workload(np.ones((3, 1)), np.zeros(3))
    with pytest.raises(ValueError, match=r"`work` is \[ 1\. inf\], but must be finite and > 0"):
        Workload(np.ones((2, 1)), np.array([1.0, np.inf]))
    for epoch in (0, 2):
        with pytest.raises(ValueError, match=rf"`t` is {epoch}, but must be an epoch from 1 to 1"):
            Workload(np.ones((3, 1)), np.ones(3)).best(epoch)
    ragged: Any = [[1.0, 2.0], [3.0]]
    with pytest.raises(ValueError, match=r"`scores` is \[\[1.0, 2.0\], \[3.0\]\], but must be an array of numbers"):
        Workload(ragged, np.ones(2))
    with pytest.raises(ValueError, match=r"`trials` is 0, but must be an integer from 1 to"):
        power_law(0, 1, 0)
