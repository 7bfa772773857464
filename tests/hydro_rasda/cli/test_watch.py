"""A run watched: what is seen when, and that nothing is touched. A clock of the tests' own stands for time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from hydro_rasda import SweepConfig, load
from hydro_rasda.cli import main, watch
from hydro_rasda.cli.watch import Clock, watch_run
from hydro_rasda.common.console import make_console
from hydro_rasda.contracts import Event
from hydro_rasda.run.events import RunEnded
from tests.hydro_rasda.cli.conftest import search
from tests.hydro_rasda.conftest import Said
from tests.hydro_rasda.results.test_load import contents


class Growing:
    """A folder in which a run that is over happens again: more of its journal is there each time someone waits."""

    def __init__(self, past: str, folder: Path, steps: int, seconds: float = 20.0) -> None:
        self.folder, self.past, self.seconds, self.now, self.waited = folder, Path(past), seconds, 0.0, 0
        lines = (self.past / "journal.jsonl").read_bytes().splitlines(keepends=True)
        self._parts = [b"".join(lines[: len(lines) * i // steps]) for i in range(steps + 1)]
        self._steps = self._happen()

    def clock(self) -> Clock:
        return Clock(now=lambda: self.now, sleep=self._sleep)

    def _sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += self.seconds
        self.waited += 1
        next(self._steps)

    def _happen(self) -> Iterator[None]:
        yield
        self.folder.mkdir()
        yield
        shutil.copy(self.past / "run.json", self.folder)
        yield
        for part in self._parts:
            # A line may be half written at any time.
            (self.folder / "journal.jsonl").write_bytes(part + b'{"event"')
            yield
            yield
        raise AssertionError("it is over, and still someone waits")


@pytest.fixture
def growing(past: str, tmp_path: Path) -> Growing:
    return Growing(past, tmp_path / "run", steps=40)


def test_json_tells_each_change_to_the_end(growing: Growing, past: str, capsys: pytest.CaptureFixture[str]) -> None:
    watch_run(str(growing.folder), True, growing.clock())
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(told) > 20
    assert all(a != b for a, b in pairwise(told))
    result = load(past)
    assert {each["state"] for each in told[:-1]} == {"interrupted"}
    assert (told[-1]["state"], told[-1]["best"]) == ("finished", result.best_metric)
    reached = [record.sweep_epochs for record in result.trials]
    counts = {str(stop): sum(epochs >= stop for epochs in reached) for stop in sorted(set(reached))}
    assert told[-1]["rungs"]["sweep"] == counts
    assert growing.waited == 2 + 2 * 40 + 2


def test_without_a_terminal_there_is_at_most_one_line_in_a_minute(
    growing: Growing, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[tuple[float, str]] = []
    console = make_console()

    def note(text: object, markup: bool = True, soft_wrap: bool = False) -> None:
        if isinstance(text, str):
            said.append((growing.now, text))
        else:
            print(text)

    monkeypatch.setattr(console, "print", note)
    monkeypatch.setattr(watch, "make_console", lambda: console)
    watch_run(str(growing.folder), False, growing.clock())
    times = [at for at, _ in said]
    assert times[0] == 0.0
    assert len(times) > 5
    assert min(later - earlier for earlier, later in pairwise(times)) == 60.0
    assert said[0][1].endswith(f"waiting for a run in {growing.folder}")
    assert "sweep: 12 to epoch 1" in said[-1][1]
    assert len({text[9:] for _, text in said}) == len(said)
    assert "Group" in capsys.readouterr().out


def test_lines_and_the_table_where_it_is_over(past: str, said: Said) -> None:
    before = contents(Path(past))
    watched = said("watch", past)
    assert said("show", past).startswith(watched)  # what was said follows
    assert contents(Path(past)) == before


def test_on_a_terminal_the_last_picture_stays(
    growing: Growing, past: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    watch_run(str(growing.folder), False, growing.clock())
    shown = capsys.readouterr().out
    assert f"waiting for a run in {growing.folder}" in shown
    assert "interrupted, or running elsewhere; repeat the call to resume" in shown
    last = shown.rpartition("\x1b[2K")[2]
    assert "run: finished" in last
    assert f"best val_loss {load(past).best_metric:.4g} in the race" in last
    assert "8 of 12 trials, by val_loss (min)" in last


def test_a_terminal_whose_lines_cannot_be_written_again_gets_lines(
    growing: Growing, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    watch_run(str(growing.folder), False, growing.clock())
    first, *others = capsys.readouterr().out.splitlines()
    assert first.endswith(f"waiting for a run in {growing.folder}")
    assert any("sweep: 12 to epoch 1" in line for line in others)


def test_a_running_search_is_only_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Looked(Exception):
        pass

    def once(seconds: float) -> None:
        raise Looked

    looked = 0

    def look(event: Event) -> None:
        nonlocal looked
        if isinstance(event, RunEnded):
            return
        before = contents(tmp_path / "watched")
        for as_json in (False, True):
            with pytest.raises(Looked):
                watch_run(str(tmp_path / "watched"), as_json, Clock(sleep=once))
        assert contents(tmp_path / "watched") == before
        looked += 1

    search(tmp_path, "watched", callbacks=[look], num_samples=3, max_t=1, sweep=SweepConfig(fusion=1))
    assert looked > 5
    states = {json.loads(line)["state"] for line in capsys.readouterr().out.splitlines() if line.startswith("{")}
    assert states == {"running"}


@pytest.mark.parametrize("as_json", [False, True])
def test_an_interrupted_run_ends_it(part: str, as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    waited: list[float] = []
    written = (Path(part) / "journal.jsonl").stat().st_mtime
    clock = Clock(today=lambda: written + len(waited), sleep=waited.append)
    assert not watch_run(part, as_json, clock)
    assert watch.IDLE_SECONDS <= len(waited) <= watch.IDLE_SECONDS + 1  # times of files are rounded
    told = capsys.readouterr().out
    if as_json:
        assert json.loads(told)["state"] == "interrupted"
    else:
        assert told.splitlines()[-1].startswith("interrupted, or running elsewhere; repeat the call to resume (")
    long_ago = Path(part) / "journal.jsonl"
    os.utime(long_ago, (1e9, 1e9))
    assert main(["watch", part, *["--json"] * as_json]) == 1


def test_ctrl_c_ends_it_without_a_word(
    part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    made: Callable[..., Clock] = Clock
    monkeypatch.setattr(watch, "Clock", lambda: made(sleep=interrupted))
    assert main(["watch", part, "--json"]) == 130
    captured = capsys.readouterr()
    assert captured.err == ""
    assert json.loads(captured.out)["state"] == "interrupted"


def test_a_folder_of_several_runs(past: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(Path(past).parent)]) == 2
    assert "but must be the folder of one run: it holds several" in capsys.readouterr().err
