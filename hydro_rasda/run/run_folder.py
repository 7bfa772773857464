"""The run's folder: the arguments of `tune`, the journal, and the checkpoints to resume from.

::

    storage_path/name/
        run.json          arguments of `tune`: settings, space, outlines and digests of data and model; and an id
        journal.jsonl     one line for each metric, decision and finished unit of work
        messages.jsonl    messages to the user, for a later reader of the run
        checkpoints/      weights and optimizer state of the rung reached last; tensors and plain values only
        before-1/         earlier results that do not compare, set aside with `resume="changed"`; see `set_aside`

A run is a sequence of *units* of work, such as one fused group trained to one milestone. Every unit starts from the
files on disk, and leaves its lines and its checkpoint there. So a resumed run is an ordinary run whose first units are
read instead of trained. The lines of a unit reach the journal in one write, the unit's own line last. If a process is
killed, lines after the last unit's line do not count, and are cut off on resume.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from hydro_rasda.common.argument_checks import require
from hydro_rasda.history.history import CALL, History, is_decision, is_live
from hydro_rasda.history.lines import JournalLine, Unit, jsonable
from hydro_rasda.run import files
from hydro_rasda.run.checkpoints import WRITTEN_AS, DamagedCheckpoint, load_checkpoint, save_checkpoint
from hydro_rasda.run.claim import Claim
from hydro_rasda.run.crash_log import CrashLog
from hydro_rasda.run.journal import (
    FORGOTTEN,
    JOURNAL,
    RUN,
    UNIT,
    DamagedJournal,
    Record,
    encoded,
    keep_message,
    read_units,
)
from hydro_rasda.run.resume_rules import refuse_growth, refuse_other, scored_otherwise, set_aside
from hydro_rasda.run.run_json import FORMAT, SPEC, run_id
from hydro_rasda.settings.config import RESUME

if TYPE_CHECKING:
    import torch


CHECKPOINTS = "checkpoints"
"""Folder of a run's checkpoints."""

CHANGED = "changed"
"""Key of the unit with which a call of `tune` continues with other code or data. It holds the differences in words."""


