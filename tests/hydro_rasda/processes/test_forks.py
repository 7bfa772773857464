"""Real processes: forked, killed, left behind."""

from __future__ import annotations

import ctypes
import errno
import io
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from hydro_rasda.contracts import evenly
from hydro_rasda.processes import forks
from hydro_rasda.processes.forks import (
    LATE,
    Crowd,
    Died,
    Notify,
    ending,
    imap_forked,
    map_forked,
)
from hydro_rasda.processes.hang_detector import HangDetector, waited_in_vain
from hydro_rasda.run.checkpoints import DamagedCheckpoint, load_checkpoint

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="processes that have computed are forked on Linux alone"
)

IGNORE: Notify = lambda *_: None  # noqa: E731


def without_reports(work: Callable[[], Any]) -> forks.ForkedWork:
    return lambda notify: work()


def test_without_standard_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a daemon: Python then has None in their place."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert dict(imap_forked([without_reports(lambda: 3)], 1, IGNORE)) == {0: 3}


def test_a_full_table_of_processes_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", full)
    opened = len(os.listdir("/proc/self/fd"))
    with pytest.raises(BlockingIOError, match=r"no further process.*`ulimit -u`.*HYDRO_RASDA_ONE_PROCESS=1.*same call"):
        map_forked([os.getpid], 1)
    assert len(os.listdir("/proc/self/fd")) == opened


def test_a_program_that_ignores_the_ends_of_its_children() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        pieces = [without_reports(lambda: 3), without_reports(lambda: os._exit(1))]
        assert dict(imap_forked(pieces, 1, IGNORE)) == {0: 3, 1: Died("an end that nobody saw")}
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_pieces_run_at_the_same_time_in_processes_of_their_own() -> None:
    found = dict(imap_forked([without_reports(os.getpid)] * 3, 1, IGNORE))
    assert len({os.getpid(), *found.values()}) == 4

    def meet(own: int, other: int) -> str:
        os.write(pipes[own][1], b"x")
        return os.read(pipes[other][0], 1).decode()

    pipes = [os.pipe(), os.pipe()]
    meetings = [without_reports(lambda: meet(0, 1)), without_reports(lambda: meet(1, 0))]
    assert dict(imap_forked(meetings, 1, IGNORE)) == {0: "x", 1: "x"}


def test_tensors_come_back_and_reports_come_before(capfd: pytest.CaptureFixture[str]) -> None:
    def piece(notify: Notify) -> dict[str, Any]:
        print("written once")
        for epoch in (1, 2):
            notify(epoch, {"loss": [0.5]})
        return {"weights": torch.arange(3.0), "epochs": 2}

    reported: list[Any] = []
    print("before", end=" ")
    ((_, result),) = imap_forked([piece], 1, lambda *content: reported.append(content))
    assert torch.equal(result["weights"], torch.arange(3.0))
    assert reported == [(1, {"loss": [0.5]}), (2, {"loss": [0.5]})]
    assert capfd.readouterr().out == "before written once\n"


def test_a_piece_that_hangs_is_ended_once_it_is_known_how_long_others_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HangDetector, "LEAST_S", 3.0)

    def lively(notify: Notify) -> str:
        notify(1)
        return "done"

    def hanging(notify: Notify) -> None:
        notify(1)
        threading.Event().wait()

    own, others = HangDetector("no epoch was over"), set(psutil.Process().children())
    assert own.patience == math.inf
    monkeypatch.setattr(HangDetector, "TIMES", 1)
    found = dict(imap_forked([lively, hanging], 1, IGNORE, own))
    assert found[0] == "done"
    assert "no epoch was over for" in found[1].how
    assert dict(imap_forked([lively], 1, IGNORE, own)) == {0: "done"}
    assert set(psutil.Process().children()) <= others


