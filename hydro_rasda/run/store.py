"""The run directory: what was asked, what happened, and the weights to go on from.

::

    storage_path/name/
        run.json          what was asked: settings, space, data and model in outline, and digests of them
        journal.jsonl     one line for each metric, decision and finished unit of work
        checkpoints/      weights and optimizer state of the rung reached last; tensors and plain values only

A run is a sequence of *units* of work, such as one fused group trained to one milestone. Every unit starts from what is
on disk and leaves its lines and its checkpoint there, so a resumed run is an ordinary run whose first units are read
instead of trained. The lines of a unit reach the journal in one write, the unit's own line last; what follows the last
such line when a process is killed does not count and is cut off on resume.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic, perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from hydro_rasda.checks import require
from hydro_rasda.config import RESUME
from hydro_rasda.run.differences import differences
from hydro_rasda.run.files import (
    TEMPORARY,
    DamagedCheckpoint,
    load_checkpoint,
    save_checkpoint,
    sync_folder,
    write_atomically,
)
from hydro_rasda.run.held import LOCK

if TYPE_CHECKING:
    import torch

JournalLine = dict[str, Any]
"""One line of the journal: plain values, of which "event" says what it tells of."""

_UNIT = "unit"


@dataclass(frozen=True)
class Unit:
    """A finished unit of work, as the journal keeps it.

    Attributes:
        value: JSON values: what later units and decisions need to know.
        lines: The unit's metrics and events, one journal line each.
        seconds: Wall time that it took; units that ran beside each other count in full.
        at: Wall time of the run when it was finished.
        swept: Of that, what the sweep had taken.
    """

    value: Any
    lines: list[JournalLine] = field(default_factory=list)
    seconds: float = 0.0
    at: float = 0.0
    swept: float = 0.0


class RunExists(ValueError):
    """A run of this name is there already, and is another one."""


class Store:
    """One run's directory, held by one process at a time; any number can read it meanwhile.

    Attributes:
        path: The directory.
        changes: How code and data differ from the run's so far, in words, where it goes on all the same.
    """

    def __init__(
        self, path: Path, units: dict[str, Unit], lock: FileLock | None = None, changes: Sequence[str] = ()
    ) -> None:
        self.path = path
        self.changes = changes
        self._units = units
        self._lock = lock
        self._journal = None if lock is None else open(path / "journal.jsonl", "ab")  # noqa: SIM115 (closed in close)
        self._spent = max((unit.at for unit in units.values()), default=0.0)
        self._swept = max((unit.swept for unit in units.values()), default=0.0)
        self._opened = monotonic()
        self._sweeps_since: float | None = None
        self._recorded = len(units)
        self._damage: dict[str, str] = {}

    @classmethod
    def open(cls, path: Path, asked: Mapping[str, Any], resume: str) -> Store:
        """Make a run directory, or open the one that is there.

        Args:
            path: `storage_path/name`.
            asked: JSON values that say what the run is (see `Identity.asked`); a directory with another run is refused.
            resume: "auto" goes on with a run that is there; "must" refuses to start anew; "never" to go on; "changed"
                goes on also where code or data are others now, and keeps those as the run's.

        Raises:
            RunExists: where the directory holds another run, or any run under resume="never".
            FileNotFoundError: where there is none under resume="must".
            RuntimeError: where another process holds it.
        """
        require(resume in RESUME, "resume", resume, f"one of {RESUME}")
        spec = path / "run.json"
        if not spec.exists():
            if resume == "must":
                raise FileNotFoundError(f"`resume` is 'must', but there is no run to go on with in {path}")
            _refuse_what_is_no_run(path)
        (path / "checkpoints").mkdir(parents=True, exist_ok=True)
        lock = FileLock(path / LOCK)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            raise RuntimeError(f"another process is working on the run in {path}") from None
        try:
            # Only now: before, another process may have been writing.
            found, asked = json.loads(spec.read_text()) if spec.exists() else None, jsonable(asked)
            changes = _refuse_other(path, found, asked, resume) if found is not None else []
            if found != asked:
                write_atomically(spec, (json.dumps(asked, indent=2) + "\n").encode())
            for left in (*path.glob(TEMPORARY), *(path / "checkpoints").glob(TEMPORARY)):
                left.unlink()
            journal = path / "journal.jsonl"
            units, whole = _read_units(journal)
            if journal.exists() and whole < journal.stat().st_size:
                os.truncate(journal, whole)
            store = cls(path, units, lock, changes)
            sync_folder(path)
            return store
        except BaseException:
            lock.release()
            raise

    @classmethod
    def read(cls, path: Path) -> Store:
        """A run directory as it stands, to be read only: nothing is locked, and a run that goes on is not disturbed."""
        return cls(path, _read_units(path / "journal.jsonl")[0])

    def once(self, key: str, work: Callable[[], Unit | Any]) -> Unit:
        """Do a unit of work, or read what it gave when it was done before.

        Args:
            key: Names the unit within the run, such as "surrogate/rung-0/group-3".
            work: Does it. Any checkpoint that it writes must be complete before it returns.
        """
        if key not in self._units:
            started = perf_counter()
            result = work()
            unit = result if isinstance(result, Unit) else Unit(result)
            self.record(key, replace(unit, seconds=perf_counter() - started))
        return self._units[key]

    def record(self, key: str, unit: Unit, again: bool = False) -> Unit:
        """Keep a unit of work that was done elsewhere, as the journal would give it back.

        Args:
            key: Its name.
            unit: What it gave.
            again: Whether it may have been done before; then this one counts, in its own place.

        Raises:
            ValueError: where a unit of this key is finished already, and `again` is not said.
        """
        require(again or key not in self._units, "key", key, "that of a unit which is not recorded yet")
        value, lines, seconds = jsonable(unit.value), jsonable(unit.lines), round(unit.seconds, 4)
        unit = Unit(value, lines, seconds, _rounded_up(self.seconds), _rounded_up(self.swept))
        own = {"event": _UNIT, "key": key, "seconds": seconds, "at": unit.at, "swept": unit.swept, "value": value}
        self._append([*unit.lines, own])
        self._units.pop(key, None)
        self._units[key] = unit
        return unit

    def done(self, key: str) -> bool:
        """Whether a unit of work is finished."""
        return key in self._units

    @property
    def recorded(self) -> int:
        """Units that were in the journal when the run was opened."""
        return self._recorded

    @property
    def seconds(self) -> float:
        """Wall time to the last unit done before this process, plus what has passed in it."""
        return self._spent + monotonic() - self._opened

    @property
    def swept(self) -> float:
        """The part of `seconds` that the sweep has taken."""
        return self._swept + (monotonic() - self._sweeps_since if self._sweeps_since is not None else 0.0)

    @contextlib.contextmanager
    def sweeping(self) -> Iterator[None]:
        """What passes here is the sweep's time."""
        self._sweeps_since = monotonic()
        try:
            yield
        finally:
            self._swept, self._sweeps_since = self.swept, None

    def units(self) -> Mapping[str, Unit]:
        """All finished units, in the order in which they finished."""
        return self._units

    def save(self, name: str, payload: Mapping[str, Any]) -> None:
        """Write a checkpoint: it is there whole, or not at all."""
        assert self._lock is not None, "this run was opened to be read"
        save_checkpoint(self.file(name), payload)
        self._damage[name] = ""

    def load(self, name: str, device: torch.device | None = None) -> dict[str, Any]:
        """Read a checkpoint back; nothing in it can run code.

        Raises:
            DamagedCheckpoint: where it cannot be read, or is not what was written.
        """
        return load_checkpoint(self.file(name), device)

    def damage(self, name: str) -> str:
        """What keeps a checkpoint of an earlier process from being loaded, in words; looked for once."""
        if name not in self._damage:
            try:
                load_checkpoint(self.file(name), "cpu")
                self._damage[name] = ""
            except DamagedCheckpoint as damage:
                self._damage[name] = str(damage)
        return self._damage[name]

    def has(self, name: str) -> bool:
        """Whether there is such a checkpoint."""
        return self.file(name).exists()

    def discard(self, names: Iterable[str]) -> None:
        """Remove checkpoints that nothing will go on from."""
        assert self._lock is not None, "this run was opened to be read"
        for name in names:
            self.file(name).unlink(missing_ok=True)
            self._damage.pop(name, None)

    def file(self, name: str) -> Path:
        """Where a checkpoint lies."""
        return self.path / "checkpoints" / f"{name.replace('/', '.')}.pt"

    def _append(self, lines: Iterable[JournalLine]) -> None:
        assert self._journal is not None, "this run was opened to be read"
        self._journal.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        self._journal.flush()
        os.fsync(self._journal.fileno())

    def close(self) -> None:
        """Let go of the directory."""
        if self._journal is not None and self._lock is not None:
            self._journal.close()
            self._lock.release()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _refuse_other(path: Path, found: Mapping[str, Any], asked: Mapping[str, Any], resume: str) -> list[str]:
    """Where the run that is there may go on, how its code and data differ."""
    if resume == "never":
        raise RunExists(f"`resume` is 'never', but {path} holds a run; choose another `name`")
    another = f"`name` is {path.name!r}, but the run of that name in {path.parent}"
    if "digests" in asked and "digests" not in found:
        raise RunExists(f"{another} is of an earlier version, which kept no digest of its code and data")
    deciding, changes = differences(found, asked)
    if deciding or (changes and resume != "changed"):
        told = "; ".join(deciding + changes)
        hint = "" if deciding else "; `resume='changed'` goes on with it all the same"
        raise RunExists(f"{another} is another: {told}{hint}")
    return changes