class Store:
    """One run's folder. Only one process at a time may write to it, but any number of processes can read it.

    Attributes:
        changes: Messages about differences that this call accepts: other code or data, or a lost part of the journal.
        doing: Notes on the work that this process trains itself.
        id: Distinguishes this run and its checkpoints from all others.
        recorded: Number of units in the journal when the run was opened, without live epochs.
        left: The latest estimate of the seconds that the run still takes; None if it is not known.
    """

    left: float | None = None

    def __init__(self, path: Path, record: Record, claim: Claim | None = None, changes: Sequence[str] = ()) -> None:
        self.path, self.id = path, run_id(path)
        self._checkpoints = path / CHECKPOINTS
        if record.units and record.run != self.id:
            raise DamagedJournal(
                f"{path / JOURNAL} is the journal of another run than {path / SPEC}: put back the run's own, or remove "
                "the journal, and the run begins anew"
            )
        self.changes = changes
        self._units, self._sum = record.units, record.sum
        # Leave out live epochs: no checkpoint holds them, so they train again.
        units = {key: unit for key, unit in record.units.items() if not is_live(key)}
        self._claim, self._owns_claim = claim, False
        with files.naming(path / JOURNAL, files.WRITABLE):
            self._journal = None if claim is None else files.append_to(path / JOURNAL)
        self._spent = max((unit.at for unit in units.values()), default=0.0)
        self._swept = max((unit.swept for unit in units.values()), default=0.0)
        self._opened = monotonic()
        self._sweeps_since: float | None = None
        self._failed: OSError | None = None
        self.recorded = len(units)
        self._damage: dict[str, str] = {}
        self.doing = CrashLog() if claim is None else claim.doing

    @classmethod
    def open(cls, path: Path, asked: Mapping[str, Any], resume: str) -> Store:
        """Create a run's folder, or open an existing one.

        Args:
            asked: JSON values that identify the run (see `Identity.asked`). A folder with another run is refused.
            resume: "auto" continues an existing run. "must" refuses to begin a new run, and "never" refuses to continue
                one. "changed" also continues if code or data have changed, and records the new ones. If new scores do
                not compare with the earlier ones, it sets the earlier results aside.

        Raises:
            RunExists: if the folder holds another run, or any run with `resume="never"`.
            DamagedJournal: if finished units follow a line that cannot be read, or if the journal is another run's.
            Others: see `Claim`.
        """
        require(resume in RESUME, "resume", resume, f"one of {RESUME}")
        claim = Claim(path, resume)
        try:
            store = cls.claimed(claim, asked)
        except BaseException:
            claim.release()
            raise
        store._owns_claim = True
        return store

    @classmethod
    def claimed(cls, claim: Claim, asked: Mapping[str, Any], spent: float = 0.0) -> Store:
        """Create a run in a claimed folder, or open the one that exists; see `open`. The caller still holds the claim.

        Args:
            spent: Seconds that this process has already spent on the run; they count as the run's.
        """
        path, found, asked = claim.path, claim.found, jsonable(asked)
        changes = refuse_other(path, found, asked, claim.resume) if found is not None else []
        otherwise = found is not None and scored_otherwise(found, asked)
        if found is not None and not otherwise:
            refuse_growth(path, found, asked)
        claim.doing.forget_aside()
        moved = set_aside(path) if otherwise else ""
        if is_new := found is None or otherwise:  # an earlier process may have moved the results, and was then killed
            _write_spec(path, uuid.uuid4().hex, asked)
        for inside, folder in enumerate((path, path / CHECKPOINTS)):
            for left in files.matching(folder, files.TEMPORARY, inside):
                files.remove(left, inside + 1)
        journal = path / JOURNAL
        record = read_units(journal)
        if journal.exists() and record.end < journal.stat().st_size:
            with files.naming(journal, files.WRITABLE):
                files.truncate(journal, record.end)
        damage = f"{record.damage}: its work is done again" if record.damage else ""
        store = cls(path, record, claim, [*changes, *filter(None, (moved, damage))])
        if changes and not is_new:  # before run.json has the changes, so that a kill loses none
            store.record(CHANGED, Unit(changes), again=True)
        if found != asked and not is_new:
            _write_spec(path, store.id, asked)
        store._opened -= spent
        files.sync_folder(path)
        return store

    @classmethod
    def read(cls, path: Path) -> Store:
        """Open a run's folder only for reading: nothing is locked, and a run in progress is not disturbed."""
        return cls(path, read_units(path / JOURNAL))

    def record(self, key: str, unit: Unit, again: bool = False) -> Unit:
        """Record a finished unit of work; return it in the form in which the journal gives it back.

        Any checkpoint that it names must be complete. Unless the unit holds live epochs, it is on the disk when this
        returns. If the key is recorded already, `again` must be True: the new unit replaces the old one, and comes last
        in the order.

        Raises:
            OSError: if the unit cannot be written. The journal then accepts no further unit.
        """
        require(again or key not in self._units, "key", key, "that of a unit which is not recorded yet")
        value, lines, seconds = jsonable(unit.value), jsonable(unit.lines), round(unit.seconds, 4)
        left = None if self.left is None else round(self.left, 1)
        unit = Unit(value, lines, seconds, _rounded_up(self.seconds), _rounded_up(self.swept), left)
        own = {"event": UNIT, "key": key, "seconds": seconds, "at": unit.at, "swept": unit.swept, "value": value}
        own |= {} if left is None else {"left": left}
        self._append(unit.lines, own, durable=not is_live(key))
        if self._claim is not None and any(line["event"] in ("metrics", "failed") for line in unit.lines):
            self._claim.counts = True
        self._units.pop(key, None)
        self._units[key] = unit
        return unit

    def forget(self, keys: Iterable[str]) -> None:
        """Take back the units of these keys: they no longer count as done, so that their work is done again."""
        for key in keys:
            self.record(key, Unit(FORGOTTEN), again=True)
            del self._units[key]

    def done(self, key: str) -> bool:
        return key in self._units

    @property
    def seconds(self) -> float:
        """Wall time of the run: up to the last unit of earlier processes, and since this process opened it."""
        return self._spent + monotonic() - self._opened

    @property
    def swept(self) -> float:
        """The part of `seconds` that the sweep has taken."""
        return self._swept + (monotonic() - self._sweeps_since if self._sweeps_since is not None else 0.0)

    @contextlib.contextmanager
    def sweeping(self) -> Iterator[None]:
        """Count the time within the context as the sweep's."""
        self._sweeps_since = monotonic()
        try:
            yield
        finally:
            self._swept, self._sweeps_since = self.swept, None

    def units(self) -> Mapping[str, Unit]:
        """Return all finished units, in the order in which they finished."""
        return self._units

    def folded_into(self, history: History) -> Iterator[tuple[str, Unit]]:
        """Update a history with all finished units; yield each unit after the update.

        Raises:
            DamagedJournal: if a unit does not follow from those before it.
        """
        is_void = CALL in self._units  # True before the unit `CALL`; the sweep's decisions until then do not count
        # Iterate over a copy. The caller may record units meanwhile, such as costs of what a searcher suggests now.
        for key, unit in [*self._units.items()]:
            is_void = is_void and key != CALL
            if not (is_void and is_decision(key)):
                take_in(history, key, unit, self.path)
                yield key, unit
        history.last = next(reversed(self._units), "")

    def save(self, name: str, payload: Mapping[str, Any]) -> None:
        """Write a checkpoint atomically: it is whole, or not there at all."""
        assert self._claim is not None, "this run was opened to be read"
        file = self.file(name)
        with files.naming(file):
            save_checkpoint(file, {**payload, WRITTEN_AS: [self.id, file.name]})
        self._damage[name] = ""

    def load(self, name: str, device: str | torch.device | None = None) -> dict[str, Any]:
        """Load a checkpoint like `load_checkpoint`; it must be one that this run wrote under this name."""
        return load_checkpoint(self.file(name), device, self.id)

    def damage(self, name: str) -> str:
        """Return why a checkpoint of an earlier process cannot be loaded; empty if it can.

        Each checkpoint is tried once.
        """
        if name not in self._damage:
            try:
                self.load(name, "cpu")
                self._damage[name] = ""
            except DamagedCheckpoint as damage:
                self._damage[name] = str(damage)
        return self._damage[name]

    def has(self, name: str) -> bool:
        return self.file(name).exists()

    def keep_message(self, text: str) -> None:
        """Store a message of the run. Nothing depends on it."""
        if self._claim is not None:
            keep_message(self.path, self.seconds, text)

    def discard(self, names: Iterable[str]) -> None:
        """Remove checkpoints that no trial needs any more."""
        assert self._claim is not None, "this run was opened to be read"
        for name in names:
            with contextlib.suppress(IsADirectoryError):  # no run made this folder: `save` will raise an error for it
                files.remove(self.file(name), inside=2)
            self._damage.pop(name, None)

    def file(self, name: str) -> Path:
        return self._checkpoints / _file_name(name)

    def _append(self, lines: Iterable[JournalLine], own: JournalLine, durable: bool) -> None:
        assert self._journal is not None, "this run was opened to be read"
        if self._failed is not None:  # the failed write may have ended within a line, so nothing may follow it
            raise self._failed
        first = [] if self._units else [{"event": RUN, "id": self.id}]
        written, total = encoded([*first, *lines], own, self._sum)
        try:
            with files.naming(self.path / JOURNAL):
                self._journal.write(written)
                self._journal.flush()
                if durable:
                    os.fsync(self._journal.fileno())
        except OSError as error:
            self._failed = error
            raise
        self._sum = total

    def close(self) -> None:
        if self._journal is not None and self._claim is not None:
            with contextlib.suppress(OSError):  # some lines could not be written, which raised an error before
                self._journal.close()
            if self._owns_claim:
                self._claim.release()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _write_spec(path: Path, own: str, asked: Mapping[str, Any]) -> None:
    """Write `run.json`: what was asked for, and the run's `id`, which is `own`."""
    told = {"format": FORMAT, "id": own, **asked}
    with files.naming(path / SPEC):
        files.write_atomically(path / SPEC, (json.dumps(told, indent=2) + "\n").encode())


def take_in(history: History, key: str, unit: Unit, folder: Path) -> None:
    """Update a history with a folder's next unit. Raise DamagedJournal if it does not follow from earlier units."""
    try:
        history.take(key, unit)
    except (AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        told = f"the unit {key!r} of {folder / JOURNAL} does not follow from those before it"
        raise DamagedJournal(f"{told} ({type(error).__name__}: {error}): begin anew") from error


def checkpoint_file(folder: Path, name: str) -> Path:
    """Return the path of a checkpoint in a run's folder."""
    return folder / CHECKPOINTS / _file_name(name)


def _file_name(checkpoint: str) -> str:
    return f"{checkpoint.replace('/', '.')}.pt"


def _rounded_up(seconds: float) -> float:
    """Round up for the journal, because recorded time must not be less than a budget that was exceeded."""
    return math.ceil(seconds * 1e4) / 1e4
