"""Setting aside the results of other code as a separate run, since its scores do not compare with new ones."""

from __future__ import annotations

import contextlib
from itertools import count
from pathlib import Path

from hydro_rasda.run.files import read_file, refuse_links, sync_folder, write_atomically
from hydro_rasda.run.journal import JOURNAL
from hydro_rasda.run.messages import MESSAGES

ASIDE = "before-"
"""Beginning of the name of such a run's folder; a number from 1 follows."""

# The journal moves last: a folder without it is left by a process that was killed on the way.
_MOVED = ("checkpoints", MESSAGES, JOURNAL)


def set_aside(path: Path) -> str:
    """Move the results of the run in a folder into a folder inside it, which is then a separate run.

    If the process is killed on the way, the next one moves the rest to the same place.

    Args:
        path: The run's folder, locked by this process. Its `run.json` is copied, and stays until another is written.

    Returns:
        A message on the move; empty if there was nothing to move.
    """
    if not (path / JOURNAL).exists():
        return ""
    aside = next(to for to in (path / f"{ASIDE}{number}" for number in count(1)) if not (to / JOURNAL).exists())
    refuse_links(aside)
    aside.mkdir(exist_ok=True)
    write_atomically(aside / "run.json", read_file(path / "run.json"))
    for name in _MOVED:
        with contextlib.suppress(FileNotFoundError):
            (path / name).rename(aside / name)
        sync_folder(aside)
    sync_folder(path)
    (path / "checkpoints").mkdir(exist_ok=True)
    return (
        f"scores by other code or data do not compare with those to come: what was trained so far is the run "
        f"{str(aside)!r} from now on, and this one begins anew"
    )
