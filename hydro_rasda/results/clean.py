"""Checkpoints that nothing needs any more."""

from __future__ import annotations

from pathlib import Path

from hydro_rasda.checks import require
from hydro_rasda.results.reading import read_record
from hydro_rasda.run.files import TEMPORARY, matching, remove
from hydro_rasda.run.run_lock import hold


def unneeded(path: str | Path, best_only: bool = False) -> list[Path]:
    """List the files of a run that neither its result nor resuming it needs; the folder is only read.

    These are files that a killed process left half written, and checkpoints that later ones replaced. The sweep's
    checkpoints are among them once the run is finished.

    Args:
        best_only: Keep the best model alone: other finalists' models are then gone, and the run can no longer be
            extended.

    Raises:
        ValueError: if the folder holds no run, or if the run is not finished and `best_only` is set.
        Unsafe: if a link leads out of the folder.
    """
    record = read_record(path)
    require(record.finished or not best_only, "path", str(path), "a finished run, where only its best model is kept")
    kept = {record.best_checkpoint} if best_only else set(record._checkpoints.values())
    folder = record.path / "checkpoints"
    replaced = [file for file in matching(folder, "*.pt", 1) if file not in kept]
    if not record.finished:
        replaced = [file for file in replaced if file.name.startswith("target.")]
    return [*replaced, *matching(folder, TEMPORARY, 1), *matching(record.path, TEMPORARY)]


def remove_unneeded(path: str | Path, best_only: bool = False) -> list[Path]:
    """Lock the run, remove the files that `unneeded` lists, and return them.

    Raises:
        ValueError: as `unneeded`.
        RuntimeError: if a process works on the run.
    """
    unneeded(path, best_only)  # refuses a folder without a run before the lock's file is made in it
    folder = Path(path).expanduser().absolute()
    lock = hold(folder)
    try:
        # Only now: before, another process may have been at work.
        files = unneeded(path, best_only)
        for file in files:
            remove(file, inside=len(file.relative_to(folder).parts))
    finally:
        lock.release()
    return files
