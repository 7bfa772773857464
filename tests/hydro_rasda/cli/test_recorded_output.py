"""What the commands print of runs that are a closed form, against recorded lines: none changes unnoticed.

After a change that you mean, record all anew: `python -m tests.hydro_rasda.cli.test_recorded_output`. Then read the
difference.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import tempfile
from pathlib import Path

import pytest

from hydro_rasda.cli import main, output, runs, watch
from hydro_rasda.records.record_from_journal import read_record
from hydro_rasda.records.report import as_html, closing_lines
from tests.hydro_rasda.journals import write_run

RECORDED = Path(__file__).parent / "recorded_output.txt"

COMMANDS = """
runs .
runs . --json
show over
show over --json
show interrupted
show failed
trials over
trials over --csv
trials interrupted --where "lr<0.01" --sort dropout --reverse
trials over --limit 2 --json
best over
best over --format python
best over --json
best interrupted
best over --trial 5
best failed
compare over interrupted
compare over interrupted --json
watch over
watch interrupted
watch interrupted --json
simulate over --gpus 8 --seeds 2 --epoch-seconds 60
simulate over --gpus 8 --seeds 2 --within 20m --rule rasda --rule asha --parameters 1000000 --epoch-seconds 60
clean over --json
notebook over
notebook failed
closing over
closing interrupted
closing failed
"""

WRITTEN = 1e9
"""Seconds since 1970 at which the journals were written, and 100 less than now."""


class Time:
    time = staticmethod(lambda: WRITTEN + 100)
    strftime = staticmethod(lambda form: "12:00:00")


CLOCK = watch.Clock(now=lambda: 0.0, today=Time.time, sleep=lambda seconds: None)


def write_runs(folder: Path) -> None:
    write_run(folder / "over", num_samples=12)
    write_run(folder / "interrupted", num_samples=9, rungs=2, fails=lambda number: False)
    write_run(folder / "failed", num_samples=3, rungs=1, fails=lambda number: True)
    for place, name in enumerate(("over", "interrupted", "failed")):
        os.utime(folder / name / "journal.jsonl", (WRITTEN + place, WRITTEN + place))


def printed(command: str, folder: Path) -> str:
    """The lines of a command in the folder of the runs, and its status where that is not 0; numbers to ten digits."""
    name, *arguments = shlex.split(command)
    out, status = io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        patch.chdir(folder)
        for module in (output, runs, watch):
            patch.setattr(module, "time", Time)
        if name in ("notebook", "closing"):
            found = read_record(Path(*arguments))
            print(as_html(found) if name == "notebook" else "\n".join(closing_lines(found, "PATH")))
        else:
            patch.setattr(watch, "Clock", lambda: CLOCK)
            status = main([name, *arguments])
    text = out.getvalue().replace(str(folder.resolve()), "FOLDER").rstrip("\n")
    text = re.sub(r"\d+\.\d{11,}", lambda number: f"{float(number[0]):.10g}", text)
    return f"{text}\n" + (f"[status {status}]\n" if status else "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("recorded")
    write_runs(found)
    return found


@pytest.mark.parametrize("command", COMMANDS.strip().splitlines())
def test_lines_are_as_recorded(command: str, folder: Path) -> None:
    told = dict(re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", RECORDED.read_text(), re.MULTILINE))
    assert printed(command, folder) == told[command]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as there:
        write_runs(Path(there))
        told = [f"$ {command}\n{printed(command, Path(there))}" for command in COMMANDS.strip().splitlines()]
    RECORDED.write_text("".join(told))
