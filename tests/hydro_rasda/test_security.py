"""Attacks by other users of the machine, each of which fails."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import socket
import struct
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hydro_rasda import load
from hydro_rasda.backends.process_pool import PROBLEM, read_shared, write_shared
from hydro_rasda.backends.ray import fork_client
from hydro_rasda.bubbles import bubbles
from hydro_rasda.bubbles.rendezvous import Rendezvous
from hydro_rasda.cli import main
from hydro_rasda.common.console import PrintableConsole
from hydro_rasda.loggers import CSVLogger, TensorBoardLogger
from hydro_rasda.packing import Device, pack
from hydro_rasda.records.record_from_journal import read_record
from hydro_rasda.results.progress import Progress
from hydro_rasda.run.checkpoints import load_checkpoint
from hydro_rasda.run.crash_log import DOING, CrashLog
from hydro_rasda.run.events import EpochEnded, HeatBegan, MessageSaid, RunBegan
from hydro_rasda.run.files import TRUST, Unsafe, refuse_open_to_others
from hydro_rasda.run.journal import JOURNAL, MESSAGES, keep_message
from hydro_rasda.run.run_folder import Store
from hydro_rasda.run.run_json import read_asked
from hydro_rasda.simulator.past_run import read_run
from hydro_rasda.training.distributed import listening_store
from tests.hydro_rasda.journals import signed, write_run

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's folder for temporary files, in which everybody can write."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    return folder


def mine(temporary: Path, name: str) -> Path:
    return temporary / f"hydro_rasda-{os.getuid()}-{name}"


def test_sockets_lie_in_a_folder_that_nobody_else_can_enter(temporary: Path) -> None:
    found = Path(fork_client._socket_path("a job")).parent
    assert found.parent == temporary
    assert found.lstat().st_mode & 0o777 == 0o700
    assert Path(fork_client._socket_path("a job")).parent == found


def test_what_others_put_under_its_name_is_passed_over(temporary: Path, tmp_path: Path) -> None:
    """A link to a folder of the user's own, to be turned elsewhere once it was looked at; folders open to others."""
    (tmp_path / "private").mkdir(mode=0o700)
    mine(temporary, "0").symlink_to(tmp_path / "private")
    mine(temporary, "1").mkdir()
    mine(temporary, "1").chmod(0o777)
    mine(temporary, "2").touch()
    mine(temporary, "3").symlink_to(tmp_path / "nowhere")
    if os.getuid() == 0:
        mine(temporary, "4").mkdir(mode=0o700)
        os.chown(mine(temporary, "4"), NOBODY, NOBODY)
    found = Path(fork_client._socket_path("a job")).parent
    assert not found.is_symlink()
    assert found.name not in {mine(temporary, str(i)).name for i in range(5)}
    assert found.lstat().st_uid == os.getuid()
    assert Path(fork_client._socket_path("a job")).parent == found


