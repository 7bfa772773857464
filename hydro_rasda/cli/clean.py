"""`clean`: list the files of a run that nothing needs, ask, and remove them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import typer

from hydro_rasda.cli.output import print_json, say, size
from hydro_rasda.common.argument_checks import require
from hydro_rasda.common.console import one_line
from hydro_rasda.common.short_values import counted
from hydro_rasda.records.record_from_journal import read_record
from hydro_rasda.run.claim import hold
from hydro_rasda.run.files import TEMPORARY, matching, remove


def unneeded(path: str | Path, best_only: bool = False) -> list[Path]:
    """List the files that are needed neither for a run's result nor for resuming the run. Remove nothing.

    These are files that a killed process left half written, and checkpoints that later checkpoints replaced. If the run
    is finished, they include the sweep's checkpoints, unless `stop_at` ended the sweep. With `best_only`, they also
    include the models of all finalists but the best; without these models, the run cannot be extended.
    """
    record = read_record(path)
    require(record.finished or not best_only, "path", str(path), "a finished run, where only its best model is kept")
    kept = [record.best_checkpoint] if best_only else record._needed
    folder = record.path / "checkpoints"
    replaced = [file for file in matching(folder, "*.pt", 1) if file not in kept]
    if not record.finished:
        replaced = [file for file in replaced if file.name.startswith("race.")]
    return [*replaced, *matching(folder, TEMPORARY, 1), *matching(record.path, TEMPORARY)]


def remove_unneeded(path: str | Path, best_only: bool = False) -> list[Path]:
    """Lock the run, remove the files of `unneeded`, and return them. Raise RuntimeError if a process works on it."""
    unneeded(path, best_only)  # raises for a folder without a run, before `hold` makes a lock file there
    folder = Path(path).expanduser().absolute()
    lock = hold(folder)
    try:
        # List the files only once the run is locked, because another process may have worked on the run until then.
        files = unneeded(path, best_only)
        for file in files:
            remove(file, inside=len(file.relative_to(folder).parts))
    finally:
        lock.release()
    return files


def clean_run(path: str, best_only: bool, yes: bool, as_json: bool) -> bool:
    """Remove the files that a run does not need, after asking; return False if the user said no."""
    files = unneeded(path, best_only)
    sizes = _sizes(files)
    if as_json:
        removed = remove_unneeded(path, best_only) if yes else []
        told = [{"path": str(file), "bytes": count, "removed": file in removed} for file, count in sizes.items()]
        print_json({"bytes": sum(sizes.values()), "files": told})
        return True
    if not files:
        say(f"nothing to free: {_kept(Path(path), best_only)}")
        return True
    for file, count in sizes.items():
        say(f"{size(count):>8}  {one_line(file.name)}")
    warning = "; the run can then not be extended, and other finalists' models are gone" if best_only else ""
    print(f"{counted(len(files), 'file')}, {size(sum(sizes.values()))}{warning}")
    if not yes and not typer.confirm("remove them?"):
        return False
    removed = remove_unneeded(path, best_only)
    print(f"freed {size(sum(sizes.get(file, 0) for file in removed))}")
    return True


def _kept(path: Path, best_only: bool) -> str:
    left = matching(path.expanduser() / "checkpoints", "*.pt", 1)
    if not left:
        return "there are no checkpoints"
    total = size(sum(_sizes(left).values()))
    more = "" if best_only else "; see --best-only"
    return f"{counted(len(left), 'file')} ({total}) of models may be asked for, or needed to resume{more}"


def _sizes(files: Sequence[Path]) -> dict[Path, int]:
    found = {}
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            found[file] = file.lstat().st_size
    return found
