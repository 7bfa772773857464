"""The command line as a whole: exit statuses, pipes, what it imports, and that no run is disturbed by it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.models import CommandInfo

from hydro_rasda import SweepConfig
from hydro_rasda.cli import main
from hydro_rasda.cli.commands_and_exit_status import app
from hydro_rasda.contracts import Event
from hydro_rasda.run.events import RunEnded
from hydro_rasda.run.run_folder import Store
from hydro_rasda.run.run_json import read_asked
from tests.hydro_rasda.cli.conftest import search
from tests.hydro_rasda.conftest import Said
from tests.hydro_rasda.results.test_load import contents

LOOKS = ["show {}", "show {} --json", "trials {} --csv", "best {}", "compare {} {}", "runs {}", "clean {} --json"]
"""All commands that only look, `watch` aside, which has tests of its own."""

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def command_name(command: CommandInfo) -> str:
    assert command.callback is not None
    return str(command.callback.__name__)


def called(command: str, path: str) -> int:
    return main([word.format(path) for word in command.split()])


def test_the_version(said: Said) -> None:
    assert said("--version") == f"hydro-rasda {version('hydro-rasda')}\n"


def test_characters_that_the_output_lacks_are_escaped(past: str, tmp_path: Path) -> None:
    (tmp_path / "ä").symlink_to(past)
    command = [sys.executable, "-m", "hydro_rasda.cli", "best", str(tmp_path / "ä"), "--recipe"]
    ascii_only = {**ENVIRONMENT, "PYTHONIOENCODING": "ascii"}
    shown = subprocess.run(command, env=ascii_only, capture_output=True, text=True, check=True)
    assert "of the run '\\xe4' again" in shown.stdout


def test_without_a_command_it_says_what_there_is(said: Said) -> None:
    assert main([]) == 2
    told = said("--help")
    for command in ("runs", "show", "watch", "trials", "best", "compare", "clean", "simulate"):
        assert f"\n  {command} " in told


def test_the_guide_names_values_of_each_commands_json(past: str, said: Said) -> None:
    more = {
        "runs": [str(Path(past).parent)],
        "best": [past, "--recipe"],
        "clean": [past, "--best-only"],
        "compare": [past, past, "--out", f"{past}.html"],
        "report": [past, "--out", f"{past}.html"],
        "simulate": [past, "--gpus", "4"],
    }
    guide = (ROOT / "docs" / "guides" / "runs.md").read_text()
    table = guide.partition("its JSON |\n|---|---|\n")[2].partition("\n\n")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", table, re.MULTILINE))
    assert rows.keys() == {command_name(each) for each in app.registered_commands}
    for command, text in rows.items():
        if command != "dashboard":  # it serves until it is interrupted
            printed = said(command, *more.get(command, [past]), "--json")
            json.loads(printed)
            for name in re.findall(r"`([a-z_]+)`", text):
                assert name in rows or f'"{name}":' in printed, (command, name)


def test_each_command_prints_json(said: Said) -> None:
    for command in map(command_name, app.registered_commands):
        assert "--json" in said(command, "--help"), command


@pytest.mark.parametrize("command", ["show {}", "trials {}", "best {}", "compare {} {}", "clean {}"])
def test_a_folder_without_a_run(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert called(command, str(tmp_path)) == 2
    captured = capsys.readouterr()
    assert f"hydro-rasda: `path` is '{tmp_path}', but must be a run's folder" in captured.err
    assert captured.out == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments", [["shwo"], ["show"], ["trials", "x", "--limit", "-1"], ["best", "x", "-f", "toml"]]
)
def test_what_is_no_command_of_ours(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "Usage: hydro-rasda" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", ["show {} --json", "trials {} --json", "best {} --json", "compare {} {} --json", "runs {} --json"]
)
def test_json_is_strict(command: str, past: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert called(command, past) == 0

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    json.loads(capsys.readouterr().out, parse_constant=refuse)


@pytest.mark.parametrize("command", LOOKS)
def test_in_a_pipe_lines_are_plain_and_whole(command: str, past: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert called(command, past) == 0
    told = capsys.readouterr().out
    assert "\x1b" not in told
    if command.startswith("trials"):
        assert len(told.splitlines()) == 1 + 12


@pytest.mark.parametrize("command", ["show {}", "trials {} --csv"])
def test_where_nobody_reads_it_ends_without_a_word(command: str, past: str) -> None:
    words = [word.format(past) for word in command.split()]
    script = f"import sys; from hydro_rasda.cli import main; sys.stdin.readline(); sys.exit(main({words!r}))"
    pipe, call = subprocess.PIPE, [sys.executable, "-c", script]
    with subprocess.Popen(call, env=ENVIRONMENT, text=True, stdin=pipe, stdout=pipe, stderr=pipe) as program:
        assert program.stdout is not None
        program.stdout.close()
        assert program.communicate("\n")[1] == ""
    assert program.returncode == 1


@pytest.mark.parametrize(
    "command",
    ["--version", "runs {}", "show {}", "trials {}", "best {}", "compare {} {}", "clean {}", "simulate {} --gpus 8"],
)
def test_nobody_waits_for_torch_or_ray(command: str, past: str) -> None:
    heavy = ["torch", "ray", "pandas", *([] if command.startswith("simulate") else ["numpy"])]
    script = (
        "import sys; from hydro_rasda.cli import main\n"
        f"status = main({[word.format(past) for word in command.split()]!r})\n"
        f"print(status, sorted(set({heavy}) & set(sys.modules)))"
    )
    command_line = [sys.executable, "-c", script]
    told = subprocess.run(command_line, env=ENVIRONMENT, capture_output=True, text=True, check=True).stdout
    assert told.splitlines()[-1] == "0 []"


def test_a_run_that_goes_on_is_not_disturbed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands are called at events of each kind; the folder stays as it is, and the search finds the same."""
    looked: dict[str, set[int]] = {command: set() for command in LOOKS}
    seen: list[str] = []

    def look(event: Event) -> None:
        folder = tmp_path / "watched"
        if isinstance(event, RunEnded) or seen.count(type(event).__name__) > 3:
            return
        seen.append(type(event).__name__)
        before = contents(folder)
        command = LOOKS[len(seen) % len(LOOKS)]
        looked[command].add(called(command, str(folder)))
        assert called("clean {} --yes --json", str(folder)) == 2
        assert contents(folder) == before

    search(tmp_path, "watched", num_samples=6, callbacks=[look], sweep=SweepConfig(fusion=1))
    search(tmp_path, "alone", num_samples=6, sweep=SweepConfig(fusion=1))
    assert "another process is working on the run in" in capsys.readouterr().err
    assert {"EpochEnded", "CheckpointSaved", "RungDecided"} <= {*seen}
    # Before a trial has a score, `best` has no answer.
    assert looked == {command: {0, 1} if command == "best {}" else {0} for command in LOOKS}
    watched, alone = (_found(tmp_path / name) for name in ("watched", "alone"))
    assert watched == alone


def _found(folder: Path) -> list[Any]:
    return sorted(
        json.dumps(line)
        for line in map(json.loads, (folder / "journal.jsonl").read_text().splitlines())
        if line["event"] in ("metrics", "trial")
    )


def test_a_run_that_is_held_says_so(past: str, tmp_path: Path, said: Said) -> None:
    folder = tmp_path / "held"
    with Store.open(folder, read_asked(Path(past)), "auto"):
        states = [json.loads(said("runs", tmp_path, "--json"))[0]["state"] for _ in range(2)]
    assert states == ["running", "running"]
    assert json.loads(said("runs", tmp_path, "--json"))[0]["state"] == "interrupted"
