"""What a run has said: a line of JSON for each message, beside the journal, of which nothing depends on it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import NamedTuple

from hydro_rasda.run.files import Unsafe, append_to, parse_json, read_file

MESSAGES = "messages.jsonl"

MOST, CHARS = 1000, 2000
"""So many messages are kept of a run, the first ones, and so much of each."""


class Message(NamedTuple):
    """Something that a user should read.

    Attributes:
        seconds: Wall time of the run when it was said, interrupted sessions included.
    """

    seconds: float
    text: str


def keep_message(folder: Path, seconds: float, text: str) -> None:
    """Keep what a run says. What was said before is not kept again: a run that goes on is played through again."""
    text = text[:CHARS]
    known = read_messages(folder)
    if len(known) >= MOST or any(message.text == text for message in known):
        return
    line = {"seconds": round(seconds, 3), "text": text}
    with contextlib.suppress(OSError, Unsafe), append_to(folder / MESSAGES) as file:  # the journal tells of a full disk
        file.write(json.dumps(line).encode() + b"\n")


def read_messages(folder: Path) -> list[Message]:
    """What a run has said so far, in order; lines that cannot be read are left out."""
    found = []
    with contextlib.suppress(OSError, Unsafe):
        for raw in read_file(folder / MESSAGES).splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):  # of an integer without end
                line = parse_json(raw)
                found.append(Message(float(line["seconds"]), str(line["text"])))
    return found
