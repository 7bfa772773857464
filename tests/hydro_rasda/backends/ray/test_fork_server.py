"""A fork server without Ray: who starts ranks on a node, and what it keeps for the next."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray import cloudpickle

from hydro_rasda.backends.ray import fork_client
from hydro_rasda.backends.ray.fork_client import fork_rank, receive
from tests.hydro_rasda.backends.ray.trainables import job


def forked(digest: str, name: str) -> tuple[int, int, str]:
    """Fork a rank that says of which process it is, and by what name its function was sent."""

    def train(worker: Any) -> None:
        raise RuntimeError(f"{os.getppid()} {name}")

    with fork_rank(digest, cloudpickle.dumps((train, None)), job()) as connection:
        kind, pid = receive(connection)
        assert kind == "hello", pid
        kind, text = receive(connection)
        assert (kind, receive(connection)[0]) == ("error", "died")
    server, sent = text.split()[-2:]
    return int(server), pid, sent


def sleeping() -> bytes:
    """A function that no module has, which the server would import, and no data."""

    def train(worker: Any) -> None:
        time.sleep(1200)  # it is killed before

    payload: bytes = cloudpickle.dumps((train, None))
    return payload


def wait_for_end(*processes: psutil.Process) -> bool:
    """Wait for a minute until all processes have ended; kill the others, and return whether there were none."""
    _, alive = psutil.wait_procs(processes, timeout=60)
    for process in alive:
        process.kill()
    return not alive


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Start a fork server for all tests that neither end nor replace it, since each start takes seconds."""
    folder = tmp_path_factory.mktemp("server")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_client, "_private_folder", lambda: str(folder))
        patch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)  # Lightning sets it
        # A server without ranks ends after a minute, which a busy machine may take between two tests.
        with fork_rank("stays", sleeping(), job()) as rank:
            kind, pid = receive(rank)
            assert kind == "hello", pid
            server = psutil.Process(pid).ppid()
            yield server
            os.kill(pid, signal.SIGKILL)
        left = psutil.Process(server).children()  # ranks whose clients have left, which would outlive it
        assert wait_for_end(*left), "the clients of these ranks have left"
        os.kill(server, signal.SIGTERM)


def socket_of_the_server() -> str:
    (path,) = [str(path) for path in Path(fork_client._private_folder()).iterdir() if path.is_socket()]
    return path


def test_one_process_of_a_node_forks_its_ranks_and_keeps_two_functions(server: int) -> None:
    """The two that ranks had last: "b" makes room for "c", although "a" came before it."""
    seen = [forked(*each) for each in zip("aabacba", "1234567")]
    servers, pids, sent = zip(*seen)
    assert ({*servers}, len({*pids})) == ({server}, 7)
    assert sent == ("1", "1", "3", "1", "5", "6", "7")


