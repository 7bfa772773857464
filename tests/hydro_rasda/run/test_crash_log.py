"""Processes that die where they are, each in a fork of this one."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path

import pytest

from hydro_rasda.run.crash_log import CrashLog
from tests.hydro_rasda.forks import forked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a process that has computed is forked")


def in_a_process(work: Callable[[], None]) -> None:
    os.waitpid(forked(work), 0)


def die(file: Path, what: str, *epochs: int) -> None:
    """A process that notes what it does, comes so far, and ends."""

    def work() -> None:
        doing = CrashLog(file)
        with doing.of(what):
            for epoch in epochs:
                doing.reached(epoch)
            os._exit(1)

    in_a_process(work)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "doing"


def test_after_two_deaths_in_a_row_at_one_place_work_comes_last_and_is_dropped_after_a_third(file: Path) -> None:
    for deaths in (1, 2, 3):
        die(file, "training 3", 1, 2)
        doing = CrashLog(file)
        assert doing.suspected("training 3") == (deaths if deaths >= 2 else 0)
        assert doing.suspects is (deaths >= 2)
        assert bool(doing.dropped("training 3")) is (deaths == 3)
        assert not doing.suspected("training 4")
    told = "the tuner's own process died of it 3 times in a row after epoch 2; the same call with `resume='changed'`"
    assert told in CrashLog(file).dropped("training 3")
    CrashLog(file, anew=True).close()  # its call was refused
    assert CrashLog(file).dropped("training 3")
    doing = CrashLog(file, anew=True)
    assert not doing.suspected("training 3")
    doing.forget_aside()
    doing.close()
    assert not file.exists()


@pytest.mark.parametrize("second", [(1,), (1, 2, 3)])
def test_whoever_is_killed_from_outside_dies_anywhere(file: Path, second: tuple[int, ...]) -> None:
    for epochs in ((1, 2), second, (1, 2), second):
        die(file, "training 3", *epochs)
        assert not CrashLog(file).suspected("training 3")


def test_what_raises_or_ends_is_no_death_and_leaves_no_file(file: Path) -> None:
    doing = CrashLog(file)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt), doing.of("training 3"):
            raise KeyboardInterrupt
        with doing.of("training 3"):
            doing.reached(1)
        assert not CrashLog(file).suspected("training 3")
    doing.close()
    assert not file.exists()


def test_deaths_with_a_success_between_do_not_follow_each_other(file: Path) -> None:
    """Also if a generator that is closed, or an exception, ends the work: the process lives."""

    def done() -> None:
        with doing.of("training 3"):
            pass

    def closed() -> None:
        def work() -> Generator[None, None, None]:
            with doing.of("training 3"):
                yield

        with closing(work()) as under_way:
            next(under_way)

    def raised() -> None:
        with pytest.raises(KeyboardInterrupt), doing.of("training 3"):
            raise KeyboardInterrupt

    for end in (done, closed, raised):
        for _ in range(3):
            die(file, "training 3")
            doing = CrashLog(file)
            assert not doing.suspected("training 3")
            end()
            doing.close()
            assert not file.exists()


def test_work_that_is_left_alone_stays_so_for_later_processes(file: Path) -> None:
    die(file, "training 3")
    die(file, "training 3")
    doing = CrashLog(file)
    with doing.of("training 4"):
        pass
    doing.close()
    assert CrashLog(file).suspected("training 3")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"now": 3, "deaths": {}}', b'{"now": null, "deaths": []}'])
def test_a_file_that_cannot_be_read_says_nothing(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    doing = CrashLog(file)
    assert not doing.suspected("training 3")
    with doing.of("training 3"):
        doing.reached(1)
    doing.close()
    assert not file.exists()


def test_on_a_full_disk_work_goes_on_without_a_note(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    doing, reached = CrashLog(file), 0
    with doing.of("training 3"):
        doing.reached(reached := 1)
    doing.close()
    assert reached == 1
