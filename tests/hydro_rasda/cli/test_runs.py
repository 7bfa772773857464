from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from hydro_rasda import load
from hydro_rasda.cli import main
from hydro_rasda.cli.output import print_table, size
from tests.hydro_rasda.cli.conftest import search


def test_a_run_is_shown_as_it_ended(past: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", past]) == 0
    shown = capsys.readouterr().out
    Console(width=10_000).print(load(past))
    table = capsys.readouterr().out
    assert shown.startswith(table)
    said = [message.text for message in load(past).messages]
    assert any("surrogates at epoch 1" in text for text in said)
    assert [line.partition(": ")[2] for line in shown.removeprefix(table).splitlines()] == said[-8:]
    assert "8 of 12 trials, by val_loss (min)" in shown


def test_a_run_is_told_as_json(past: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", past, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    result = load(past)
    assert [message["text"] for message in told["messages"]] == [message.text for message in result.messages]
    assert (told["path"], told["best_config"], told["best_metric"]) == (past, result.best_config, result.best_metric)
    assert [trial["status"] for trial in told["trials"]] == [record.status for record in result.trials]
    assert told["cost"]["seconds"] == result.cost.seconds
    assert told["state"] == "finished"
    assert "history" not in told["trials"][0]


def test_what_is_not_finished_is_shown_as_such(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", part]) == 0
    shown = capsys.readouterr().out
    assert "undecided" in shown
    assert "not finished: this is what there is so far" in shown


def test_runs_are_listed_the_last_written_first(
    past: str, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(past, tmp_path / "whole")
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "run.json").write_text("{}")
    (tmp_path / "nothing").mkdir()
    for name, when in (("whole", 2e9), ("part", 1e9)):
        os.utime(tmp_path / name / "journal.jsonl", (when, when))
    assert main(["runs", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == ["whole", "part", "strange"]
    assert [row["state"] for row in rows] == ["finished", "not finished", "not readable"]
    result = load(past)
    assert (rows[0]["best"], rows[0]["trials"], rows[0]["written"]) == (result.best_metric, 12, 2e9)
    assert main(["runs", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["name", "whole", "part", "strange"]
    assert main(["runs", part]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("part ")


def test_a_run_that_its_time_budget_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = search(tmp_path, "short", time_budget_s=1e-3)
    assert main(["show", path]) == 0
    assert "out of time: this is what there is so far" in capsys.readouterr().out


def test_a_table_is_aligned_and_has_no_ends_of_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["name", "n", "x"], [["a", 1, 0.5], ["long", 12, None], ["b", 3, float("nan")]])
    assert capsys.readouterr().out == "name   n    x\na      1  0.5\nlong  12\nb      3\n"
    print_table(["name", "n"], [["a", "one"], ["b", 12]])
    assert capsys.readouterr().out == "name  n\na     one\nb     12\n"


def test_a_folder_of_no_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no run in {tmp_path}\n"
    assert main(["runs", str(tmp_path / "nowhere")]) == 2
    assert "`DIR` is" in capsys.readouterr().err


def test_sizes_in_words() -> None:
    assert [*map(size, (12, 1000, 9_031_275, 2_500_000_000))] == ["12 bytes", "1 kB", "9.03 MB", "2.5 GB"]
