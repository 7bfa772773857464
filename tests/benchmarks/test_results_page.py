"""The page of all results is what the result files say."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from benchmarks import results_page
from benchmarks.answers.answer import Answer, machines_of, settled
from benchmarks.answers.held_out import held_out
from benchmarks.bench import STEPS, Bench, run
from benchmarks.result_files import RESULTS
from benchmarks.results_page import PAGE, answers, page, render


def sections(text: str) -> list[str]:
    """The page in parts, each of which begins with its question; the links to them are left out."""
    return text.split("\n\n## ")[1:]


def test_the_published_page_is_drawn_from_the_published_files_but_for_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replays of recorded trainings alone take most of the time of the whole page."""
    quick = [author for author in results_page.AUTHORS if author is not held_out]
    monkeypatch.setattr(results_page, "AUTHORS", quick)
    drawn, published = sections(render(RESULTS)), sections(PAGE.read_text())
    assert [part for part in published if part in drawn] == drawn, "run `python -m benchmarks.results_page`"
    assert len(published) == len(drawn) + 3


@pytest.mark.slow
def test_the_published_page_is_drawn_from_the_published_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every source is there, every author answers, and no question is asked twice."""
    found = answers(RESULTS)
    monkeypatch.setattr(results_page, "answers", lambda folder: found)
    assert PAGE.read_text() == render(RESULTS), "run `python -m benchmarks.results_page`"
    assert len({answer.question for answer in found}) == len(found)
    for answer in found:
        assert all((RESULTS / source).exists() for source in answer.sources), answer.sources
        assert {len(row) for row in answer.rows} == {len(answer.columns)}, answer.question
        assert answer.question.endswith("?")
        assert answer.meaning.endswith(".")


ALONE = ("bubbles", "fusion_cuda", "fusion_throughput", "packing", "peers", "rasda_live", "rasda_paper")


@pytest.mark.parametrize("name", [*ALONE, "ray_overhead", "scale", "settled", "transfer_digits"])
def test_a_result_file_answers_alone(name: str, tmp_path: Path) -> None:
    """As in the short version, which has some of them."""
    (tmp_path / f"{name}.json").write_bytes((RESULTS / f"{name}.json").read_bytes())
    found = answers(tmp_path)
    assert found
    assert all(f"## {answer.question}\n" in PAGE.read_text() for answer in found)


def test_settled_studies_are_all_asked_for() -> None:
    studies = json.loads((RESULTS / "settled.json").read_text())
    shown = {answer.question for author in results_page.AUTHORS for answer in author(RESULTS.parent / "none")}
    assert shown == set()  # a folder without files answers nothing
    published = PAGE.read_text()
    assert all(f"## {study['question']}\n" in published for study in studies.values())


def test_a_loss_is_said_and_comes_last(tmp_path: Path) -> None:
    """The committed throughput, with its fastest case slowed below all others."""
    result = json.loads((RESULTS / "fusion_throughput.json").read_text())
    row = max((row for row in result["rows"] if row["trials"] == 32), key=lambda row: row["speedup"])
    row["speedup"] = 0.5
    (tmp_path / "fusion_throughput.json").write_text(json.dumps(result))
    (slowed,) = answers(tmp_path)
    assert slowed.rows[-1][1].startswith("0.50x")
    assert "0.5 to " in slowed.meaning


def test_an_answer_is_a_heading_a_sentence_a_table_and_its_sources() -> None:
    one = Answer("Is it fast?", "It is.", ("a", "b"), [("1", "2")], ["x.md", "y.md"], "here, today")
    shown = page([one], "results", ["rasda_beyond.png"])
    assert "- [Is it fast?](#is-it-fast)\n" in shown
    assert "## Is it fast?\n\nIt is.\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n" in shown
    assert "*From [x.md](results/x.md), [y.md](results/y.md). Measured: here, today.*" in shown
    assert "](results/rasda_beyond.png)" in shown
    assert "*From [x.md](./x.md), [y.md](./y.md).*" in page([one._replace(where="")], ".")


def test_each_machine_is_named_once_with_the_first_and_the_last_day() -> None:
    days = [{"cpu": "x", "cores": 2, "date": date} for date in ("2026-01-03 05:00 UTC", "2026-01-01", "2026-01-02")]
    assert machines_of(days) == "x, 2 cores; 2026-01-01 to 2026-01-03"
    assert machines_of([days[1], {**days[1], "cpu": "y"}]) == "x or y, 2 cores; 2026-01-01"
    assert machines_of([days[1], {**days[1], "cpu": "y"}]) == "x or y, 2 cores; 2026-01-01"
    assert machines_of([*days[1:2], {**days[1], "gpu": "a GPU"}]) == "x, 2 cores; x, 2 cores, a GPU; 2026-01-01"


def test_steps_without_their_data_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = [step for step in STEPS if step.needs]
    assert len(missing) == 3
    assert run(missing, tmp_path, tmp_path) == [
        "`vs_asha`, tinyshakespeare/input.txt is missing",
        "`vs_asha`, cifar10/cifar10_jpeg.npz is missing",
        "`rasda_paper`, lcbench/model.onnx is missing",
    ]
    assert "HYDRO_RASDA_DATA" in capsys.readouterr().out


@pytest.mark.slow
def test_a_step_writes_where_it_is_told(tmp_path: Path) -> None:
    (tmp_path / "vs_asha").mkdir()
    assert run([Bench("vs_asha --render --out {out}/vs_asha")], tmp_path, tmp_path) == []
    assert (tmp_path / "vs_asha.md").read_text().startswith("# `tune` against plain ASHA")


def test_a_command_of_a_page_names_a_benchmark_that_there_is_or_the_commit_at_which_it_was() -> None:
    for path in RESULTS.glob("*.md"):
        text = " ".join(path.read_text().split())
        for found in re.finditer(r"python -m (benchmarks\.\w+)", text):
            before = text[: found.start()].rpartition(". ")[2]
            there = importlib.util.find_spec(found[1]) is not None
            assert there or re.search(r"at commit [0-9a-f]{7}\b", before, re.I), f"{path.name}: {found[0]}"


def test_a_study_that_is_over_has_its_answer(tmp_path: Path) -> None:
    one = {"question": "Q?", "meaning": "M.", "columns": ["c"], "rows": [["1"]], "sources": ["a.md"], "where": "here"}
    (tmp_path / "settled.json").write_text(json.dumps({"a": one, "b": {**one, "question": "R?"}}))
    assert [answer.question for answer in settled("b", "a")(tmp_path)] == ["R?", "Q?"]
    assert settled("a")(tmp_path / "empty") == settled("c")(tmp_path) == []
