"""A fork server without Ray: who starts ranks on a node, and what it keeps for the next."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from ray import cloudpickle

from hydro_rasda.backends.ray import fork_client
from hydro_rasda.backends.ray.fork_client import fork_rank, receive
from hydro_rasda.processes.temporary_folders import owner

JOB = {
    "config": {},
    "trial": "t",
    "rank": 0,
    "world_size": 1,
    "workers": 1,
    "gpus": 0,
    "threads": 1,
    "checkpoint": None,
}
JOB |= {"milestones": (), "checkpoint_every": None, "time_attr": "training_iteration", "owner": owner(os.getpid())}


def forked(digest: str, name: str) -> tuple[int, int, str]:
    """Fork a rank that says of which process it is, and by what name its function was sent."""

    def train(worker: Any) -> None:
        raise RuntimeError(f"{os.getppid()} {name}")

    with fork_rank(digest, cloudpickle.dumps((train, None)), dict(JOB)) as connection:
        kind, pid = receive(connection)
        assert kind == "hello", pid
        kind, text = receive(connection)
        assert (kind, receive(connection)[0]) == ("error", "died")
    server, sent = text.split()[-2:]
    return int(server), pid, sent


def test_one_process_of_a_node_forks_its_ranks_and_keeps_two_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_client, "_socket_path", lambda: str(tmp_path / "socket"))
    seen = list[tuple[int, int, str]]()
    try:
        seen = [forked(*each) for each in (("a", "1"), ("a", "2"), ("b", "3"), ("c", "4"), ("a", "5"))]
    finally:
        for server in {server for server, _, _ in seen}:
            os.kill(server, signal.SIGTERM)
    servers, pids, sent = zip(*seen)
    assert (len({*servers}), len({*pids})) == (1, 5)
    assert sent == ("1", "1", "3", "4", "5")


def test_a_rank_stands_where_its_trial_does_and_has_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever those of the process were that started the server."""

    def train(worker: Any) -> None:
        raise RuntimeError(f"{os.getppid()} {os.getcwd()} {os.environ.get('OF_THE_TRIAL')}")

    monkeypatch.setattr(fork_client, "_socket_path", lambda: str(tmp_path / "socket"))
    told = list[list[str]]()
    try:
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            monkeypatch.chdir(tmp_path / name)
            monkeypatch.setenv("OF_THE_TRIAL", name)
            with fork_rank("a", cloudpickle.dumps((train, None)), dict(JOB)) as connection:
                receive(connection)
                _, text = receive(connection)
            told.append(text.split()[-3:])
    finally:
        for server in {int(server) for server, *_ in told}:
            os.kill(server, signal.SIGTERM)
    assert [[where, value] for _, where, value in told] == [
        [str(tmp_path / name), name] for name in ("first", "second")
    ]
