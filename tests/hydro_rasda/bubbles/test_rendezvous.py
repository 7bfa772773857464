"""The meeting of a sweep and its guests: who gets in, and who learns that nobody is there."""

from __future__ import annotations

import json
import os
import socket
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

import pytest

from hydro_rasda.bubbles import rendezvous
from hydro_rasda.bubbles.rendezvous import MEETING, Rendezvous, Silent, connect, hang_up


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


def test_a_machine_that_lost_power_is_noticed_and_a_door_outlasts_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, errors = socket.socket.accept, [OSError("Too many open files")]

    def fails_once(server: socket.socket) -> tuple[socket.socket, object]:
        if errors:
            raise errors.pop()
        return accept(server)

    monkeypatch.setattr(socket.socket, "accept", fails_once)
    came = SimpleQueue[Connection]()
    door = Rendezvous(tmp_path, came.put)
    guest = connect(tmp_path)
    for connection in (guest, came.get(timeout=60)):
        with socket.socket(fileno=os.dup(connection.fileno())) as end:
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
        connection.close()
    door.close()


def test_a_program_that_does_not_greet_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_GREET_S", 0.2)
    with socket.create_server(("", 0)) as server:
        where = {"host": socket.gethostname(), "port": server.getsockname()[1], "key": "00" * 32}
        (tmp_path / MEETING).write_text(json.dumps(where))
        with pytest.raises(Silent, match=r"does not answer: end it, or remove .*sweep\.json"):
            Rendezvous(tmp_path, lambda connection: None)
