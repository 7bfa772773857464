from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from safetensors.torch import load_file

from hydro_rasda import SweepConfig, choice, load, loguniform, uniform
from hydro_rasda.cli import main
from hydro_rasda.cli.trials import filtered, sorted_by, written
from hydro_rasda.records.record_from_journal import read_record
from hydro_rasda.records.report import explained
from tests.hydro_rasda.cli.conftest import model_fn, search
from tests.hydro_rasda.conftest import Said


def numbers(said: Said, past: str, *options: str) -> list[int]:
    return [row["trial"] for row in json.loads(said("trials", past, "--json", *options))]


def test_csv_is_the_dataframe(past: str, said: Said) -> None:
    read = pd.read_csv(io.StringIO(said("trials", past, "--csv", "--sort", "trial")))
    pd.testing.assert_frame_equal(read, load(past).dataframe(), check_dtype=False)


def test_json_has_whole_records(past: str, said: Said) -> None:
    told = json.loads(said("trials", past, "--json", "--sort", "trial"))
    for row, record in zip(told, load(past).trials, strict=True):
        assert (row["config"], row["status"]) == (record.config, record.status)
        assert row["metric"] == (record.metric if math.isfinite(record.metric) else None)


def test_filters_and_order_are_those_of_pandas(past: str, said: Said) -> None:
    frame = load(past).dataframe()
    small = frame[(frame["config/lr"] < 0.1) & (frame["config/optimizer"] == "sgd")].sort_values("config/lr")
    assert len(small) > 1
    options = ("--where", "lr<0.1", "--where", "optimizer = sgd", "--sort", "lr")
    assert numbers(said, past, *options) == [*small.trial]
    assert numbers(said, past, *options, "--reverse", "--limit", "1") == [*small.trial][::-1][:1]
    full = frame.sort_values("metric", ascending=False, na_position="last")
    found = numbers(said, past, "--sort", "metric", "--reverse")
    assert found[: full.metric.notna().sum()] == [*full.trial[full.metric.notna()]]
    assert numbers(said, past)[0] == load(past).best_trial
    assert numbers(said, past, "-w", "metric>=0") == numbers(said, past, "-w", "metric!=null")


ROWS: list[dict[str, Any]] = [
    {"trial": 0, "config/a": 1, "config/b": None},
    {"trial": 1, "config/a": "x", "config/b": True},
    {"trial": 2, "config/a": 0.5},
]


@pytest.mark.parametrize(
    ("condition", "kept"),
    [
        ("a<=1", [0, 2]),
        ("a=x", [1]),
        ("a != x", [0, 2]),
        ("config/a==1", [0]),
        ("a>0.5", [0]),
        ("b=true", [1]),
        ("b=null", [0, 2]),
        ('a="x"', [1]),
        ("b=True", [1]),
        ("b!=True", [0, 2]),
        ("a=.5", [2]),
        ("a<=.5", [2]),
        ("a=+1.", [0]),
    ],
)
def test_conditions(condition: str, kept: list[int]) -> None:
    assert [row["trial"] for row in filtered(ROWS, ["trial", "config/a", "config/b"], [condition])] == kept


