"""Files that are there whole, or as they were, also where the power fails; and checkpoints that a disk has not changed.

Torch writes checkpoints as zip archives, with a checksum of each part, but does not look at it when it reads them.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import stat
import uuid
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

TEMPORARY = ".*.tmp"
"""Names of files that are being written, or were when their process was killed."""

WRITTEN_AS = "written_as"
"""Key of a run's checkpoints: the run's `id`, and the name of the file."""


class DamagedCheckpoint(RuntimeError):
    """A checkpoint is gone, or is not what was written; says which file, and what is wrong with it."""


class Unsafe(ValueError):
    """A run's folder through which another user of the machine could reach what is this user's."""


def refuse_links(*paths: Path) -> None:
    """Refuse what would be written elsewhere than it says: whoever put a link there may not be who owns its target.

    Raises:
        Unsafe: where one is a symbolic link.
    """
    for path in paths:
        if path.is_symlink():
            told = f"{path} is a link to {os.readlink(path)}, which would be written to"
            raise Unsafe(f"{told}: remove it, or choose another `name`")


def refuse_open_to_others(folder: Path) -> None:
    """Refuse a folder of pickled files, which run code when they are read, that others can write to.

    Raises:
        Unsafe: where it belongs to another user, or all users can write there.
    """
    found = folder.lstat()
    told = f"whoever can write to {folder} can have this run execute code"
    if os.getuid() not in (0, found.st_uid):  # root can be given any folder, as in containers
        raise Unsafe(f"{told}, and it belongs to another user ({found.st_uid}): choose another")
    if found.st_mode & stat.S_IWOTH:
        raise Unsafe(f"{told}, and all users can: `chmod o-w` it")


def append_to(path: Path) -> IO[bytes]:
    """A file opened to be gone on with, or made; a link is not followed."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "ab")


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file: it is there whole, or as it was, also where several processes write it at once."""
    with _replacing(path) as file:
        file.write(content)


def save_checkpoint(path: Path, payload: Mapping[str, Any]) -> None:
    """Write tensors and plain values: they are there whole, or as they were."""
    import torch  # here, as who reads a journal alone need not wait for it

    with _replacing(path) as file:
        torch.save(dict(payload), file)


def load_checkpoint(path: Path, device: str | torch.device | None = None, run: str = "") -> dict[str, Any]:
    """Read a checkpoint back; nothing in it can run code.

    Args:
        path: The file.
        device: Where its tensors come to lie; None: where they lay.
        run: The `id` of the run that it must belong to, under this name; empty for any.

    Raises:
        DamagedCheckpoint: where it cannot be read, or is not what was written.
    """
    import torch

    from fusion.backoff import is_out_of_memory

    try:
        with zipfile.ZipFile(path) as archive:
            if (part := archive.testzip()) is not None:
                raise zipfile.BadZipFile(f"the checksum of its part {part!r} is not that of what was written")
        loaded: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        told = f"the checkpoint {path} cannot be read: it holds more than tensors and plain values, and may run code"
        raise DamagedCheckpoint(told) from error
    except Exception as error:  # what a flipped bit makes of an archive is read in many ways
        if is_out_of_memory(error):
            raise
        raise DamagedCheckpoint(f"the checkpoint {path} cannot be read: {type(error).__name__}: {error}") from error
    written_as = loaded.pop(WRITTEN_AS, None)
    if run and written_as != [run, path.name]:
        raise DamagedCheckpoint(f"the checkpoint {path} is not the one that this run wrote there")
    return loaded


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file of a name of its own, which takes the place of `path` once it is written."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync_folder(path: Path) -> None:
    """Have the names in a folder outlast a loss of power: a file that is synced may else have none afterwards."""
    with contextlib.suppress(OSError):  # some systems have no way to do so
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have what the system cannot do, as where a disk is full, name a run's file, and say how to go on."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__  # torch raises its own over a file's
        if not isinstance(cause, OSError):
            raise
        goes_on = "once it can be written, the same call goes on from the last finished unit of work"
        raise OSError(cause.errno, f"{cause.strerror or cause}: {goes_on}", str(path)) from error
