"""Each row of the table of sizes measures what it says, here at sizes that take no time."""

import json
from pathlib import Path

import pytest

from benchmarks import scale, scale_rows
from benchmarks.result_files import RESULTS


def test_a_script_is_measured_from_its_beginning_to_its_end() -> None:
    """Its children included."""
    spin = "import time\nwhile time.process_time() < 0.5: pass"
    assert scale_rows._cpu_of(spin) >= 0.5
    assert scale_rows._cpu_of(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spin!r}])") >= 0.5
    assert "tune(" in scale_rows.first_program()


@pytest.mark.slow
def test_a_trace_for_each_model_is_counted() -> None:
    assert scale_rows.traces(2)["traces"] >= 1


def test_small_rows_give_their_numbers() -> None:
    assert scale_rows.dispatch(32, repeats=1)["ms"] > 0
    assert scale_rows.scheduler(20)["s"] > 0
    assert scale_rows.simulator(8, 16, 8, repeats=1)["us"] > 0
    assert min(scale_rows.resume(4, 2, repeats=1).values()) > 0


def test_ranks_share_a_data_set() -> None:
    assert scale_rows.examples_read(4, 64) == {"times": 1.0}


def test_a_row_is_measured_and_the_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = scale.Row("things", lambda: {"ms": 7.0, "else": 1.0}, "ms", 5)
    monkeypatch.setattr(scale, "ROWS", {"a": row, "b": row._replace(more=True), "c": row._replace(target=None)})
    scale.main(["a", "--before", "--out", str(tmp_path)])
    scale.main(["b", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "scale.json").read_text())
    assert {column: list(result[column]) for column in ("before", "now")} == {"before": ["a"], "now": ["b"]}
    table = (tmp_path / "scale.md").read_text()
    assert "| `a` | things | 7 ms | - | 5 ms |  |" in table
    assert "| `b` | things | - | 7 ms | 5 ms | met |" in table
    with pytest.raises(SystemExit):
        scale.main(["unknown"])


def test_the_published_table_is_drawn_from_the_published_numbers() -> None:
    assert (RESULTS / "scale.md").read_text() == scale.markdown(json.loads((RESULTS / scale.FILE).read_text()))
