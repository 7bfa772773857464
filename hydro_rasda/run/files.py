"""All access to the files of a run: writes are atomic, and no path in a run's folder leads out of it.

The folder itself may be a link that its user made. Within it, links, devices and FIFOs are refused. Each part of a path
is opened relative to its parent, so that no part can be exchanged between a check and its use.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import json
import os
import stat
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

TEMPORARY = ".*.tmp"
"""Pattern of the names of temporary files, some of which are left by processes that were killed."""

SPEC_BYTES = 2**26
"""Largest size in bytes of a file that is read as a whole, such as `run.json`; larger files are refused."""

NESTED = 100
"""Largest number of nested levels of lists and objects in JSON; deeper values are refused."""

TRUST = "HYDRO_RASDA_TRUST_SHARED_FOLDERS"
"""Environment variable. If set, pickled files are also read from folders that other users own or can write to."""

_ASIDE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Unsafe(ValueError):
    """A run's folder through which another user of the machine could reach this user's files."""


def refuse_links(*paths: Path) -> None:
    """Raise Unsafe for symbolic links, because another user may have made a link to this user's files."""
    for path in paths:
        if path.is_symlink():
            told = f"{path} is a link to {os.readlink(path)}, and links in a run's folder are not followed"
            raise Unsafe(f"{told}: remove it, or choose another `name`")


def refuse_open_to_others(folder: Path) -> None:
    """Raise Unsafe for a folder that others own or can write to, because pickled files run code when they are read.

    If the folder is a link, the link must belong to this user, too. If `TRUST` is set, all folders are allowed.
    """
    _refuse_shared(folder, folder.stat(), folder.lstat())


def open_pickled(path: Path) -> IO[bytes]:
    """Open a pickled file for reading. Raise Unsafe if others could have written it, or as in `open_regular`."""
    refuse_open_to_others(path.parent)
    file = open_to_read(path)
    try:
        _refuse_shared(path, os.fstat(file.fileno()))
    except BaseException:
        file.close()
        raise
    return file


def _refuse_shared(path: Path, found: os.stat_result, *links: os.stat_result) -> None:
    if os.environ.get(TRUST):
        return
    told = f"whoever can write to {path} can have this run execute code"
    trusting = f"set {TRUST}=1 if you trust them with your account"
    for each in (found, *links):
        if os.getuid() not in (0, each.st_uid):  # root may use another user's folder, which is usual in containers
            raise Unsafe(f"{told}, and it belongs to another user ({each.st_uid}): choose another, or {trusting}")
    for writes, others, letter in ((stat.S_IWOTH, "all users", "go"), (stat.S_IWGRP, "its group", "g")):
        if found.st_mode & writes:
            raise Unsafe(f"{told}, and {others} can: `chmod {letter}-w` it, or {trusting}")


def make_private(folder: Path, exist_ok: bool = True) -> None:
    """Create a run's folder that only its user can enter; an existing folder keeps its mode."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=exist_ok)


def make_inner(folder: Path) -> None:
    """Create a folder in a run's folder if it does not exist. Raise Unsafe if a file is in its place."""
    try:
        folder.mkdir(exist_ok=True)
    except FileExistsError:
        raise Unsafe(f"{folder} must be a folder, but is none: remove it, or choose another `name`") from None


def refuse_irregular(path: Path) -> None:
    """Raise Unsafe if something other than a regular file is in the place of a run's file."""
    if path.exists() and not path.is_file():
        raise _irregular(path)


def open_regular(path: Path, flags: int = os.O_RDONLY, inside: int = 1) -> int:
    """Open a file of a run and return its descriptor; refuse anything but a regular file.

    Args:
        inside: Number of names at the end of the path that lie in the run's folder. Earlier names may be links.

    Raises:
        Unsafe: if the path is a link, a device, a FIFO or a folder, or if it leads through a link inside the run's
            folder.
        OSError: if it cannot be opened.
    """
    with _folder(path.parent, inside - 1) as folder:
        return _open_in(folder, path, flags)


def _open_in(folder: int, path: Path, flags: int) -> int:
    """Open a regular file in an open folder, the path's parent; see `open_regular`."""
    try:
        found = os.open(path.name, flags | _ASIDE, 0o666, dir_fd=folder)
    except OSError as error:
        raise _told(error, path) from None
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise _irregular(path)
    return found


@contextlib.contextmanager
def _folder(path: Path, inside: int) -> Iterator[int]:
    """Keep a folder open within the context, and yield its descriptor.

    The last `inside` names of its path lie in the run's folder and must not be links.
    """
    found = _open_folder(path, inside)
    try:
        yield found
    finally:
        os.close(found)


def _open_folder(path: Path, inside: int) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    if not inside:
        return os.open(path, flags)
    above = _open_folder(path.parent, inside - 1)
    try:
        return os.open(path.name, flags | os.O_NOFOLLOW, dir_fd=above)
    except OSError as error:
        raise _told(error, path) from None
    finally:
        os.close(above)


def _told(error: OSError, path: Path) -> Exception:
    """Return the error for a path that cannot be opened: `Unsafe` for an irregular file, else the system's error."""
    refuse_links(path)
    if error.errno in (errno.ENXIO, errno.ENODEV, errno.EISDIR):
        return _irregular(path)
    return OSError(error.errno, error.strerror, str(path))