def test_a_report_that_took_no_time_by_a_coarse_clock_is_known_too() -> None:
    assert HangDetector("no epoch was over").patience == math.inf
    first = HangDetector("no epoch was over", foreseen=60.0)
    assert (first.patience, HangDetector("no epoch was over", foreseen=1.0).patience) == (
        6000,
        HangDetector.FIRST_LEAST_S,
    )
    assert "for 6000 s, by the dry run's times it takes 60 s (100 times as long" in first.told
    own = HangDetector("no epoch was over")
    own.took(0.0)
    assert own.patience == HangDetector.LEAST_S


def test_silence_is_judged_by_the_longest_report_so_far() -> None:
    own = HangDetector("no epoch was over", least=50.0)
    for seconds, patience in ((0.1, 50.0), (3.0, 300.0), (2.0, 300.0)):
        own.took(seconds)
        assert own.patience == patience
    assert own.told == (
        "it was ended as it hung: no epoch was over for 300 s, where none had taken longer than 3 s "
        "(100 times as long, and at least 50 s, are waited for)"
    )


@pytest.mark.parametrize(
    ("error", "holds"),
    [
        ("[enforce fail at gloo/transport/tcp/pair.cc] Connection closed by peer", True),
        ("torch.distributed.DistBackendError: NCCL error", True),
        ("DistStoreError: Timed out after 61 seconds waiting for clients", True),
        ("Watchdog caught collective operation timeout in ProcessGroupNCCL", True),
        ("ValueError: the batch is empty", False),
    ],
)
def test_errors_that_only_say_that_another_rank_did_not_come(error: str, holds: bool) -> None:
    assert waited_in_vain(error) == holds


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (9, "SIGKILL, as where memory runs out"),
        (11, "SIGSEGV"),
        (40, "signal 40"),
        (3 << 8, "exit code 3"),
        (0, "exit code 0"),
    ],
)
def test_the_end_of_a_process_in_words(status: int, told: str) -> None:
    assert ending(status) == told


def test_pieces_run_beside_each_other_as_memory_and_cores_allow() -> None:
    crowd = Crowd(memory=10.0, cores=4, expected=[6, 5, 4, 11, 1], took=lambda piece, peak: None)
    assert crowd.next([0, 1, 2, 3, 4], [], threads=1) == [0, 2]
    assert crowd.next([0, 1, 2, 3, 4], [], threads=2) == [0, 2]
    assert crowd.next([1, 3, 4], [2], threads=1) == [1, 4]
    assert crowd.next([1, 4], [2], threads=3) == []
    assert crowd.next([1, 4], [2], threads=2) == [1]
    assert crowd.next([3], [4], threads=1) == []
    assert crowd.next([3], [], threads=1) == [3], "larger than all memory: alone, rather than never"


def test_no_piece_begins_once_a_crowd_is_over() -> None:
    """The first piece begins in any case; pieces that run are done."""
    found: list[int] = []
    crowd = Crowd(10.0, 2, [1.0] * 6, lambda piece, peak: None, over=lambda: bool(found))
    pieces = [without_reports(lambda: None)] * 6
    for i, _ in imap_forked(pieces, 1, IGNORE, crowd=crowd):
        found.append(i)
    assert {*found} == {0, 1}
    always = Crowd(10.0, 1, [1.0] * 6, lambda piece, peak: None, over=lambda: True)
    assert [i for i, _ in imap_forked(pieces, 1, IGNORE, crowd=always)] == [0]


def test_the_peak_of_each_piece_that_ends_is_told() -> None:
    peaks: dict[int, int] = {}

    def fill(size: int) -> int:
        return int(torch.ones(size, dtype=torch.uint8).sum())

    crowd = Crowd(2.0**40, 1, [0.0, 0.0, 0.0], lambda piece, peak: peaks.update({piece: peak}))
    pieces = [without_reports(partial(fill, size)) for size in (1, 1 << 26)]
    found = dict(imap_forked([*pieces, without_reports(partial(sys.exit, 1))], 1, IGNORE, crowd=crowd))
    assert (found[0], found[1]) == (1, 1 << 26)
    assert peaks.keys() == {0, 1}
    assert peaks[1] - peaks[0] > 1 << 25


