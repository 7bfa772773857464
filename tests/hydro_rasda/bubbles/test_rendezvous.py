"""The meeting of a sweep and its guests: who gets in, and who learns that nobody is there."""

from __future__ import annotations

import json
import socket
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

import pytest

from hydro_rasda.bubbles.rendezvous import MEETING, Rendezvous, connect, hang_up


def test_a_guest_and_its_sweep_know_each_other_by_the_key_in_the_folder(tmp_path: Path) -> None:
    came = SimpleQueue[Connection]()
    source = tmp_path / "folder" / "source"
    door = Rendezvous(source, came.put)
    file = source / MEETING
    assert file.stat().st_mode & 0o077 == 0, "the key is for this user alone"
    guest = connect(source)
    sweep = came.get(timeout=60)
    sweep.send_bytes(b"hello")
    assert guest.recv_bytes() == b"hello"
    # One without the key is not let in.
    where = json.loads(file.read_text())
    file.write_text(json.dumps(where | {"key": "00" * 32}))
    with pytest.raises(OSError, match=r"sweep\.json is of a sweep that has ended"):
        connect(source)
    assert came.empty()
    file.write_text(json.dumps(where))
    # Nor is another sweep.
    with pytest.raises(ValueError, match="a folder of one sweep at a time"):
        Rendezvous(source, came.put)
    hang_up(sweep)
    with pytest.raises((EOFError, OSError)):
        guest.recv_bytes()
    door.close()
    assert not file.exists()
    with pytest.raises(OSError, match="No such file"):
        connect(source)
    Rendezvous(source, came.put).close()
    for connection in (guest, sweep):
        connection.close()


def test_a_file_that_a_killed_sweep_left_keeps_no_other_away(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    left = {"host": socket.gethostname(), "port": port, "key": "00" * 32}
    for content in (json.dumps(left), "{}", "no json"):
        (tmp_path / MEETING).write_text(content)
        Rendezvous(tmp_path, lambda connection: None).close()
