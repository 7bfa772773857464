from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hydro_rasda import TuneResult, load
from hydro_rasda.contracts import Event
from hydro_rasda.run.events import MessageSaid
from hydro_rasda.run.messages import CHARS, MESSAGES, MOST, keep_message, read_messages


def test_what_is_said_can_be_read_later_and_is_not_repeated_by_who_goes_on(
    quick: Callable[..., TuneResult], tmp_path: Path
) -> None:
    said: list[str] = []

    def hear(event: Event) -> None:
        if isinstance(event, MessageSaid):
            said.append(event.text)

    quick(num_samples=4, callbacks=[hear])
    assert [message.text for message in load(tmp_path / "run").messages] == said
    again = quick(num_samples=4, callbacks=[hear])
    assert [message.text for message in again.messages] == list(dict.fromkeys(said))
    seconds = [message.seconds for message in again.messages]
    assert seconds == sorted(seconds)


def test_they_are_bounded(tmp_path: Path) -> None:
    keep_message(tmp_path, 1.0, "x" * 10 * CHARS)
    for number in range(MOST + 5):
        keep_message(tmp_path, 1.0, f"{number}")
    found = read_messages(tmp_path)
    assert len(found) == MOST
    assert found[0].text == "x" * CHARS


@pytest.mark.parametrize("bad", [b"{", b"3", b'{"seconds": "x", "text": 1}', b"\xff\xfe", b'{"text": "no time"}'])
def test_lines_that_cannot_be_read_are_left_out(tmp_path: Path, bad: bytes) -> None:
    keep_message(tmp_path, 1.0, "one")
    with (tmp_path / MESSAGES).open("ab") as file:
        file.write(bad + b"\n")
    keep_message(tmp_path, 2.0, "two")
    assert [message.text for message in read_messages(tmp_path)] == ["one", "two"]