def _irregular(path: Path) -> Unsafe:
    return Unsafe(f"{path} must be a regular file, but is none: remove it, or choose another `name`")


def open_to_read(path: Path, inside: int = 1) -> IO[bytes]:
    """Open a file of a run for reading; see `open_regular`."""
    return os.fdopen(open_regular(path, os.O_RDONLY, inside), "rb")


def open_to_write(path: Path, inside: int = 1) -> IO[bytes]:
    """Create or empty a file of a run, and open it for writing; see `open_regular`."""
    return os.fdopen(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, inside), "wb")


def read_file(path: Path, inside: int = 1, most: int = SPEC_BYTES) -> bytes:
    """Read a file of a run. Raise Unsafe if it has more than `most` bytes; for other errors, see `open_regular`."""
    with open_to_read(path, inside) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise Unsafe(f"{path} has more than {most} bytes, the most that is read of it")
    return content


def parse_json(raw: bytes) -> Any:
    """Parse strict JSON. Raise ValueError for invalid JSON, NaN, an infinity, or more than `NESTED` levels."""
    try:
        value = _STRICT.decode(raw.decode())
        deep = _is_deep(raw, value)
    except RecursionError:
        deep = True
    if deep:
        raise ValueError(f"it is nested more than {NESTED} levels deep")
    return value


def parse_json_lines(raws: Sequence[bytes]) -> list[Any]:
    """Parse lines of JSON as one list. Raise ValueError if `parse_json` would refuse a line.

    This takes less time and memory than parsing line by line, because the lines then share their keys.
    """
    values: list[Any] = _STRICT.decode((b"[" + b",".join(raws) + b"]").decode())
    if len(values) != len(raws) or any(map(_is_deep, raws, values)):
        raise ValueError("a line is no value of JSON")
    return values


def _finite(text: str) -> float:
    value = float(text)
    if value - value:  # 0 if the value is finite, else NaN, which counts as true; quicker than `math.isfinite`
        raise ValueError(f"{text} is no number of JSON's")
    return value


_STRICT = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def _is_deep(raw: bytes, value: Any) -> bool:
    if raw.count(b"[") + raw.count(b"{") <= NESTED:
        return False
    level = [value]
    for _ in range(NESTED):
        parts = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, (dict, list))]
        level = [item for part in parts for item in part]
    return any(isinstance(item, (dict, list)) for item in level)


def read_json(path: Path) -> Any:
    """Read a file of a run as JSON; see `read_file` and `parse_json`."""
    return parse_json(read_file(path))


def matching(folder: Path, pattern: str, inside: int = 0) -> list[Path]:
    """List the files of a folder whose names match `pattern`, sorted; none if the folder does not exist.

    The folder lies `inside` levels below the run's folder.
    """
    try:
        with _folder(folder, inside) as found:
            return [folder / name for name in sorted(os.listdir(found)) if fnmatch.fnmatchcase(name, pattern)]
    except FileNotFoundError:
        return []


def remove(path: Path, inside: int = 1) -> None:
    """Remove a file of a run, if it exists; if it is a link, remove the link."""
    with contextlib.suppress(FileNotFoundError), _folder(path.parent, inside - 1) as folder:
        os.unlink(path.name, dir_fd=folder)


def truncate(path: Path, length: int) -> None:
    """Cut a file of a run to a length in bytes."""
    with os.fdopen(open_regular(path, os.O_WRONLY), "wb", buffering=0) as file:
        file.truncate(length)


def append_to(path: Path, inside: int = 1) -> IO[bytes]:
    """Open a file of a run to append to it, or create it; see `open_regular`."""
    return os.fdopen(open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, inside), "ab")


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that it has the old or the new content, even if several processes write it at once."""
    with replacing(path) as file:
        file.write(content)


@contextlib.contextmanager
def replacing(path: Path, inside: int = 1) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces `path` when the context ends."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    with _folder(path.parent, inside - 1) as folder:
        try:
            with os.fdopen(_open_in(folder, temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary.name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            _sync(folder)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary.name, dir_fd=folder)
            raise


def sync_folder(path: Path) -> None:
    """Sync the names in a folder, because a synced file might otherwise have no name after a loss of power."""
    with contextlib.suppress(OSError), _folder(path, 0) as folder:
        _sync(folder)


def _sync(folder: int) -> None:
    with contextlib.suppress(OSError):  # some systems cannot sync a folder
        os.fsync(folder)


WRITABLE = "make it writable, or choose another `storage_path` (`hydro_rasda.load` reads a run without writing)"
"""Advice for a run's folder that cannot be written."""

_GOES_ON = "once it can be written, the same call goes on from the last finished unit of work"


@contextlib.contextmanager
def naming(path: Path, hint: str = _GOES_ON) -> Iterator[None]:
    """Within the context, let system errors, such as a full disk, name the run's file and say how to continue."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # If torch cannot write a file, it may raise a RuntimeError that has the system's error as its context.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        if cause.errno == errno.EISDIR:
            raise _irregular(path) from error
        raise OSError(cause.errno, f"{cause.strerror or cause}: {hint}", str(path)) from error