def test_a_fork_leaves_ctrl_c_to_its_parent_and_is_ended_first_where_memory_runs_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Proxy(io.StringIO):
        def __init__(self, proxied: Any) -> None:
            super().__init__()
            self.rich_proxied_file = proxied

    def look() -> tuple[Any, ...]:
        with open("/proc/self/oom_score_adj") as file:
            return (
                signal.getsignal(signal.SIGINT),
                int(file.read()),
                *(type(f) is Proxy for f in (sys.stdout, sys.stderr)),
            )

    monkeypatch.setattr(sys, "stdout", Proxy(sys.stdout))
    monkeypatch.setattr(sys, "stderr", Proxy(sys.stderr))
    ((_, found),) = imap_forked([without_reports(look)], 1, IGNORE)
    assert found == (signal.SIG_IGN, 1000, False, False)


def test_a_fork_beside_ctrl_c_leaves_the_callers_handler() -> None:
    before = signal.getsignal(signal.SIGINT)
    caught: list[Any] = []
    try:
        own = signal.signal(signal.SIGINT, lambda *given: caught.append(given)) and signal.getsignal(signal.SIGINT)
        list(imap_forked([without_reports(int)], 1, IGNORE))
        assert signal.getsignal(signal.SIGINT) is own
        assert not caught
    finally:
        signal.signal(signal.SIGINT, before)


class Odd(UserWarning):
    """Not made again by what it was made of."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{reason} ({code})")


def test_a_warning_of_the_users_own_class_crosses_the_pipe() -> None:
    def warn(notify: Notify) -> str:
        warnings.warn(Odd(3, "it is late"), stacklevel=1)
        return "done"

    with pytest.warns(UserWarning, match=r"Odd: it is late \(3\)"):
        assert dict(imap_forked([warn], 1, IGNORE)) == {0: "done"}


@pytest.mark.parametrize("threads", [1, 2])
def test_torch_computes_in_a_fork_of_a_process_that_has_computed(threads: int) -> None:
    """OpenMP's threads are not forked: a child that waited for them would wait for ever."""
    a = torch.randn(400, 400)
    model = torch.nn.Conv2d(8, 8, 3, padding=1)
    x = torch.randn(16, 8, 32, 32)
    expected = (a @ a).sum().item(), model(x).square().mean().item()

    def compute() -> tuple[int, float, float]:
        model(x).square().mean().backward()
        return torch.get_num_threads(), (a @ a).sum().item(), model(x).square().mean().item()

    for _, (count, *found) in imap_forked([without_reports(compute)] * 2, threads, IGNORE):
        assert count == threads
        assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "omp_pause_resource_all"), reason="OpenMP is older than 5.0")
def test_openmp_counts_no_threads_of_the_parent_in_a_child_with_several() -> None:
    """It would think the cores overbooked, and have the child's threads sleep between operations: so they end first."""

    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    before, values = torch.get_num_threads(), torch.rand(1 << 20)
    torch.set_num_threads(2)
    try:
        expected = values.exp().sum()
        busy = threads()
        ((_, found),) = imap_forked([without_reports(lambda: values.exp().sum())], 2, IGNORE)
        assert threads() < busy
        assert torch.equal(found, expected)
        assert torch.equal(values.exp().sum(), expected)
        assert threads() == busy
    finally:
        torch.set_num_threads(before)


def test_a_piece_that_dies_or_raises_leaves_the_others_alone() -> None:
    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def fail() -> None:
        raise ArithmeticError("this cannot be done")

    def leave() -> None:
        sys.exit("enough")

    found = dict(imap_forked([without_reports(work) for work in (kill, fail, leave, lambda: "done")], 1, IGNORE))
    assert found[3] == "done"
    assert found[0] == Died("SIGKILL, as where memory runs out")
    assert "ArithmeticError: this cannot be done" in found[1].how
    assert "SystemExit: enough" in found[2].how


