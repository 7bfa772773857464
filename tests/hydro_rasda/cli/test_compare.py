from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hydro_rasda import RaceConfig, load
from hydro_rasda.cli import main
from tests.hydro_rasda.cli.conftest import search


def compared(capsys: pytest.CaptureFixture[str], a: str, b: str) -> dict[str, Any]:
    assert main(["compare", a, b, "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def test_another_search_on_the_same_data(past: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = search(tmp_path, "other", seed=1, num_samples=6)
    told = compared(capsys, past, other)
    results = [load(past), load(other)]
    assert told["asked"] == {"num_samples": [12, 6], "seed": [0, 1]}
    assert told["code and data"] == {}
    assert told["found"]["best val_loss"] == [result.best_metric for result in results]
    assert told["best configuration"]["lr"] == [result.best_config["lr"] for result in results]
    better, worse = sorted(results, key=lambda result: result.best_metric)
    words = f"{better.path.name} is better: val_loss {better.best_metric:.6g} against {worse.best_metric:.6g}"
    assert told["verdict"] == words
    assert compared(capsys, other, past)["verdict"] == words
    assert main(["compare", past, other]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["past", "other"]
    assert lines[-1] == words
    assert "num_samples           12" in " ".join(lines)


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "both reached val_loss "),
        ({"mode": "max"}, "not to be compared: val_loss (min) and val_loss (max)"),
        ({"val_data": "0"}, "not to be compared: val_data differ"),
        ({"journal": ""}, "not to be compared yet: one has no full-size model"),
    ],
)
def test_what_cannot_be_said(
    changes: dict[str, str], verdict: str, past: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(past, copy)
    asked = json.loads((copy / "run.json").read_text())
    asked["mode"] = changes.get("mode", "min")
    asked["digests"]["val_data"] = changes.get("val_data", asked["digests"]["val_data"])
    (copy / "run.json").write_text(json.dumps(asked))
    if "journal" in changes:
        (copy / "journal.jsonl").write_text(changes["journal"])
    assert compared(capsys, past, str(copy))["verdict"].startswith(verdict)


def test_a_higher_score_is_better_where_it_is_maximized(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small: dict[str, Any] = {"mode": "max", "metric": "val_accuracy", "race": RaceConfig(top_k=1)}
    a = search(tmp_path, "a", **small, num_samples=1, max_t=1)
    b = search(tmp_path, "b", **small, num_samples=6, max_t=9)
    assert load(a).best_metric < load(b).best_metric
    assert compared(capsys, a, b)["verdict"].startswith("b is better: val_accuracy ")
