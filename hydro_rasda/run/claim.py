"""A run's folder, locked by this process before everything about the run is known.

The lock comes first: only its holder may write to the folder. Then the call is checked, before any dry run. If the
call is refused, it leaves the folder as it was.
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
    """Hold a run's folder; create it if it does not exist.

    Args:
        exclusive: True requires that this call creates the folder.

    Attributes:
        found: The content of an existing `run.json`; None if there is none.
        doing: The work that this process does itself, and the work at which earlier processes died.
        counts: True once the folder holds results that a later call can use. Then it stays, however this call ends.

    Raises:
        RunExists: if there is a run and `resume` is "never", or the folder holds something else.
        FileNotFoundError: if there is no run and `resume` is "must".
        RuntimeError: if another process holds the folder.
        Unsafe: if a file of the run is a link, or not a regular file.
        OSError: if the folder cannot be written or locked. FileExistsError if it exists despite `exclusive`.
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
        except FileExistsError:  # another call has just created the folder
            raise
        except BaseException as error:
            if isinstance(error, RuntimeError):  # the lock file belongs to the process that holds it
                self._made = [made for made in self._made if made.name != LOCK]
            self._undo()
            raise
        # Look only now, under the lock: before, another process may have been writing.
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
        """Raise if the folder holds another run, judged by the part of the identity that is known so far."""
        if self.found is not None:
            refuse_other(self.path, self.found, jsonable(known), self.resume)

    def release(self, undo: bool = False) -> None:
        """Release the folder. `undo` removes what this call created in it, unless `counts` is True."""
        self.doing.close()
        if undo and not self.counts:
            self._undo()
        self._lock.release()

    def _undo(self) -> None:
        """Remove what this call created: files, checkpoints, and folders if they are empty."""
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
        # A user who interrupts a run may want to resume it, so it stays once there is a `run.json`.
        self.release(undo=isinstance(error, Exception) or not (self.path / SPEC).exists())
