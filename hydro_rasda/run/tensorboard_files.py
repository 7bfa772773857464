"""TensorBoard's event files, written at once: if a process is killed, nothing is lost that it has logged.

A file is a sequence of records: the length of an event, the event, and a checksum of each. The writer of tensorboardX
is not used: it delays events by two minutes, and needs a thread, a pipe and an open file for each trial that trains.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydro_rasda.run.files import append_to, open_to_read

_PATTERN = "*.tfevents.*"

_HEAD, _TAIL = 12, 4
"""Bytes of a record before its event, and after its event."""


class EventFile:
    """A file to which this process appends events. Its name sorts after the names of earlier processes.

    Args:
        folder: The folder of the file, which TensorBoard shows as a run. It is created with the first event.
        inside: Number of last names of the folder's path that lie in the run's folder. The names before may be links.
    """

    def __init__(self, folder: Path, inside: int = 0) -> None:
        self._path, self._inside = folder / f"events.out.tfevents.{time.time():.6f}.hydro_rasda", inside + 1

    def append(self, summaries: Sequence[Any], step: int = 0) -> None:
        """Append one event for each `Summary` message, all in one write."""
        from tensorboardX.proto.event_pb2 import Event

        self._path.parent.mkdir(parents=True, exist_ok=True)
        now = time.time()
        with append_to(self._path, self._inside) as file:
            first = [] if file.tell() else [Event(wall_time=now, file_version="brain.Event:2")]
            events = [*first, *(Event(wall_time=now, step=step, summary=each) for each in summaries)]
            file.write(b"".join(map(_record, events)))


def tag_of(name: str) -> str:
    """Return the tag of a metric. TensorBoard's tags have no spaces."""
    return name.replace(" ", "_")


def scalars(values: Mapping[str, float]) -> Any:
    """Return a `Summary` of values by name."""
    from tensorboardX.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=tag_of(name), simple_value=value) for name, value in values.items()])


def last_steps(folder: Path, inside: int = 0) -> dict[str, int]:
    """Return the last step of each tag in a folder's event files. A record that was cut off does not count."""
    found: dict[str, int] = {}
    for path in sorted(folder.glob(_PATTERN)):
        for event in _events(path, inside + 1):
            for value in event.summary.value:
                found[value.tag] = max(event.step, found.get(value.tag, 0))
    return found


def _record(event: Any) -> bytes:
    from tensorboardX.record_writer import masked_crc32c

    content = event.SerializeToString()
    length = struct.pack("<Q", len(content))
    return b"".join([length, _checksum(masked_crc32c(length)), content, _checksum(masked_crc32c(content))])


def _checksum(value: int) -> bytes:
    return struct.pack("<I", value)


def _events(path: Path, inside: int) -> Iterator[Any]:
    from google.protobuf.message import DecodeError
    from tensorboardX.proto.event_pb2 import Event

    with open_to_read(path, inside) as file:
        content = file.read()
    at = 0
    while at + _HEAD <= len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        end = at + _HEAD + length
        if end + _TAIL > len(content):
            return
        try:
            yield Event.FromString(content[at + _HEAD : end])
        except DecodeError:
            return
        at = end + _TAIL
