"""Values of functions: what a run keeps of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hydro_rasda.packing import job_states
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
