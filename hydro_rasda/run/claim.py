"""A run's folder, locked by this process, before it is known in full what the run is.

The lock comes first: whatever is written or counted in the folder belongs to the process that holds it. Then what must
be refused is refused, before any dry run. A call that is refused leaves the folder as it found it.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from hydro_rasda.history.lines import jsonable
from hydro_rasda.run.crash_log import DOING, CrashLog
from hydro_rasda.run.files import WRITABLE, make_inner, make_private, naming, refuse_links
from hydro_rasda.run.journal import JOURNAL, MESSAGES
from hydro_rasda.run.resume_rules import RESULTS, RunExists, refuse_new, refuse_other
from hydro_rasda.run.run_json import SPEC, read_spec
from hydro_rasda.run.run_lock import LOCK, hold


class Claim:
    """Hold a run's folder; make it if there is none.

    Args:
        exclusive: True if only a folder that this call makes will do.

    Attributes:
        found: The content of the `run.json` that is there; None if there is none.
        doing: The work that this process does itself, and the work at which earlier processes died.
        counts: True once the run holds what a later call can use: then it stays, however this call ends.

    Raises:
        RunExists: if there is a run under resume="never", or the folder holds something else.
        FileNotFoundError: if there is no run under resume="must".
        RuntimeError: if another process holds the folder.
        Unsafe: if a link or another irregular file is in the place of one of the run's.
        OSError: if the folder cannot be written, or has no locks; FileExistsError if it is there, but must not be.
    """

    def __init__(self, path: Path, resume: str, exclusive: bool = False) -> None:
        self.path, self.resume = path, resume
        spec = path / SPEC
        if not spec.exists():
            refuse_new(path, resume)
        refuse_links(path / "checkpoints", *(path / name for name in (LOCK, JOURNAL, DOING, MESSAGES)), spec)
        self._made = [made for made in (path / LOCK, path, *path.parents) if not made.exists()]
        try:
            with naming(path, WRITABLE):
                make_private(path, exist_ok=not exclusive)
            self._lock = hold(path)
        except FileExistsError:  # another call has made the folder just now
            raise
        except BaseException as error:
            if isinstance(error, RuntimeError):  # the lock is of the process that holds it
                self._made = [made for made in self._made if made.name != LOCK]
            self._undo()
            raise
        # Only now: before, another process may have been writing.
        self.counts = spec.exists()
        self._made[:0] = [made for name in (SPEC, *RESULTS) if not (made := path / name).exists()]
        try:
            self.found = read_spec(path) if self.counts else None
            if self.found is not None and resume == "never":
                raise RunExists(f"`resume` is 'never', but {path} holds a run; choose another `name`")
            self.doing = CrashLog(path / DOING, anew=resume == "changed")
            with naming(path, WRITABLE):
                make_inner(path / "checkpoints")
        except BaseException:
            if not self.counts:
                self._undo()
            self._lock.release()
            raise

    def refuse_other(self, known: Mapping[str, Any]) -> None:
        """Refuse another run than the one that is there, by the part of its identity that is known."""
        if self.found is not None:
            refuse_other(self.path, self.found, jsonable(known), self.resume)

    def release(self, undo: bool = False) -> None:
        """Let go of the folder; `undo` removes what this call made of it, unless it counts."""
        self.doing.close()
        if undo and not self.counts:
            self._undo()
        self._lock.release()

    def _undo(self) -> None:
        """Remove what this call made: files, the checkpoints, and folders as far as they are empty."""
        for made in self._made:
            with contextlib.suppress(OSError):
                if not made.is_dir():
                    made.unlink()
                elif made.parent == self.path:
                    shutil.rmtree(made)
                else:
                    made.rmdir()

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        # Whoever interrupts a run means to go on with it, once there is one.
        self.release(undo=isinstance(error, Exception) or not (self.path / SPEC).exists())
