"""Reading a run's record from its folder alone, without torch or Ray, be it over, interrupted or running."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from hydro_rasda.argument_checks import check_path
from hydro_rasda.config import RaceConfig, SweepConfig, TuneConfig
from hydro_rasda.results.lineage import SWEEP_DECISION
from hydro_rasda.results.records import RunRecord
from hydro_rasda.results.summary import sum_up
from hydro_rasda.run.full_size_journal import decided_targets, run_end, score_that_ended, take_in_targets, tried_targets
from hydro_rasda.run.journal import JOURNAL
from hydro_rasda.run.run_folder import Store
from hydro_rasda.run.run_json import SPEC, read_asked, recorded
from hydro_rasda.run.state import FINALISTS, Run, decision_key
from hydro_rasda.run.transfer_check_journal import recalled_transfer
from hydro_rasda.run.unkept_values import changed, restored
from hydro_rasda.schedulers.sweep_rule import Continue, Stop, move_of
from hydro_rasda.secret_masking import described_secrets
from hydro_rasda.trial import Trial


@dataclass(frozen=True)
class _Asked:
    """A problem's stand-in for reading a run: `full_size` tells whether a user's function trained at full size."""

    settings: TuneConfig
    full_size: object = None


def read_record(path: str | Path) -> RunRecord:
    """Read what a run has found so far. The folder is only read; a run in progress is not disturbed."""
    check_path("path", path)
    folder = Path(path).expanduser().absolute()
    asked = read_asked(folder)
    problem: Any = _Asked(settings_of(asked), asked["digests"].get("full_size"))
    run = Run(problem, Store.read(folder), hidden=described_secrets(asked["space"]))
    dropped = _take_in_sweep(run)
    if problem.full_size is not None or "sample_from(" in repr(asked["space"]):  # others may read any key
        run.unread.clear()
    run.transfer = recalled_transfer(run)
    take_in_targets(run)
    if (enough := score_that_ended(run)) is not None:  # run.json leaves it out: another one may go on
        run.problem = replace(problem, settings=replace(problem.settings, stop_at=enough))
    finalists = run.store.units()[key].value if run.store.done(key := decision_key(FINALISTS, run.trials)) else []
    return sum_up(run, tried_targets(run, finalists), _undecided(run, dropped, finalists))


T = TypeVar("T")

Stamp = tuple[int, int]
"""A value that changes with a run's journal: its length, and when it was written, in nanoseconds since 1970."""


def runs_in(folder: Path) -> list[Path]:
    """Return the runs directly below a folder, or the run that the folder is itself."""
    return [folder] if (folder / SPEC).is_file() else [path.parent for path in folder.glob(f"*/{SPEC}")]


def stamp(folder: Path) -> Stamp:
    """Return the stamp of a run's journal; before its first line, that of its `run.json`."""
    try:
        found = (folder / JOURNAL).lstat()
    except FileNotFoundError:
        found = (folder / SPEC).lstat()
    return found.st_size, found.st_mtime_ns


class Unreadable(str):
    """The reason, as a line, why a run cannot be read, such as one of another program."""


def or_why(make: Callable[[], T]) -> T | Unreadable:
    """Read a run, or return why it cannot be read: a folder that is no proper run does not hide the others."""
    try:
        return make()
    except Exception as error:
        return Unreadable(next(iter(str(error).splitlines()), "") or type(error).__name__)


def settings_of(asked: Mapping[str, Any]) -> TuneConfig:
    """Return the settings of a run, as far as its `run.json` tells."""
    own, sweep, race = recorded(asked)
    # `lr_rule` may be a function, and nothing that is read calls it.
    return TuneConfig(**own, sweep=SweepConfig(**sweep), race=RaceConfig(**race | {"lr_rule": "auto"}))


def _take_in_sweep(run: Run) -> set[int]:
    """Take in the trials and their epochs of the sweep; return those that the sweep dropped."""
    dropped: set[int] = set()
    for key, unit in run.store.units().items():
        if not key.startswith("surrogate/"):
            continue
        run.recall(key)
        configured = [line for line in unit.lines if line["event"] == "trial"]
        for line in configured:
            number, noted = line["trial"], line.get("literals", [])
            run.trials[number] = Trial(number, restored(line["config"], noted))
            run.unkept[number] = frozenset(tuple(place) for place, literal in noted if literal is None)
        if SWEEP_DECISION.fullmatch(key):
            before = dict(run.trials)
            for number, *plain in unit.value:
                move = move_of(plain)
                if isinstance(move, Stop):
                    dropped.add(number)
                else:
                    dropped.discard(number)
                if isinstance(move, Continue) and move.copy_of is not None:
                    run.failures.pop(number, None)
                    run.trials[number] = Trial(number, changed(before[move.copy_of].config, move.changes))
                    run.unkept[number] = run.unkept.get(move.copy_of, frozenset())
                    run.unread[number] = run.unread.get(move.copy_of, frozenset())
                    run.costs[number] = run.costs.get(move.copy_of, {})
    return dropped


def _undecided(run: Run, dropped: Collection[int], finalists: Collection[int]) -> set[int] | None:
    if run_end(run) != "open":
        return None
    decided = decided_targets(run)
    begun = {number for stage, number in run.metrics if stage == "target"}
    swept = set(finalists) or run.trials.keys() - dropped
    return {number for number in begun if decided.get(number, True)} | (swept - begun)
