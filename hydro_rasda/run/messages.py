"""The messages of a run: a line of JSON each, in a file beside the journal. Nothing depends on them."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import NamedTuple

from hydro_rasda.run.files import Unsafe, append_to, parse_json, read_file

MESSAGES = "messages.jsonl"

MOST, CHARS = 1000, 2000
"""Most messages of a run that are kept, the first ones, and most characters of each."""


class Message(NamedTuple):
    """A text for the user, and the wall time of the run when it was said, interrupted sessions included."""

    seconds: float
    text: str


def keep_message(folder: Path, seconds: float, text: str) -> None:
    """Keep a message, unless it was kept before: a resumed run repeats its messages."""
    text = text[:CHARS]
    known = read_messages(folder)
    if len(known) >= MOST or any(message.text == text for message in known):
        return
    line = {"seconds": round(seconds, 3), "text": text}
    with contextlib.suppress(OSError, Unsafe), append_to(folder / MESSAGES) as file:  # the journal tells of a full disk
        file.write(json.dumps(line).encode() + b"\n")


def read_messages(folder: Path) -> list[Message]:
    """Read the messages of a run so far, in order; lines that cannot be read are left out."""
    found = []
    with contextlib.suppress(OSError, Unsafe):
        for raw in read_file(folder / MESSAGES).splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):  # of an integer without end
                line = parse_json(raw)
                found.append(Message(float(line["seconds"]), str(line["text"])))
    return found
