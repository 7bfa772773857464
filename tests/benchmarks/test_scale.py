"""Each row of the table of sizes measures what it says, here at sizes that take no time."""

import json
import math
from pathlib import Path

import pytest

from benchmarks import scale
from benchmarks.result_files import RESULTS
from benchmarks.virtual_cluster import engine


@pytest.mark.slow
def test_a_trace_for_each_model_is_counted() -> None:
    assert scale.traces(2)["traces"] >= 1


def test_small_rows_give_their_numbers() -> None:
    assert scale.dispatch(32, repeats=1)["ms"] > 0
    assert scale.scheduler(20)["s"] > 0
    assert scale.simulator(8, 16, 8, repeats=1)["us"] > 0
    assert scale.fold(200, (1, 3, 9), 20, 5, repeats=1)["s of CPU"] > 0
    assert min(scale.resume(4, 2, repeats=1).values()) > 0


def test_devices_of_a_cluster_die_and_no_trial_is_lost() -> None:
    found = engine(1000, 50)
    assert found["deaths"] > 0
    assert 0 < found["ms"] < math.inf


def test_ranks_share_a_data_set() -> None:
    assert scale.examples_read(4, 64) == {"times": 1.0}


def test_a_row_is_measured_and_the_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = scale.Measure("things", lambda: {"ms": 7.0, "else": 1.0}, "ms")
    monkeypatch.setattr(scale, "ROWS", {"a": row, "b": row, "c": row})
    was = {"number": 8.0, "date": "2026-01-01", "load": 0.1}
    (tmp_path / "scale.json").write_text(json.dumps({"before": {"a": was}, "now": {"a": was}}))
    scale.main(["b", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "scale.json").read_text())
    assert {column: list(result[column]) for column in ("before", "now")} == {"before": ["a"], "now": ["a", "b"]}
    table = (tmp_path / "scale.md").read_text()
    assert "| `a` | things | 8 ms | 8 ms | 2026-01-01" in table
    assert "| `b` | things | - | 7 ms | " in table
    with pytest.raises(SystemExit):
        scale.main(["unknown"])


def test_the_published_table_is_drawn_from_the_published_numbers() -> None:
    assert (RESULTS / "scale.md").read_text() == scale.markdown(json.loads((RESULTS / scale.FILE).read_text()))