def test_a_rank_stands_where_its_trial_does_and_has_its_environment(
    server: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever those of the process were that started the server, which may ask for GPUs without using CUDA."""

    def train(worker: Any) -> None:
        check = "PYTORCH_NVML_BASED_CUDA_CHECK"
        of_server = f"{check}=1" in Path(f"/proc/{os.getppid()}/environ").read_text().split("\0")
        checks = f"{of_server} {check in os.environ}"
        raise RuntimeError(f"{os.getppid()} {os.getcwd()} {os.environ.get('OF_THE_TRIAL')} {checks}")

    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    told = list[list[str]]()
    of_rank_0: dict[str, Any] = {"cwd": str(tmp_path / "second")}
    for name, more in (("first", {}), ("second", {"cwd": "/not/on/this/node"}), ("third", of_rank_0)):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        monkeypatch.setenv("OF_THE_TRIAL", name)
        with fork_rank("where it stands", cloudpickle.dumps((train, None)), job(**more)) as connection:
            receive(connection)
            _, text = receive(connection)
        told.append(text.split()[-5:])
    stands = {"first": "first", "second": "second", "third": "second"}
    assert told == [[str(server), str(tmp_path / at), name, "True", "False"] for name, at in stands.items()]


def test_a_configuration_may_hold_functions_and_classes_of_a_script(server: int) -> None:
    """As in Ray Tune: their class is that which the training function knows."""

    class Own:
        pass

    def train(worker: Any) -> None:
        config = worker.config
        raise RuntimeError(f"{config['plus'](1)} {isinstance(config['made'], Own)} {config['kind'] is Own}")

    config = {"plus": lambda number: number + 1, "made": Own(), "kind": Own}
    with fork_rank("of a script", cloudpickle.dumps((train, None)), job(config=config)) as connection:
        receive(connection)
        _, text = receive(connection)
    assert text.split()[-3:] == ["2", "True", "True"]


class Missing:
    """Data in a file that this node does not have."""

    def __reduce__(self) -> Any:
        return open, ("/no/such",)


def test_the_server_outlives_data_that_cannot_be_loaded_and_those_that_start_a_process(server: int) -> None:
    def start() -> tuple[int, int]:
        return os.getpid(), subprocess.Popen(["sleep", "0.2"]).pid

    class Starts:
        def __reduce__(self) -> Any:
            return start, ()

    def train(worker: Any) -> None:
        loaded_by, child = worker.data
        while Path(f"/proc/{child}").exists():
            time.sleep(0.01)
        raise RuntimeError(f"{os.getppid()} {loaded_by}")

    with fork_rank("missing", cloudpickle.dumps((train, Missing())), job()) as connection:
        kind, text = receive(connection)
    told = list[str]()
    for _ in range(2):
        with fork_rank("starts", cloudpickle.dumps((train, Starts())), job()) as connection:
            receive(connection)
            told += receive(connection)[1].split()[-2:]
    assert (kind, "cannot be loaded" in text, "/no/such" in text) == ("error", True, True)
    assert {*told} == {str(server)}


def test_a_folder_whose_sockets_would_have_too_long_names_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_client, "_private_folder", lambda: str(tmp_path / ("x" * 100)))
    with (
        pytest.raises(ValueError, match=r"`TMPDIR` is .*, but must be shorter: .* at most 107 are allowed"),
        fork_rank("a", b"", job()),
    ):
        pass


STOPPED = """
import os, pickle, signal, socket, struct, sys

path, stage = sys.argv[1:]
client = socket.socket(socket.AF_UNIX)
client.connect(path)
request = pickle.dumps(("new", {}))
if stage != "connected":
    socket.send_fds(client, [b"2"], [1, 2])
if stage == "half a request":
    client.sendall(struct.pack("!i", len(request)) + request[:-3])
if stage == "half a function":
    client.sendall(struct.pack("!i", len(request)) + request)
    client.recv(1)
    client.sendall(struct.pack("!i", 1000) + bytes(10))
os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.slow
def test_a_client_that_is_stopped_halts_nobody_else(server: int) -> None:
    """Not even those that need the function of which it has sent a half."""
    seen = [forked("sent before", "first")]
    path = socket_of_the_server()
    stopped = list[subprocess.Popen[bytes]]()
    try:
        for stage in ("half a function", "half a request", "files", "connected"):
            stopped.append(subprocess.Popen([sys.executable, "-c", STOPPED, path, stage]))
            os.waitid(os.P_PID, stopped[-1].pid, os.WSTOPPED)
        for name in ("sent before", "new", "new"):
            with ThreadPoolExecutor(1) as thread:
                rank = thread.submit(forked, name, name)
                try:
                    seen.append(rank.result(60))
                finally:
                    if not rank.done():  # the thread ends once the server goes on
                        end(stopped)
    finally:
        end(stopped)
    servers, pids, sent = zip(*seen)
    assert ({*servers}, len({*pids})) == ({server}, 4)
    assert sent == ("first", "first", "new", "new")


def test_a_rank_ends_when_its_client_leaves(server: int) -> None:
    with fork_rank("leaves", sleeping(), job()) as connection:
        kind, pid = receive(connection)
        assert kind == "hello", pid
        rank = psutil.Process(pid)
        assert rank.is_running()
    assert wait_for_end(rank)


def test_a_rank_is_forked_beside_another_while_a_client_has_asked_for_nothing_yet(server: int) -> None:
    seen = [forked("known", "first")]
    with (
        fork_rank("sleeps", sleeping(), job()) as running,
        socket.socket(socket.AF_UNIX) as silent,
    ):
        assert receive(running)[0] == "hello"
        silent.connect(socket_of_the_server())
        seen += [forked("known", "second"), forked("unknown", "third")]
        assert not running.poll(0)
    servers, pids, sent = zip(*seen)
    assert ({*servers}, len({*pids})) == ({server}, 3)
    assert sent == ("first", "first", "third")


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_job_trains_what_its_modules_say_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server keeps what it has imported, so that the next job gets a server of its own."""
    monkeypatch.setattr(fork_client, "_private_folder", lambda: str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    told = list[list[str]]()
    try:
        for version in ("old", "edited"):
            body = f"raise RuntimeError(f'{{os.getppid()}} {version}')"
            (tmp_path / "module_of_a_script.py").write_text(f"import os\n\n\ndef train(worker):\n    {body}\n")
            payload = cloudpickle.dumps((importlib.import_module("module_of_a_script").train, None))
            with fork_rank("a", payload, job(ray_job=version)) as connection:
                receive(connection)
                _, text = receive(connection)
            told.append(text.split()[-2:])
    finally:
        sys.modules.pop("module_of_a_script", None)
        for server in {int(server) for server, _ in told}:
            with contextlib.suppress(ProcessLookupError):  # on a busy machine, the first has been idle for a minute
                os.kill(server, signal.SIGTERM)
    assert [version for _, version in told] == ["old", "edited"]


@pytest.mark.slow
def test_the_server_ends_with_its_guardian_that_nobody_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the node's raylet whose parent is a container's first process: it stays a zombie."""
    monkeypatch.setattr(fork_client, "_private_folder", lambda: str(tmp_path))
    guardian = subprocess.Popen(["sleep", "1000"])
    monkeypatch.setattr(os, "getppid", lambda: guardian.pid)
    server, _, _ = forked("a", "1")
    try:
        guardian.kill()
        os.waitid(os.P_PID, guardian.pid, os.WEXITED | os.WNOWAIT)
        until = time.monotonic() + 30
        while (ended := not Path(f"/proc/{server}").exists()) is False and time.monotonic() < until:
            time.sleep(0.05)
    finally:
        guardian.wait()
        if not ended:
            os.kill(server, signal.SIGTERM)
    assert ended
