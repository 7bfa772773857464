"""Checkpoints that nothing needs any more."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock, Timeout

from hydro_rasda.checks import require
from hydro_rasda.run.held import LOCK
from hydro_rasda.run.reading import read_record


def unneeded(path: str | Path, best_only: bool = False) -> list[Path]:
    """Files of a run that neither its result nor going on with it needs: the folder is only read.

    These are what a killed process left half written, and checkpoints that later ones took the place of. Of a run that
    is finished, also the sweep's.

    Args:
        path: The run's folder.
        best_only: Whether the best model is all that is to be kept: other finalists' models are then gone, and the run
            can no longer be extended.

    Raises:
        ValueError: where the folder holds no run, or `best_only` is asked of one that is not finished.
    """
    record = read_record(path)
    require(record.finished or not best_only, "path", str(path), "a finished run, where only its best model is kept")
    kept = {record.best_checkpoint} if best_only else set(record._checkpoints.values())
    folder = record.path / "checkpoints"
    replaced = [file for file in sorted(folder.glob("*.pt")) if file not in kept]
    if not record.finished:
        replaced = [file for file in replaced if file.name.startswith("target.")]
    return [*replaced, *sorted(folder.glob(".*.tmp")), *sorted(record.path.glob(".*.tmp"))]


def remove_unneeded(path: str | Path, best_only: bool = False) -> list[Path]:
    """Remove these files, with the run held meanwhile; returns them.

    Raises:
        ValueError: as `unneeded`.
        RuntimeError: where a process works on the run.
    """
    unneeded(path, best_only)  # what is no run is refused before anything is made in it
    folder = Path(path).expanduser().absolute()
    try:
        with FileLock(folder / LOCK, timeout=0):
            # Only now: before, another process may have been at work.
            files = unneeded(path, best_only)
            for file in files:
                file.unlink(missing_ok=True)
    except Timeout:
        raise RuntimeError(f"another process is working on the run in {folder}") from None
    return files
