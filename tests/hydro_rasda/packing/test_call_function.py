"""Values of functions: what a run keeps of them."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hydro_rasda.packing import call_function, job_states
from hydro_rasda.packing.call_function import of_array
from hydro_rasda.run.files import read_file
from tests.hydro_rasda.packing.test_pack import packed


def test_numbers_of_numpy_and_torch_come_back_as_numbers(tmp_path: Path) -> None:
    def trained() -> Any:
        import numpy as np

        return {"loss": np.float32(0.5), "array": np.arange(2, dtype=np.int16), np.int64(3): np.True_, (1, 2): None}

    assert packed(tmp_path, [trained]).values == [{"loss": 0.5, "array": [0, 1], "3": True, "(1, 2)": None}]
    assert of_array(torch.tensor(0.5, requires_grad=True)) == 0.5


@pytest.mark.parametrize("value", [np.longdouble(1), np.dtype("int16"), np.float32, torch.ones(1, device="meta"), {1}])
def test_other_values_come_back_as_their_text(value: Any) -> None:
    assert of_array(value) == repr(value)


def test_a_value_that_is_too_large_fails_its_job_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_states, "read_file", lambda file, inside: read_file(file, inside, most=1000))
    jobs = [lambda: "x" * 2000, lambda: 1, lambda: "x" * 2**20]
    result = packed(tmp_path, jobs)
    assert [job.state for job in result.jobs] == ["failed", "complete", "failed"]
    assert result.failed["0"].endswith("has more than 1000 bytes, the most that is read of it")
    assert result.failed["2"].endswith(": write it to a file")
    assert packed(tmp_path, jobs).values == [None, 1, None]


def test_a_value_that_is_nested_too_deep_for_a_journal_fails_its_job_alone(tmp_path: Path) -> None:
    def nested(levels: int) -> Any:
        value: Any = np.ones(2)
        for _ in range(levels):
            value = {"in": [value]}
        return value

    jobs = [partial(nested, 44), partial(nested, 150), partial(abs, -1)]
    for _ in range(2):
        deep, deeper, plain = packed(tmp_path, jobs).jobs
        assert (deep.state, deep.attempt, plain.value) == ("complete", 1, 1)
        assert deeper.error.endswith("ValueError: the value is nested more than 90 levels deep: write it to a file")


def test_a_function_of_the_first_folder_is_found_in_pythons_safe_mode(tmp_path: Path) -> None:
    """Python then puts no folder of a program in front."""
    (tmp_path / "helper.py").write_text("def f(): return 3")
    (tmp_path / "function").write_bytes(b"chelper\nf\n.")
    command = [sys.executable, call_function.__file__, str(tmp_path / "function"), str(tmp_path / "value")]
    for safe in ("", "1"):
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": safe}
        subprocess.run(command, env=environment, check=True)
        assert (tmp_path / "value").read_text() == "3"