def read_asked(path: Path) -> dict[str, Any]:
    """What the run in a directory was asked to be, as `Identity.asked` has it.

    Raises:
        ValueError: where the directory holds no run.
    """
    spec = path / "run.json"
    require(spec.is_file(), "path", str(path), "a run's folder, `storage_path/name`: it holds no run.json")
    try:
        asked = json.loads(spec.read_bytes())
    except ValueError:
        asked = None
    known = isinstance(asked, dict) and {"metric", "mode", "rasda"} <= asked.keys()
    require(known, "path", str(path), "a run's folder, `storage_path/name`: its run.json is not one of a run's")
    found: dict[str, Any] = asked
    return found


def _read_units(journal: Path) -> tuple[dict[str, Unit], int]:
    """Finished units of a journal, and their length in bytes: what follows is being written, or was never finished."""
    units: dict[str, Unit] = {}
    if not journal.exists():
        return units, 0
    lines: list[JournalLine] = []
    end = kept = 0
    with open(journal, "rb") as file:
        for raw in file:
            end += len(raw)
            try:
                line = json.loads(raw) if raw.endswith(b"\n") else None
            except ValueError:
                line = None
            if line is None:
                break
            if line["event"] == _UNIT:
                units.pop(line["key"], None)
                units[line["key"]] = Unit(line["value"], lines, line["seconds"], line["at"], line["swept"])
                lines, kept = [], end
            else:
                lines.append(line)
    return units, kept


def _refuse_what_is_no_run(path: Path) -> None:
    """Leave a folder alone that holds something else than what a process left that was killed before its run began."""
    if not path.exists():
        return
    strange = [p.name for p in path.iterdir() if p.name not in (LOCK, "checkpoints") and not p.match(TEMPORARY)]
    if strange or any((path / "checkpoints").glob("*")):
        raise RunExists(f"{path} is there, but holds no run; choose another `name` or `storage_path`")


def _rounded_up(seconds: float) -> float:
    """For the journal: what was spent may not seem less than a budget that it exceeded."""
    return math.ceil(seconds * 1e4) / 1e4


def jsonable(value: Any) -> Any:
    """A value as strict JSON gives it back: NaN and infinities become null, what has no JSON form its `repr`."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return getattr(value, "__qualname__", None) or repr(value)