def test_numbers_come_before_words_and_what_is_missing_last() -> None:
    assert [row["trial"] for row in sorted_by(ROWS, "config/a", False)] == [2, 0, 1]
    assert [row["trial"] for row in sorted_by(ROWS, "config/a", True)] == [1, 0, 2]
    assert [row["trial"] for row in sorted_by(ROWS, "config/b", True)] == [1, 0, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--where", "lr"], "`--where` is 'lr', but must be a column, one of < <= > >= = == !=, and a value"),
        (["--where", "lr<<3"], "`--where` is 'lr<<3', but must be a column, <, and a number"),
        (["--where", "lr<x"], "`--where` is 'lr<x', but must be a column, <, and a number"),
        (["--where", "rate<1"], "`--where` is 'rate', but must be one of ['trial', 'status',"),
        (["--sort", "rate"], "`--sort` is 'rate', but must be one of ['trial', 'status',"),
        (["--csv", "--json"], "`--csv` is True, but must be left out where --json is given"),
    ],
)
def test_bad_input(past: str, capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    assert main(["trials", past, *options]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_people_see_what_differs(past: str, said: Said) -> None:
    lines = said("trials", past, "--where", "optimizer=sgd").splitlines()
    numbers = ["trial", "status", "sweep", "epochs", "race", "epochs"]
    assert lines[0].split() == [*numbers, "lr", "optimizer", "batch_size"]
    assert all(line == line.rstrip() for line in lines)
    assert len(said("trials", past, "--where", "lr>10").splitlines()) == 1


def test_the_columns_do_not_depend_on_how_many_rows_are_shown(tmp_path: Path, said: Said) -> None:
    space = {"lr": loguniform(1e-3, 0.1), "optimizer": choice(["sgd", "adamw"]), "momentum": uniform(0.5, 0.9)}
    path = search(tmp_path, "one", space=space | {"batch_size": 64}, num_samples=6, max_t=3)
    *rows, alike = said("trials", path).splitlines()
    *first, same = said("trials", path, "--limit", "1").splitlines()
    assert first[0].split() == rows[0].split()
    assert first[0].split()[-3:] == ["lr", "optimizer", "momentum"]
    assert alike == same == "in all trials: batch_size=64"
    for trial in read_record(path).trials:
        reads = trial.config["optimizer"] == "sgd"
        assert ("momentum" in trial.used, trial.unread) == (reads, () if reads else ("momentum",))
        (row,) = (row for row in rows if row.split()[0] == str(trial.trial))
        assert (f"{trial.config['momentum']:.4g}" in row) == reads


def test_each_form_reads_back_as_the_best_configuration(
    past: str, said: Said, capsys: pytest.CaptureFixture[str]
) -> None:
    best = load(past).best_config
    told = said("best", past)
    assert yaml.safe_load(told) == best
    assert told.startswith(f"# trial {load(past).best_trial} of past: val_loss ")
    assert json.loads(said("best", past, "--json")) == best
    assert main(["best", past, "--format", "python"]) == 0
    names: dict[str, object] = {}
    exec(capsys.readouterr().out, names)
    assert names["config"] == best


def test_infinities_and_nan_read_back_from_yaml_and_python() -> None:
    """In JSON, which has no such numbers, they are null."""
    config = {"clip": math.inf, "net": {"low": [-math.inf, 0.5]}, "size": (3, math.nan), "text": "inf", "cls": dict}
    names: dict[str, Any] = {}
    exec(written(config, "python", "best"), names)
    assert repr(names["config"]) == repr(config | {"cls": "dict"})
    assert repr(yaml.safe_load(written(config, "yaml", "best"))) == repr(
        config | {"size": [3, math.nan], "cls": "dict"}
    )
    read = json.loads(written(config, "json", "best"))
    assert (read["clip"], read["net"], read["size"]) == (None, {"low": [None, 0.5]}, [3, None])


def test_another_trial(past: str, said: Said, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(said("best", past, "--trial", "0", "--json")) == load(past).trials[0].config
    assert main(["best", past, "--trial", "12"]) == 2
    assert "`--trial` is 12, but must be >= 0 and < 12" in capsys.readouterr().err


def test_the_model_is_written(past: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["best", past, "--export", str(tmp_path / "new"), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == json.loads((tmp_path / "new" / "config.json").read_text())
    assert captured.err == f"wrote {tmp_path / 'new'}\n"
    model_fn({}).load_state_dict(load_file(tmp_path / "new" / "model.safetensors"))


def test_the_first_of_several_seeds_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked: dict[str, Any] = {"sweep": SweepConfig(repeats=2), "full_trainings": 6.0, "max_t": 1, "num_samples": 2}
    path = search(tmp_path, "seeds", **asked)
    assert load(path).over == "2 seeds"
    assert main(["best", path, "--export", str(tmp_path / "new")]) == 0
    load(path).save_model(tmp_path / "same")
    new, same = (load_file(tmp_path / name / "model.safetensors") for name in ("new", "same"))
    assert new.keys() == same.keys()
    assert all(torch.equal(new[name], same[name]) for name in same)


def test_words_of_any_language_are_printed_as_they_are() -> None:
    told = written({"длина": "größe"}, "yaml", "")
    assert "длина: größe" in told
    assert yaml.safe_load(told) == {"длина": "größe"}


def test_the_recipe_is_printed(past: str, said: Said) -> None:
    assert said("best", past, "--recipe") == load(past).recipe()
    other = next(trial.trial for trial in load(past).trials if trial.epochs and trial.trial != load(past).best_trial)
    assert said("best", past, "--recipe", "--trial", other) == load(past).recipe(other)
    assert json.loads(said("best", past, "--recipe", "--json")) == {
        "trial": load(past).best_trial,
        "recipe": load(past).recipe(),
    }


def test_a_model_that_is_not_there(part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["best", part]) == 0
    capsys.readouterr()
    assert main(["best", part, "--export", str(tmp_path / "new")]) == 2
    captured = capsys.readouterr()
    assert "has trained at full size, so that there is no model yet" in captured.err
    assert captured.out == ""
    assert main(["best", part, "--recipe"]) == 2
    assert "has trained at full size, so that there is no model yet" in capsys.readouterr().err


def test_before_any_trial_has_a_score(part: str, said: Said, capsys: pytest.CaptureFixture[str]) -> None:
    (Path(part) / "journal.jsonl").write_text("")
    assert main(["best", part]) == 1
    captured = capsys.readouterr()
    assert captured.err == f"hydro-rasda: no trial of the run in {part} has a score yet\n"
    assert captured.out == ""
    assert said("show", part) == f"no trial has begun\n{explained('interrupted')}; this is what there is so far\n"