def test_a_checkpoint_that_cannot_be_read_is_no_death(tmp_path: Path) -> None:
    """Whoever was to go on from it would be taken for the cause."""
    others = set(psutil.Process().children())
    pieces = [without_reports(partial(load_checkpoint, tmp_path / "gone.pt")), without_reports(partial(time.sleep, 60))]
    with pytest.raises(DamagedCheckpoint, match=r"gone\.pt cannot be read: FileNotFoundError"):
        list(imap_forked(pieces, 1, IGNORE))
    assert set(psutil.Process().children()) <= others


@pytest.mark.parametrize("action", ["default", "always"])
def test_warnings_reach_the_caller_once(action: Any) -> None:
    def warn() -> None:
        for _ in range(2):
            warnings.warn("of the model", UserWarning, stacklevel=1)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action)
        list(imap_forked([without_reports(warn)] * 2, 1, IGNORE))
    assert [str(w.message) for w in caught] == ["of the model"]
    assert caught[0].filename == __file__


def test_pieces_end_where_nobody_waits_for_them() -> None:
    def hang(notify: Notify) -> None:
        notify(os.getpid())
        time.sleep(600)

    told: list[int] = []

    def interrupt(pid: int) -> None:
        told.append(pid)
        if len(told) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(imap_forked([hang, hang], 1, interrupt))
    for pid in told:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_pieces_end_with_a_parent_that_is_killed() -> None:
    script = """
        import os, time
        from hydro_rasda.processes.forks import imap_forked
        def hang(notify):
            notify(os.getpid())
            time.sleep(600)
        list(imap_forked([hang, hang], 1, lambda pid: print(pid, flush=True)))
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        parent.kill()
    deadline = time.monotonic() + 1000
    while alive := [pid for pid in pids if os.path.exists(f"/proc/{pid}") and not _zombie(pid)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.01)


def _zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_map_keeps_the_order_and_forks_only_where_it_helps() -> None:
    def sleepy(i: int) -> tuple[int, int]:
        time.sleep(0.05 * (3 - i))
        return i, os.getpid()

    pieces = [partial(sleepy, i) for i in range(4)]
    found = map_forked(pieces, children=3)
    assert [i for i, _ in found] == [0, 1, 2, 3]
    assert len({pid for _, pid in found} | {os.getpid()}) == 5
    assert {pid for _, pid in map_forked(pieces, children=0)} == {os.getpid()}
    assert map_forked([os.getpid], children=1) != [os.getpid()], "what ends a single one would end this process"


def test_children_find_imported_what_torch_imports_late() -> None:
    script = """
        import sys
        from hydro_rasda.processes.forks import imap_forked
        import torch
        def optimize(notify):
            before = set(sys.modules)
            torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).zero_grad()
            return len(set(sys.modules) - before)
        print(dict(imap_forked([optimize], 1, print)))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert int(done.stdout.strip("{}\n").split(":")[1]) < 20, done


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_while_a_process_is_forked_is_not_lost() -> None:
    """Python calls functions around a fork, and prints what they raise: here Ctrl-C comes in one of them."""
    script = """
        import os, signal, time
        from hydro_rasda.processes.forks import imap_forked
        parent = os.getpid()
        os.register_at_fork(before=lambda: os.getpid() == parent and os.kill(parent, signal.SIGINT))
        list(imap_forked([lambda notify: time.sleep(600)], 1, print))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert done.returncode != 0
    assert "KeyboardInterrupt" in done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 9])
def test_even_parts(parts: int) -> None:
    found = evenly(range(7), parts)
    assert [n for part in found for n in part] == list(range(7))
    assert len(found) == min(parts, 7)
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_pieces_that_are_not_done_in_time_are_ended_or_not_begun() -> None:
    def endless() -> None:
        time.sleep(600)

    until = time.monotonic() + 0.5
    assert map_forked([endless, endless, os.getpid], 2, until=until) == [LATE, LATE, LATE]
    assert map_forked([os.getpid], 0, until=until) == [LATE]
    assert map_forked([os.getpid], 0) == [os.getpid()]
