from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch import nn

from hydro_rasda import RaceConfig, load
from hydro_rasda.cli import main
from hydro_rasda.cli.output import print_table, size
from hydro_rasda.cli.runs import compare_runs
from hydro_rasda.records.record_from_journal import read_record
from hydro_rasda.run.run_json import run_id
from tests.hydro_rasda.cli.conftest import model_fn, search
from tests.hydro_rasda.conftest import Said
from tests.hydro_rasda.journals import signed


def test_a_run_is_shown_as_it_ended(past: str, said: Said, capsys: pytest.CaptureFixture[str]) -> None:
    shown = said("show", past)
    Console(width=10_000).print(load(past))
    table = capsys.readouterr().out
    plain = [line.rstrip() for line in table.splitlines() if line.strip(" ─")]  # no terminal: neither lines nor padding
    assert shown.splitlines()[: len(plain)] == plain
    texts = [message.text for message in load(past).messages if message.text not in plain]
    assert any("sweep at epoch 1" in text for text in texts)
    assert [line.partition(": ")[2] for line in shown.splitlines()[len(plain) :]] == texts[-8:]
    assert "8 of 12 trials, by val_loss (min)" in shown


def test_a_run_is_told_as_json(past: str, said: Said) -> None:
    told = json.loads(said("show", past, "--json"))
    result = load(past)
    assert [message["text"] for message in told["messages"]] == [message.text for message in result.messages]
    assert (told["path"], told["best_config"], told["best_metric"]) == (past, result.best_config, result.best_metric)
    assert [trial["status"] for trial in told["trials"]] == [record.status for record in result.trials]
    assert told["cost"]["seconds"] == result.cost.seconds
    assert told["state"] == "finished"
    assert "history" not in told["trials"][0]


def test_what_is_not_finished_is_shown_as_such(part: str, said: Said) -> None:
    shown = said("show", part)
    assert "undecided" in shown
    assert "interrupted, or running elsewhere; repeat the call to resume; this is what there is so far" in shown


def test_runs_are_listed_the_last_written_first(past: str, part: str, tmp_path: Path, said: Said) -> None:
    shutil.copytree(past, tmp_path / "whole")
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "run.json").write_text("{}")
    (tmp_path / "nothing").mkdir()
    for name, when in (("whole", 2e9), ("part", 1e9)):
        os.utime(tmp_path / name / "journal.jsonl", (when, when))
    rows = json.loads(said("runs", tmp_path, "--json"))
    assert [row["name"] for row in rows] == ["whole", "part", "strange"]
    assert [row["state"] for row in rows] == ["finished", "interrupted", "not readable"]
    result = load(past)
    assert (rows[0]["best"], rows[0]["trials"], rows[0]["written"]) == (result.best_metric, 12, 2e9)
    *lines, told = said("runs", tmp_path).splitlines()
    assert [line.split()[0] for line in lines] == ["name", "whole", "part", "strange"]
    assert told == "interrupted, or running elsewhere; repeat the call to resume"
    assert said("runs", part).splitlines()[1].startswith("part ")


def test_a_run_that_its_time_budget_ended(tmp_path: Path, said: Said) -> None:
    path = search(tmp_path, "short", time_budget_s=1e-3)
    shown = said("show", path)
    assert "out of time; repeat the call with a larger `time_budget_s` to go on; this is what there is" in shown


def test_before_a_full_size_model_has_a_score_the_best_is_that_of_a_surrogate(part: str, said: Said) -> None:
    record = read_record(part)
    best = record.trials[record.best_trial].sweep_metric
    assert math.isnan(record.best_metric)
    (row,) = json.loads(said("runs", part, "--json"))
    assert (row["best"], row["best_heat"]) == (best, "sweep")
    assert f"{best:.4g} (sweep)" in said("runs", part)


def test_failures_are_counted_and_their_errors_shown(tmp_path: Path, said: Said) -> None:
    def fails_for_sgd(config: dict[str, Any], width_ratio: float = 1.0) -> nn.Module:
        if config["optimizer"] == "sgd":
            raise ValueError("no sgd today")
        return model_fn(config, width_ratio)

    path = search(tmp_path, "failing", build=fails_for_sgd, num_samples=6, max_t=3, seed=1)
    failed = [trial.trial for trial in read_record(path).trials if trial.status == "failed"]
    assert 1 < len(failed) < 6
    assert json.loads(said("runs", tmp_path, "--json"))[0]["failed"] == len(failed)
    shown = said("show", path)
    assert f"\n{len(failed)} of 6 trials failed\n" in shown
    assert f"failed: trial {failed[0]} and {len(failed) - 1} more: ValueError: `model_fn` failed at" in shown
    assert shown.count("no sgd today") == 1


