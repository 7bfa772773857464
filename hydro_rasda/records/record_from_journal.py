"""Read the record of a finished, interrupted or running run from its folder alone, without torch or Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from hydro_rasda.common.argument_checks import check_path
from hydro_rasda.common.secret_masking import described_secrets
from hydro_rasda.history.full_size import run_end, score_that_ended, tried_targets
from hydro_rasda.history.history import History
from hydro_rasda.records.records import RunRecord
from hydro_rasda.records.summary import sum_up
from hydro_rasda.run.journal import JOURNAL, Record, read_units
from hydro_rasda.run.run_folder import Store, take_in
from hydro_rasda.run.run_json import SPEC, read_asked, recorded
from hydro_rasda.settings.config import RaceConfig, SweepConfig, TuneConfig


def read_record(path: str | Path) -> RunRecord:
    """Read what a run has found so far. The folder is only read; a run in progress is not disturbed."""
    check_path("path", path)
    return Follower(Path(path).expanduser().absolute()).read()


class Follower:
    """Reads a run again and again; after the first time, it reads only the lines that the journal has gained."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._asked: Mapping[str, Any] = {}
        self._journal: Record | None = None

    def read(self) -> RunRecord:
        """Read what the run has found so far."""
        asked, before = read_asked(self._folder), self._journal
        if asked != self._asked:
            before = None
        self._asked = asked
        self._journal = journal = read_units(self._folder / JOURNAL, before)
        if before is None or journal.units is not before.units or journal.taken_back:
            self._begin_anew(journal)
        else:
            for key in journal.new:
                take_in(self._history, key, journal.units[key], self._folder)
        history = self._history
        # run.json leaves out `stop_at`, because a call with another value may resume the run. Take the value from the
        # journal if it ended the run.
        history.settings = replace(history.settings, stop_at=score_that_ended(history.last_of_race))
        undecided = _undecided(history) if run_end(history) == "open" else None
        finalists, hidden = tried_targets(history, history.at_full_size or ()), described_secrets(asked["space"])
        return sum_up(history, finalists, self._folder, undecided, hidden)

    def _begin_anew(self, journal: Record) -> None:
        asked = self._asked
        own_loop = "train" in asked["digests"]
        reads_any = own_loop or "sample_from(" in repr(asked["space"])
        self._history = History(settings_of(asked), own_loop, reads_any=reads_any)
        for _ in Store(self._folder, journal).folded_into(self._history):
            pass


T = TypeVar("T")

Stamp = tuple[int, int]
"""A value that changes with a run's journal: its length, and when it was written, in nanoseconds since 1970."""


def runs_in(folder: Path) -> list[Path]:
    """Return the folders of runs directly below a folder; return the folder itself if it is a run."""
    return [folder] if (folder / SPEC).is_file() else [path.parent for path in folder.glob(f"*/{SPEC}")]


def stamp(folder: Path) -> Stamp:
    """Return the stamp of a run's journal, its size and time of writing; without a journal yet, that of `run.json`."""
    try:
        found = (folder / JOURNAL).lstat()
    except FileNotFoundError:
        found = (folder / SPEC).lstat()
    return found.st_size, found.st_mtime_ns


class Unreadable(str):
    """The reason, in one line, why a run cannot be read; another program may have written the folder, for example."""


def or_why(make: Callable[[], T]) -> T | Unreadable:
    """Return the value of `make()`. If it raises, return the reason, so that an unreadable run does not hide others."""
    try:
        return make()
    except Exception as error:
        return Unreadable(next(iter(str(error).splitlines()), "") or type(error).__name__)


def settings_of(asked: Mapping[str, Any]) -> TuneConfig:
    """Return the settings of a run, as far as its `run.json` tells."""
    own, sweep, race = recorded(asked)
    # `lr_rule` may be a function, of which run.json holds only the name. A record never calls it, so "auto" will do.
    return TuneConfig(**own, sweep=SweepConfig(**sweep), race=RaceConfig(**race | {"lr_rule": "auto"}))


def _undecided(history: History) -> set[int]:
    begun = {number for heat, number in history.metrics if heat == "race"}
    # Once another race has begun, nothing more is decided about the other trials of an earlier one.
    racing = begun if history.entrants is None else {*history.race.trials, *(history.at_full_size or ())}
    dropped = {number for number, standing in history.sweep.trials.items() if standing.dropped}
    swept = {*(history.at_full_size or history.finalists or ())} or history.trials.keys() - dropped
    return {number for number in begun & racing if history.decided.get(number, True)} | (swept - begun)
