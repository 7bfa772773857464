"""Checkpoints that nothing needs any more."""

from __future__ import annotations

from pathlib import Path

from hydro_rasda.checks import require
from hydro_rasda.results.reading import read_record
from hydro_rasda.run.files import TEMPORARY, matching, remove
from hydro_rasda.run.run_lock import hold


def unneeded(path: str | Path, best_only: bool = False) -> list[Path]:
    """Files of a run that neither its result nor going on with it needs: the folder is only read.

    These are what a killed process left half written, and checkpoints that later ones took the place of. Of a run that
    is finished, also the sweep's.

    Args:
        best_only: Whether the best model is all that is to be kept: other finalists' models are then gone, and the run
            can no longer be extended.

    Raises:
        ValueError: where the folder holds no run, or `best_only` is asked of one that is not finished.
        Unsafe: where a link leads out of it.
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
    """Remove these files, with the run held meanwhile; returns them.

    Raises:
        ValueError: as `unneeded`.
        RuntimeError: where a process works on the run.
    """
    unneeded(path, best_only)  # what is no run is refused before anything is made in it
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