def test_a_runtime_folder_of_the_users_own_is_used(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (temporary / "own").mkdir(mode=0o700)
    for runtime, where in ((temporary / "own", temporary / "own"), (temporary / "gone", temporary)):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
        assert Path(fork_client._socket_path("a job")).parent.parent == where


@pytest.mark.parametrize("order", [1, -1])
def test_all_processes_of_a_node_choose_the_same_of_several_folders(
    temporary: Path, order: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whatever order the system lists them: a rank is started through the socket that the server listens at."""
    for name in "bca":
        mine(temporary, name).mkdir(mode=0o700)
    with os.scandir(temporary) as entries:
        listed = sorted(entries, key=lambda entry: entry.name)[::order]
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", lambda root: iter(listed))
        found = Path(fork_client._socket_path("a job")).parent
    assert found == mine(temporary, "a")


def as_another_user(act: Callable[[], None]) -> int:
    """Do something as nobody; returns the process that does."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            act()
        finally:
            os._exit(0)
    return pid


@as_root
@pytest.mark.parametrize("listens", [True, False])
def test_nothing_is_read_from_another_users_process(listens: bool) -> None:
    """Be it one that listens under the fork server's name, or one that connects to the fork server."""
    name, ready = f"\0{uuid.uuid4()}", socket.socketpair()
    server = socket.socket(socket.AF_UNIX)

    def listen() -> None:
        server.bind(name)
        server.listen()
        ready[1].send(b"x")
        server.accept()[0].recv(1)

    def connect() -> None:
        client = socket.socket(socket.AF_UNIX)
        client.connect(name)
        client.recv(1)

    if listens:
        pid = as_another_user(listen)
        ready[0].recv(1)
        other = socket.socket(socket.AF_UNIX)
        other.connect(name)
    else:
        server.bind(name)
        server.listen()
        pid = as_another_user(connect)
        other = server.accept()[0]
    told = f"is of another user \\({NOBODY}\\)"
    with other, server, ready[0], ready[1], pytest.raises(PermissionError, match=told):
        fork_client.check_peer(other)
    os.waitpid(pid, 0)


def test_a_process_of_the_same_user_is_talked_with() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fork_client.check_peer(ours)


@pytest.mark.parametrize("planted", [JOURNAL, ".lock", "run.json", "checkpoints"])
def test_a_link_in_a_runs_folder_is_not_written_through(planted: str, tmp_path: Path) -> None:
    victim, run = tmp_path / "victim", tmp_path / "run"
    run.mkdir()
    victim.mkdir() if planted == "checkpoints" else victim.write_text("precious")
    (run / planted).symlink_to(victim)
    with pytest.raises(ValueError, match=r"is a link to|holds no run|not that of a run"):
        Store.open(run, {"a": 1}, "auto")
    assert victim.is_dir() or victim.read_text() == "precious"


@pytest.mark.parametrize("planted", [JOURNAL, ".lock", "checkpoints"])
def test_nor_one_that_was_put_there_later(planted: str, tmp_path: Path) -> None:
    victim, run = tmp_path / "victim", tmp_path / "run"
    Store.open(run, {"a": 1}, "auto").close()
    (run / planted).rmdir() if planted == "checkpoints" else (run / planted).unlink(missing_ok=True)
    victim.mkdir() if planted == "checkpoints" else victim.write_text("precious")
    (run / planted).symlink_to(victim)
    with pytest.raises(Unsafe, match=r"is a link to .*victim, and links in a run's folder are not followed: remove it"):
        Store.open(run, {"a": 1}, "auto")
    assert victim.is_dir() or victim.read_text() == "precious"


def plant(kind: str, path: Path, victim: Path) -> None:
    """Put something in a file's place that is no file of the run's own."""
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "zero" else victim)


@pytest.mark.parametrize("kind", ["fifo", "zero", "link"])
@pytest.mark.parametrize("name", ["run.json", JOURNAL, MESSAGES, DOING, ".lock", "checkpoints/a.pt"])
def test_a_reader_neither_follows_nor_waits(kind: str, name: str, tmp_path: Path) -> None:
    """Whoever reads a run or goes on with it ends at once: the file is refused, or is not needed."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    write_run(whole, num_samples=3)
    with Store.open(run, {"a": 1}, "auto") as store:
        store.save("a", {"x": torch.ones(3)})
        store.keep_message("said")
    victim = tmp_path / "victim"
    shutil.copy(run / name if (run / name).is_file() else run / "run.json", victim)
    before = victim.read_bytes()
    shutil.copy(whole / "run.json", run / "run.json")
    shutil.copy(whole / JOURNAL, run / JOURNAL)
    plant(kind, run / name, victim)
    found: list[BaseException] = []
    for use in (
        lambda: read_record(run).messages,
        lambda: read_run(run),
        lambda: Store.open(run, read_asked(run), "auto").close(),
        lambda: Store.open(run, read_asked(whole), "auto").close(),
        lambda: load_checkpoint(run / "checkpoints" / "a.pt"),
        lambda: keep_message(run, 0.0, "more"),
        lambda: CrashLog(run / DOING).of("work").__enter__(),
    ):
        try:
            use()
        except (ValueError, RuntimeError, OSError) as error:
            found.append(error)
    assert victim.read_bytes() == before
    if name in ("run.json", JOURNAL, "checkpoints/a.pt"):
        reason = "must be a regular file" if kind == "fifo" else "is a link to"
        assert any(reason in str(error) or "holds no run.json" in str(error) for error in found)


@pytest.mark.parametrize("planted", ["metrics.csv", "tensorboard", "tensorboard/trial-0"])
def test_loggers_write_through_no_link_in_a_runs_folder(planted: str, tmp_path: Path) -> None:
    run, victim = tmp_path / "run", tmp_path / "victim"
    (run / planted).parent.mkdir(parents=True)
    victim.write_text("precious\n") if planted == "metrics.csv" else victim.mkdir()
    (run / planted).symlink_to(victim)
    began = RunBegan(seconds=0.0, path=run, metric="val_loss", mode="min", settings={})
    with pytest.raises(Unsafe, match="is a link to"):
        (CSVLogger() if planted == "metrics.csv" else TensorBoardLogger()).on_event(began)
    assert victim.is_dir() or victim.read_text() == "precious\n"


def test_a_logger_follows_a_link_that_its_user_names(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "mine.csv").symlink_to(tmp_path / "scratch" / "m.csv")
    logger = CSVLogger(tmp_path / "mine.csv")
    for _ in range(2):
        logger.on_event(RunBegan(seconds=0.0, path=tmp_path, metric="val_loss", mode="min", settings={}))
    assert (tmp_path / "scratch" / "m.csv").read_text().count("trial,heat") == 1


def test_links_above_a_runs_folder_are_their_users(tmp_path: Path) -> None:
    """As `runs` on another disk, or one run of it."""
    (tmp_path / "scratch" / "moved").mkdir(parents=True)
    (tmp_path / "runs").symlink_to(tmp_path / "scratch")
    (tmp_path / "scratch" / "a").symlink_to(tmp_path / "scratch" / "moved")
    for _ in range(2):
        with Store.open(tmp_path / "runs" / "a", {"a": 1}, "auto") as store:
            store.save("b", {"x": torch.ones(3)})
            assert torch.equal(store.load("b")["x"], torch.ones(3))
        for crumb in (".run.json.1.tmp", "checkpoints/.b.pt.2.tmp"):  # of a process that was killed
            (tmp_path / "scratch" / "moved" / crumb).touch()
    assert (tmp_path / "scratch" / "moved" / "checkpoints" / "b.pt").is_file()


@pytest.mark.parametrize("planted", ["logs/job-0.log", "ends/job-0.lock"])
def test_jobs_write_through_no_link(planted: str, tmp_path: Path) -> None:
    pack([["true"]], [Device("cpu", 1e9)], storage_path=tmp_path, name="jobs", verbose=False)
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "jobs" / planted).unlink(missing_ok=True)
    (tmp_path / "jobs" / planted).symlink_to(tmp_path / "victim")
    with contextlib.suppress(Unsafe):
        pack([["true"], ["echo", "x"]], [Device("cpu", 1e9)], storage_path=tmp_path, name="jobs", verbose=False)
    assert (tmp_path / "victim").read_text() == "precious"


CPU = Device("cpu", 1e9)


@pytest.mark.parametrize(("mode", "who", "letter"), [(0o777, "all users", "go"), (0o770, "its group", "g")])
def test_a_folder_of_pickles_that_others_can_write_to_is_refused(
    mode: int, who: str, letter: str, tmp_path: Path
) -> None:
    for folder in (tmp_path / "jobs", tmp_path / "run", tmp_path / "bubbles"):
        folder.mkdir()
        folder.chmod(mode)
    (tmp_path / "linked").symlink_to(tmp_path / "jobs")
    for name in ("jobs", "linked"):
        with pytest.raises(Unsafe, match=f"and {who} can: `chmod {letter}-w` it, or set {TRUST}=1"):
            pack([["true"]], [CPU], storage_path=tmp_path, name=name, verbose=False)
    with pytest.raises(Unsafe, match="can have this run execute code"):
        write_shared(tmp_path / "run" / PROBLEM, "a problem")
    with pytest.raises(Unsafe), bubbles(SimpleNamespace(), tmp_path / "bubbles"):
        pass
    with pytest.raises(Unsafe):
        Rendezvous(tmp_path / "bubbles", print)


def test_a_file_of_pickles_that_others_can_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "problem.pickle"
    write_shared(file, "a problem")
    assert read_shared(file) == "a problem"
    file.chmod(0o664)
    with pytest.raises(Unsafe, match=r"problem\.pickle can have this run execute code, and its group can"):
        read_shared(file)
    file.chmod(0o600)
    tmp_path.chmod(0o770)
    with pytest.raises(Unsafe, match=rf"{tmp_path} can have this run execute code, and its group can"):
        read_shared(file)
    monkeypatch.setenv(TRUST, "1")
    assert read_shared(file) == "a problem"


@as_root
def test_a_folder_of_pickles_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(tmp_path, NOBODY, NOBODY)
    refuse_open_to_others(tmp_path)  # root can be given any folder
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    (tmp_path / "link").symlink_to(Path.home())
    for folder, owner in ((tmp_path, NOBODY), (tmp_path / "link", 0)):
        with pytest.raises(Unsafe, match=rf"it belongs to another user \({owner}\): .* set {TRUST}=1"):
            refuse_open_to_others(folder)
    monkeypatch.setenv(TRUST, "1")
    refuse_open_to_others(tmp_path)


@pytest.mark.parametrize("trusting", [False, True])
def test_folders_that_were_made_here_or_are_trusted_are_taken(
    trusting: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if new files are their group's, as on systems where each user has a group of their own."""
    if trusting:
        monkeypatch.setenv(TRUST, "1")
        for folder in (tmp_path / "jobs", tmp_path / "bubbles"):
            folder.mkdir()
            folder.chmod(0o2777)
    before = os.umask(0o002)
    try:
        result = pack([lambda: 7], [CPU], storage_path=tmp_path, name="jobs", verbose=False)
        again = pack([lambda: 7, ["true"]], [CPU], storage_path=tmp_path, name="jobs", verbose=False)
        Rendezvous(tmp_path / "bubbles", print).close()
        with Store.open(tmp_path / "run", {"a": 1}, "auto") as store:
            write_shared(store.path / PROBLEM, "a problem")
            assert read_shared(store.path / PROBLEM) == "a problem"
    finally:
        os.umask(before)
    assert (result.values, again.failed) == ([7], {})


def test_the_store_of_ranks_listens_at_its_own_address_alone() -> None:
    assert listeners(listening_store("127.0.0.1").port) == {"127.0.0.1"}


def listeners(port: int) -> set[str]:
    """The addresses at which a port of this machine is listened to, as the kernel tells."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            address, state = line.split()[1], line.split()[3]
            where, _, at = address.partition(":")
            if state == "0A" and int(at, 16) == port:
                found.add(socket.inet_ntoa(struct.pack("<I", int(where, 16))) if table == "tcp" else where)
    return found


EVIL = "\x1b]0;taken over\x07\x9b31m\u202e\r[red]"
"""Sets the title of a terminal, colours what follows, turns the reading direction, and writes over its line."""


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    """A run whose metric, name, hyperparameters and messages are commands to a terminal."""
    run = tmp_path / f"run{EVIL}"
    write_run(run, num_samples=9)
    for file in (run / "run.json", run / JOURNAL):
        told = json.dumps(EVIL)[1:-1]
        file.write_text(file.read_text().replace("val_loss", f"val_{told}").replace("activation", f"act{told}"))
    (run / JOURNAL).write_bytes(signed(map(json.loads, (run / JOURNAL).read_text().splitlines())))
    keep_message(run, 1.0, f"said{EVIL}")
    return run


@pytest.mark.parametrize(
    "command",
    [
        ["runs", ".."],
        ["show"],
        ["trials"],
        ["trials", "--csv"],
        ["trials", "--where", "x<1"],
        ["best"],
        ["best", "--format", "python"],
        ["best", "--export", "out"],
        ["watch"],
        ["compare", "."],
        ["clean", "--yes"],
        ["simulate", "--gpus", "4", "--seeds", "1"],
        *(["show", "--json"], ["trials", "--json"], ["watch", "--json"]),
    ],
    ids=" ".join,
)
def test_a_terminal_is_told_nothing_by_a_run(
    command: list[str], evil: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(evil)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: "--csv" in command)
    main([*command[:1], str(evil.parent) if ".." in command else str(evil), *(c for c in command[1:] if c != "..")])
    told = capsys.readouterr()
    found = told.out + told.err
    assert found
    assert not {*EVIL} & {"\x1b", "\x07", "\x9b", "\u202e", "\r"} & {*found}


def test_nor_by_what_tune_prints(evil: Path) -> None:
    file = io.StringIO()
    console = PrintableConsole(file=file, force_terminal=True, width=200, color_system=None)
    console.print(load(evil))
    with Progress(console) as progress:
        progress.on_event(RunBegan(seconds=0.0, path=evil, metric=f"val_{EVIL}", mode="min", settings={}))
        progress.on_event(HeatBegan(seconds=0.0, heat="sweep", epochs=2))
        progress.on_event(MessageSaid(seconds=1.0, text=f"said{EVIL}"))
        metrics = {f"val_{EVIL}": 1.0, "train_loss": 1.0}
        progress.on_event(EpochEnded(seconds=1.0, heat="sweep", trial=0, epoch=1, metrics=metrics))
    for sequence in ("\x1b]0;", "\x07", "\x9b", "\u202e", "\r["):
        assert sequence not in file.getvalue()
    assert "said\\x1b]0;taken over\\x9b31m\\u202e[red]" in file.getvalue()
