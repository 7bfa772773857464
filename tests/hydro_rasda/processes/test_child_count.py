from __future__ import annotations

import sqlite3
import sys
import threading
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hydro_rasda.data.can_be_pickled import can_be_pickled
from hydro_rasda.problem.problem import Problem
from hydro_rasda.processes.child_count import ONE_PROCESS, most_children, usable_children

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="processes that have computed are forked on Linux alone"
)


def test_children_are_torch_threads_on_a_cpu(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        on_a_cpu = 0 if torch.accelerator.is_available() else 3
        assert most_children(torch.device("cpu")) == on_a_cpu
        assert most_children(torch.device("cuda")) == 0
        with open(__file__) as file:
            assert usable_children(replace(problem, model_fn=lambda config: file)) == 0  # type: ignore[arg-type,return-value]
        assert usable_children(problem) == on_a_cpu
        monkeypatch.setenv(ONE_PROCESS, "1")
        assert usable_children(problem) == 0
    finally:
        torch.set_num_threads(before)


def test_what_can_be_pickled_is_found_out_without_a_copy(tmp_path: Path) -> None:
    large = {"tensor": torch.zeros(2**26), "array": np.zeros(2**25)}
    tracemalloc.start()
    assert can_be_pickled(lambda: large["tensor"])
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    with open(tmp_path / "data", "wb") as file:
        assert not can_be_pickled(lambda: file.name)
    assert not can_be_pickled(sqlite3.connect(tmp_path / "database"))
    assert not can_be_pickled([threading.Lock()])
    with open(tmp_path / "data") as file:
        assert not can_be_pickled(file), "a copy would be read on its own"
