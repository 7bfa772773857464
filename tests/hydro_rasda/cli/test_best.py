from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from hydro_rasda import load
from hydro_rasda.cli import main
from hydro_rasda.results.report import explained
from tests.hydro_rasda.cli.conftest import model_fn


def test_each_form_reads_back_as_the_best_configuration(past: str, capsys: pytest.CaptureFixture[str]) -> None:
    best = load(past).best_config
    assert main(["best", past]) == 0
    told = capsys.readouterr().out
    assert yaml.safe_load(told) == best
    assert told.startswith(f"# trial {load(past).best_trial} of past: val_loss ")
    assert main(["best", past, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == best
    assert main(["best", past, "--format", "python"]) == 0
    names: dict[str, object] = {}
    exec(capsys.readouterr().out, names)
    assert names["config"] == best


def test_another_trial(past: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["best", past, "--trial", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == load(past).trials[0].config
    assert main(["best", past, "--trial", "12"]) == 2
    assert "`--trial` is 12, but must be >= 0 and < 12" in capsys.readouterr().err


def test_the_model_is_written(past: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["best", past, "--export", str(tmp_path / "new"), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == json.loads((tmp_path / "new" / "config.json").read_text())
    assert captured.err == f"wrote {tmp_path / 'new'}\n"
    model_fn({}).load_state_dict(load_file(tmp_path / "new" / "model.safetensors"))


def test_the_recipe_is_printed(past: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["best", past, "--recipe"]) == 0
    assert capsys.readouterr().out == load(past).recipe()
    other = next(trial.trial for trial in load(past).trials if trial.epochs and trial.trial != load(past).best_trial)
    assert main(["best", past, "--recipe", "--trial", str(other)]) == 0
    assert capsys.readouterr().out == load(past).recipe(other)


def test_a_model_that_is_not_there(part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["best", part]) == 0
    capsys.readouterr()
    assert main(["best", part, "--export", str(tmp_path / "new")]) == 2
    captured = capsys.readouterr()
    assert "must be one of the finalists" in captured.err
    assert captured.out == ""
    assert main(["best", part, "--recipe"]) == 2
    assert "must be one of the finalists" in capsys.readouterr().err


def test_before_any_trial_has_a_score(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    (Path(part) / "journal.jsonl").write_text("")
    assert main(["best", part]) == 1
    captured = capsys.readouterr()
    assert captured.err == f"hydro-rasda: no trial of the run in {part} has a score yet\n"
    assert captured.out == ""
    assert main(["show", part]) == 0
    assert capsys.readouterr().out == f"no trial has begun\n{explained('interrupted')}; this is what there is so far\n"
