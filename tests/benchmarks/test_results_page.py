"""The page of all results is what the result files say."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from benchmarks import results_page
from benchmarks.bench import STEPS, Step, run
from benchmarks.claims.claim import Claim, settled
from benchmarks.result_files import RESULTS
from benchmarks.results_page import PAGE, by_subject, page, render


def test_the_published_page_is_drawn_from_the_published_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """And every source is there."""
    subjects = by_subject(RESULTS)
    monkeypatch.setattr(results_page, "by_subject", lambda folder: subjects)
    assert PAGE.read_text() == render(RESULTS), "run `python -m benchmarks.results_page`"
    assert all(subjects.values())
    for claim in (claim for found in subjects.values() for claim in found):
        assert (RESULTS / claim.source).exists(), claim.source


def test_a_miss_is_a_miss(tmp_path: Path) -> None:
    """The committed throughput, with one case slowed below its target."""
    result = json.loads((RESULTS / "fusion_throughput.json").read_text())
    row = next(row for row in result["rows"] if row["case"] == "mlp" and row["trials"] == 32)
    row["speedup"] = 4.99
    (tmp_path / "fusion_throughput.json").write_text(json.dumps(result))
    slowed = next(claim for claim in by_subject(tmp_path)["Fusion"] if "MLP" in claim.what)
    assert (slowed.measured[:5], slowed.target, slowed.met) == ("4.99x", "5x", False)
    assert "| 5x | **missed** |" in page({"Fusion": [slowed]}, None)
    assert "Missed: 1 of 1 targets." in page({"Fusion": [slowed]}, None)


def test_a_quick_run_has_a_section_of_its_own() -> None:
    claim = Claim("speed", "2x", "", None, "here", "vs_asha.md")
    quick = {
        "date": "2026-01-01",
        "minutes": 9.5,
        "load": 0.1,
        "left_out": ["`vs_asha`, x is missing"],
        "claims": [claim],
    }
    full, short = page({}, json.loads(json.dumps(quick))).split("## Quick run")
    assert "speed" not in full
    assert "| speed | 2x |  |  |" in short
    assert "- vs_asha.md: here" in short
    assert "9.5 minutes" in short
    assert "Left out: `vs_asha`, x is missing." in short
    assert "## Quick run" not in page({"speed": [claim]}, None)


def test_the_summary_counts_each_subject() -> None:
    met, missed, waiting = (Claim("it", text, "2x", met, "here", "a.md") for text, met in _OUTCOMES)
    shown = page({"First: one": [met, missed, met], "Second": [waiting]}, None)
    assert "| [First: one](#first-one) | 2 | 1 | 0 | ■■□ |" in shown
    assert "| [Second](#second) | 0 | 0 | 1 |  |" in shown
    assert "| **all** | 2 | 1 | 1 | |" in shown


_OUTCOMES = (("2x", True), ("1x", False), ("not run", None))


def test_a_machine_is_said_once_for_a_source_that_has_one() -> None:
    one = [Claim("a", "1", "", None, "here, today", "a.md"), Claim("b", "2", "", None, "here, today", "a.md")]
    assert page({"S": one}, None).count("here, today") == 1
    two = [*one, Claim("c", "3", "", None, "there", "a.md")]
    assert "| a | 1 |  |  | here, today |\n| b | 2 |  |  |  |\n| c | 3 |  |  | there |" in page({"S": two}, None)


def test_steps_without_their_data_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = [step for step in STEPS if step.needs]
    assert len(missing) == 3
    assert run(missing, tmp_path, tmp_path) == [
        "`vs_asha`, tinyshakespeare/input.txt is missing",
        "`vs_asha`, cifar10/cifar10_jpeg.npz is missing",
        "`rasda_paper`, lcbench/model.onnx is missing",
    ]
    assert "HYDRO_RASDA_DATA" in capsys.readouterr().out


def test_a_step_writes_where_it_is_told(tmp_path: Path) -> None:
    (tmp_path / "vs_asha").mkdir()
    assert run([Step("vs_asha --render --out {out}/vs_asha")], tmp_path, tmp_path) == []
    assert (tmp_path / "vs_asha.md").read_text().startswith("# `tune` against plain ASHA")


def test_a_command_of_a_page_names_a_benchmark_that_there_is_or_the_commit_at_which_it_was() -> None:
    for path in RESULTS.glob("*.md"):
        text = " ".join(path.read_text().split())
        for found in re.finditer(r"python -m (benchmarks\.\w+)", text):
            before = text[: found.start()].rpartition(". ")[2]
            there = importlib.util.find_spec(found[1]) is not None
            assert there or re.search(r"at commit [0-9a-f]{7}\b", before, re.I), f"{path.name}: {found[0]}"


def test_a_study_that_is_over_has_its_lines(tmp_path: Path) -> None:
    lines = {"a": [["a", "1x", "2x", False, "here", "a.md"]], "b": [["b", "2x", "", None, "", "b.md"]]}
    (tmp_path / "settled.json").write_text(json.dumps(lines))
    assert [claim.what for claim in settled("b", "a")(tmp_path)] == ["b", "a"]
    assert settled("a")(tmp_path / "empty") == settled("c")(tmp_path) == []