def test_where_there_are_more_errors_it_says_what_to_type(
    past: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a run [1]"
    folder.mkdir()
    (folder / "run.json").write_bytes((Path(past) / "run.json").read_bytes())
    lines: list[dict[str, Any]] = [{"event": "trial", "trial": n, "config": {"lr": 0.1}} for n in range(10)]
    lines += [{"event": "failed", "trial": n, "error": f"ValueError: no {n}"} for n in range(10)]
    lines += [{"event": "unit", "key": "sweep/groups", "value": {}, "seconds": 1, "at": 1, "swept": 1}]
    (folder / "journal.jsonl").write_bytes(signed([{"event": "run", "id": run_id(Path(past))}, *lines]))
    assert main(["show", str(folder)]) == 0
    command = f"hydro-rasda trials '{folder}' -w status=failed --json"
    assert f"2 other errors: {command}\n" in capsys.readouterr().out


@pytest.mark.parametrize("changes", [{"rasda": None}, {"digests": None}, {"digests": [1]}])
def test_a_run_of_which_a_part_is_damaged(
    changes: dict[str, Any], past: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = json.loads((Path(past) / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps(asked | changes))
    assert main(["show", str(tmp_path)]) == 2
    assert "its run.json is damaged, or not that of a run" in capsys.readouterr().err


def test_a_table_is_aligned_and_has_no_ends_of_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["name", "n", "x"], [["a", 1, 0.5], ["long", 12, None], ["b", 3, float("nan")]])
    assert capsys.readouterr().out == "name   n    x\na      1  0.5\nlong  12\nb      3\n"
    print_table(["name", "n"], [["a", "one"], ["b", 12]])
    assert capsys.readouterr().out == "name  n\na     one\nb     12\n"
    print_table(["name", "n"], [["\u4e2d\u6587", 1], ["a", 2]])  # each of the two characters takes two places
    assert capsys.readouterr().out == "name  n\n\u4e2d\u6587  1\na     2\n"


def test_a_folder_of_no_runs(tmp_path: Path, said: Said, capsys: pytest.CaptureFixture[str]) -> None:
    assert said("runs", tmp_path) == f"no run in {tmp_path}\n"
    assert main(["runs", str(tmp_path / "nowhere")]) == 2
    assert "`DIR` is" in capsys.readouterr().err


def test_sizes_in_words() -> None:
    told = [*map(size, (12, 1000, 999_900, 9_031_275, 2_500_000_000_000))]
    assert told == ["12 bytes", "1 kB", "1000 kB", "9.03 MB", "2500 GB"]


def compared(said: Said, a: str, b: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(said("compare", a, b, "--json"))
    return told


def test_a_run_alone_is_not_compared(past: str) -> None:
    with pytest.raises(ValueError, match=f"`PATH` is '{past}', but must be the folders of two runs or more"):
        compare_runs([past], as_json=True)


def test_another_search_on_the_same_data(past: str, tmp_path: Path, said: Said) -> None:
    other = search(tmp_path, "other", seed=1, num_samples=6)
    told = compared(said, past, other)
    results = [load(past), load(other)]
    assert told["asked"] == {"num_samples": [12, 6], "seed": [0, 1]}
    assert told["code and data"] == {}
    assert told["found"]["best val_loss"] == [result.best_metric for result in results]
    assert told["best configuration"]["lr"] == [result.best_config["lr"] for result in results]
    better, worse = sorted(results, key=lambda result: result.best_metric)
    words = f"{better.path.name} is better: val_loss {better.best_metric:.6g} against {worse.best_metric:.6g}"
    assert told["verdict"] == words
    assert compared(said, other, past)["verdict"] == words
    lines = said("compare", past, other).splitlines()
    assert lines[0].split() == ["past", "other"]
    assert lines[-1] == words
    assert "num_samples          12" in " ".join(lines)


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "both reached val_loss "),
        ({"mode": "max"}, "not to be compared: val_loss (min) and val_loss (max)"),
        ({"val_data": "0"}, "not to be compared: val_data differ"),
        ({"metrics": "0"}, "not to be compared: metrics differ"),
        ({"journal": ""}, "not to be compared yet: one has no full-size model"),
    ],
)
def test_what_cannot_be_said(changes: dict[str, str], verdict: str, past: str, tmp_path: Path, said: Said) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(past, copy)
    asked = json.loads((copy / "run.json").read_text())
    asked["mode"] = changes.get("mode", "min")
    asked["digests"] |= {name: changes[name] for name in ("val_data", "metrics") if name in changes}
    (copy / "run.json").write_text(json.dumps(asked))
    if "journal" in changes:
        (copy / "journal.jsonl").write_text(changes["journal"])
    assert compared(said, past, str(copy))["verdict"].startswith(verdict)


def test_a_higher_score_is_better_where_it_is_maximized(tmp_path: Path, said: Said) -> None:
    small: dict[str, Any] = {"mode": "max", "metric": "val_accuracy", "race": RaceConfig(top_k=1)}
    a = search(tmp_path, "a", **small, num_samples=1, max_t=1)
    b = search(tmp_path, "b", **small, num_samples=6, max_t=9)
    assert load(a).best_metric < load(b).best_metric
    assert compared(said, a, b)["verdict"].startswith("b is better: val_accuracy ")
