"""Real learning curves, where their data and onnxruntime are at hand."""

import numpy as np
import pytest

from benchmarks.rasda_settings import LCBENCH, lcbench, lcbench_tasks


@pytest.fixture(autouse=True)
def _data() -> None:
    pytest.importorskip("onnxruntime", reason="LCBench is an ONNX model, and onnxruntime is not installed")
    if not (LCBENCH / "model.onnx").exists():
        pytest.skip(f"no LCBench in {LCBENCH}; HYDRO_RASDA_DATA names the folder above it")


def test_curves_learn() -> None:
    curves = lcbench(lcbench_tasks()[0], trials=40, seed=0)
    assert curves.scores.shape == (40, 52)
    assert curves.mode == "min"
    assert np.isfinite(curves.scores).all()
    assert np.median(curves.scores[:, 51]) < np.median(curves.scores[:, 0])
    assert np.median(curves.work) == pytest.approx(1.0)
    # Batches of 16 to 512 and up to 1,024 units: an epoch's time differs by far more than noise.
    assert curves.work.max() > 3 * curves.work.min()


def test_a_seed_and_a_task_determine_them() -> None:
    first, second = lcbench_tasks()[:2]
    assert len(lcbench_tasks()) == 34
    assert (lcbench(first, 5, seed=1).scores == lcbench(first, 5, seed=1).scores).all()
    assert (lcbench(first, 5, seed=1).scores != lcbench(first, 5, seed=2).scores).any()
    assert (lcbench(first, 5, seed=1).scores != lcbench(second, 5, seed=1).scores).any()
