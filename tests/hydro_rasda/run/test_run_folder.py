from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hydro_rasda import load
from hydro_rasda.history.lines import JournalLine, Unit
from hydro_rasda.run.checkpoints import DamagedCheckpoint
from hydro_rasda.run.journal import DamagedJournal
from hydro_rasda.run.resume_rules import RunExists, set_aside
from hydro_rasda.run.run_folder import Store
from hydro_rasda.run.run_json import run_id
from hydro_rasda.simulator.past_run import read_run

ASKED: dict[str, Any] = {"seed": 0, "space": {"lr": "loguniform"}, "surrogate": 0.125}


def contents(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "one"


def metrics(*epochs: int) -> list[JournalLine]:
    return [{"event": "metrics", "heat": "race", "trial": 0, "epoch": epoch} for epoch in epochs]


def three_units(path: Path) -> None:
    with Store.open(path, ASKED, "auto") as store:
        for i in range(3):
            store.record(f"unit-{i}", Unit({"i": i}, metrics(1, 2)))
            store.save(f"unit-{i}", {"weights": torch.full((2,), float(i))})


def test_what_is_read_back_is_what_was_given(path: Path) -> None:
    value = {"lr": 0.1 + 0.2, "n": [1, None, True, "x"], 3: (1, 2), "nan": math.nan, "inf": math.inf, "f": contents}
    with Store.open(path, ASKED, "auto") as store:
        given = store.record("a", Unit(value)).value
    with Store.open(path, ASKED, "must") as store:
        read = store.units()["a"].value
    assert given == read
    assert read["lr"] == 0.1 + 0.2
    assert (read["3"], read["nan"], read["inf"], read["f"]) == ([1, 2], None, None, "contents")


def test_whoever_only_reads_a_run_makes_no_journal(path: Path) -> None:
    Store.open(path, ASKED, "auto").close()
    (path / "journal.jsonl").unlink()
    assert Store.read(path).units() == {}
    assert not (path / "journal.jsonl").exists()


def test_a_unit_keeps_the_estimate_of_the_time_left(path: Path) -> None:
    with Store.open(path, ASKED, "auto") as store:
        store.record("a", Unit(1))
        store.left = 12.34
        store.record("b", Unit(2))
    assert [unit.left for unit in Store.read(path).units().values()] == [None, 12.3]


def test_a_unit_is_on_the_disk_once_it_is_recorded_but_a_live_epoch_need_not_be(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = list[int]()
    with Store.open(path, ASKED, "auto") as store:
        monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
        store.record("a", Unit(1))
        assert synced == [(path / "journal.jsonl").stat().st_size]
        store.record("race/trial-0/at-1", Unit(None, metrics(1)))
        assert len(synced) == 1


def test_a_journal_torn_at_any_byte_keeps_all_units_but_the_torn(path: Path) -> None:
    three_units(path)
    journal = path / "journal.jsonl"
    whole = journal.read_bytes()
    ends = [i + 1 for i in range(len(whole)) if whole[i : i + 1] == b"\n"]
    third_begins = ends[6]  # the run's line, and two units of two metrics and their own line
    assert len(ends) == 10
    for cut in range(third_begins, len(whole)):
        journal.write_bytes(whole[:cut])
        with Store.open(path, ASKED, "auto") as store:
            assert list(store.units()) == ["unit-0", "unit-1"]
            store.record("unit-2", Unit({"i": 2}, metrics(1, 2)))
        lines = [json.loads(line) for line in journal.read_bytes().splitlines()]
        assert [line.get("key", line.get("epoch")) for line in lines[1:]] == [
            n for i in range(3) for n in (1, 2, f"unit-{i}")
        ]


def test_the_journal_of_another_run_is_refused_by_name(path: Path) -> None:
    """Its first line names the run that wrote it; one without a unit is nobody's."""
    three_units(path)
    three_units(path.with_name("other"))
    own, other = ((folder / "journal.jsonl").read_bytes() for folder in (path, path.with_name("other")))
    for content in (other, b"".join(own.splitlines(keepends=True)[1:])):
        (path / "journal.jsonl").write_bytes(content)
        before = contents(path)
        for opened in (lambda: Store.open(path, ASKED, "auto"), lambda: Store.read(path)):
            with pytest.raises(DamagedJournal, match=rf"{path}/journal.jsonl .*(another run|was changed)"):
                opened()
        assert contents(path) == before
    for content in (b"", other.splitlines(keepends=True)[0]):
        (path / "journal.jsonl").write_bytes(content)
        three_units(path)


def test_garbage_after_the_last_unit_is_cut_off(path: Path) -> None:
    three_units(path)
    journal = path / "journal.jsonl"
    whole = journal.read_bytes()
    for garbage in (b"\xff\xfe\n", b"\0" * 40, b"\0" * 40 + b"\n", b'{"event": "unit", "key": "x"', b"\n"):
        journal.write_bytes(whole + garbage)
        with Store.open(path, ASKED, "auto") as store:
            assert len(store.units()) == 3
        assert journal.read_bytes() == whole


def test_a_whole_line_that_is_lost_at_the_end_is_told(path: Path) -> None:
    """A process that is killed leaves a part of a line at most; this one held a finished unit."""
    three_units(path)
    journal = path / "journal.jsonl"
    whole = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(whole[:-1]) + b"\xff" + whole[-1])
    with Store.open(path, ASKED, "auto") as store:
        assert list(store.units()) == ["unit-0", "unit-1"]
        (told,) = store.changes
    assert re.match(rf"line 10 of {journal} cannot be read \(.*\): its work is done again", told)


def test_a_damaged_journal_is_refused_and_left_as_it_is(path: Path) -> None:
    three_units(path)
    journal = path / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:4], b"\xff" + lines[4], *lines[5:]]))
    before = contents(path)
    told = rf"line 5 of {journal} .*finished units of work follow.*`head -n 4`"
    for opened in (lambda: Store.open(path, ASKED, "auto"), lambda: Store.read(path)):
        with pytest.raises(DamagedJournal, match=told):
            opened()
    assert contents(path) == before
    journal.write_bytes(b"".join(lines[:4]))  # as it says
    with Store.open(path, ASKED, "auto") as store:
        assert list(store.units()) == ["unit-0"]
        assert not store.changes


@pytest.mark.parametrize("spec", [b"", b"[]", b"\xff", b"{"])
def test_a_folder_whose_description_cannot_be_read_is_refused_by_name(path: Path, spec: bytes) -> None:
    three_units(path)
    (path / "run.json").write_bytes(spec)
    with pytest.raises(ValueError, match=f"`path` is '{path}', .*its run.json is damaged, or not that of a run"):
        Store.open(path, ASKED, "auto")


@pytest.mark.parametrize("other", [1, 3, "2", None])
def test_a_folder_of_another_format_is_refused_with_a_way_on(path: Path, other: object) -> None:
    three_units(path)
    spec = path / "run.json"
    spec.write_text(json.dumps(json.loads(spec.read_text()) | {"format": other}))
    before = contents(path)
    told = rf"`path` is '{path}', but must be a run's folder of format 2, but its format is {other!r}: begin a new run"
    for opened in (lambda: Store.open(path, ASKED, "auto"), lambda: load(path), lambda: read_run(path)):
        with pytest.raises(ValueError, match=told):
            opened()
    assert contents(path) == before


FULL = """
import resource, sys, torch
from pathlib import Path
from hydro_rasda.history.lines import Unit
from hydro_rasda.run.run_folder import Store
with Store.open(Path(sys.argv[1]), {}, "auto") as store:
    store.record("first", Unit(None))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    if sys.argv[2] == "journal":
        store.record("second", Unit("x" * 3000))
    store.save("second", {"weights": torch.zeros(1000)})
"""


@pytest.mark.skipif(sys.platform == "win32", reason="files have no limit there")
@pytest.mark.parametrize(("what", "where"), [("journal", "journal.jsonl"), ("checkpoint", "checkpoints/second.pt")])
def test_a_file_that_cannot_be_written_is_named_with_how_to_go_on(path: Path, what: str, where: str) -> None:
    """As on a full disk: here, files may not grow beyond 2,000 bytes."""
    ended = subprocess.run([sys.executable, "-c", FULL, str(path), what], capture_output=True, text=True, check=False)
    told = ended.stderr.strip().splitlines()[-1]
    goes_on = "once it can be written, the same call goes on from the last finished unit of work"
    assert told == f"OSError: [Errno 27] File too large: {goes_on}: '{path / where}'"
    with Store.open(path, {}, "auto") as store:
        assert list(store.units()) == ["first"]


HOLDER = """
import sys, time
from pathlib import Path
from hydro_rasda.run.run_folder import Store
with Store.open(Path(sys.argv[1]), {}, "auto"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def test_one_process_at_a_time(path: Path, holder: subprocess.Popen[bytes]) -> None:
    before = contents(path)
    with pytest.raises(RuntimeError, match=r"another process is working on the run in .*one"):
        Store.open(path, {}, "auto")
    assert contents(path) == before
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    Store.open(path, {}, "must").close()


def test_a_directory_is_free_after_a_failed_open(path: Path) -> None:
    three_units(path)
    with pytest.raises(RunExists) as kept:  # its frames keep what the failed call held
        Store.open(path, {**ASKED, "seed": 1}, "auto")
    Store.open(path, ASKED, "auto").close()
    assert kept.traceback


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({**ASKED, "seed": 1}, "seed was 0, now 1"),
        (
            {**ASKED, "space": {"lr": "uniform"}},
            r"space\['lr'\] was .*loguniform.*now .*'uniform'; choose another `name`",
        ),
        ({"seed": 0, "space": ASKED["space"]}, "surrogate was 0.125, now None"),
        ({**ASKED, "new": 1}, "new was None, now 1"),
    ],
)
def test_another_run_of_the_name_is_refused_and_left_alone(path: Path, other: dict[str, Any], told: str) -> None:
    three_units(path)
    before = contents(path)
    with pytest.raises(RunExists, match=f"`name` is 'one', but the run of that name in .* is another: .*{told}"):
        Store.open(path, other, "auto")
    assert contents(path) == before


def test_never_refuses_what_is_there_and_must_what_is_not(path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="`resume` is 'must', but there is no run"):
        Store.open(path, ASKED, "must")
    assert not path.parent.exists()
    three_units(path)
    before = contents(path)
    with pytest.raises(RunExists, match=r"`resume` is 'never', but .* holds a run") as kept:
        Store.open(path, ASKED, "never")
    assert contents(path) == before
    Store.open(path, ASKED, "must").close()
    assert kept.traceback
    with pytest.raises(ValueError, match="`resume` is 'yes', but must be one of"):
        Store.open(path, ASKED, "yes")


def test_a_folder_that_holds_something_else_is_left_alone(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunExists, match="is there, but holds no run"):
        Store.open(path, ASKED, "auto")
    assert contents(path) == {"thesis.tex": b"years of work"}


@pytest.mark.parametrize(
    "left", [[], [".lock"], [".lock", "checkpoints"], [".lock", "checkpoints", ".run.json.7f.tmp"]]
)
def test_a_kill_before_the_run_began_leaves_its_name_free(path: Path, left: list[str]) -> None:
    path.mkdir(parents=True)
    for name in left:
        (path / name).mkdir() if name == "checkpoints" else (path / name).touch()
    with Store.open(path, ASKED, "auto") as store:
        store.record("a", Unit(1))
    assert not list(path.glob("*.tmp")) + list(path.glob(".*.tmp"))
    assert store.recorded == 0


def test_a_folder_is_locked_before_it_is_judged(path: Path, holder: subprocess.Popen[bytes]) -> None:
    """The holder may be about to write `run.json`: what is read before the lock is there may be old."""
    for asked in ({}, ASKED):
        with pytest.raises(RuntimeError, match="another process is working on the run"):
            Store.open(path, asked, "auto")


def test_half_written_files_of_a_killed_process_are_cleaned_up(path: Path) -> None:
    three_units(path)
    before = contents(path)
    for crumb in (path / ".run.json.1.tmp", path / "checkpoints" / ".unit-0.pt.2.tmp"):
        crumb.write_bytes(b"half")
    Store.open(path, ASKED, "auto").close()
    assert contents(path) == before


def test_the_sweeps_time_is_counted_by_itself(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("hydro_rasda.run.run_folder.monotonic", lambda: now)
    for times in (1, 2):
        with Store.open(path, ASKED, "auto") as store:
            with store.sweeping():
                now += 3.0
                store.record(f"sweep/{times}", Unit(None))
                assert store.swept == 3.0 * times
            now += 5.0
            store.record(f"race/{times}", Unit(None))
            assert (store.swept, store.seconds) == (3.0 * times, 8.0 * times)
        now += 100.0


def test_a_checkpoint_is_there_whole_or_not_at_all(path: Path) -> None:
    class Unsavable:
        def __reduce__(self) -> Any:
            raise OSError("disk full")

    with Store.open(path, ASKED, "auto") as store:
        store.save("a/b", {"x": torch.ones(3)})
        with pytest.raises(OSError, match="disk full"):
            store.save("a/b", {"x": torch.zeros(3), "y": Unsavable()})
        assert torch.equal(store.load("a/b")["x"], torch.ones(3))
        assert [p.name for p in (path / "checkpoints").iterdir()] == ["a.b.pt"]
        assert store.has("a/b")
        store.discard(["a/b", "never there"])
        assert not store.has("a/b")


@pytest.fixture
def umask() -> Iterator[None]:
    """What most systems have: all can read what a user makes."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def test_a_runs_folder_is_its_users_alone(path: Path, umask: None) -> None:
    """The folder of runs is not: others may see what runs there are."""
    Store.open(path, ASKED, "auto").close()
    assert (mode(path), mode(path.parent)) == (0o700, 0o755)
    assert mode(path / "run.json") == 0o644  # so that a `chmod` of the folder shares all of it


@pytest.mark.parametrize("given", [0o755, 0o2770])
def test_a_folder_that_is_there_keeps_its_mode(path: Path, umask: None, given: int) -> None:
    """One that its user made for a group, also where the run goes on."""
    path.mkdir(parents=True)
    path.chmod(given)
    for _ in range(2):
        three_units(path) if not (path / "run.json").exists() else Store.open(path, ASKED, "must").close()
        assert mode(path) == given


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named(path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """As NFS whose lock daemon is not there."""

    def flock(file: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(
        OSError, match=r"choose a `storage_path` on a local disk, or mount .*local_lock=flock"
    ) as caught:
        Store.open(path, ASKED, "auto")
    assert (caught.value.errno, caught.value.filename) == (code, str(path / ".lock"))


class Runs:
    def __reduce__(self) -> Any:
        return print, ("code in a checkpoint ran",)


def test_a_checkpoint_cannot_run_code(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Store.open(path, ASKED, "auto") as store:
        torch.save({"x": Runs()}, store.file("evil"))
        with pytest.raises(
            DamagedCheckpoint, match=r"evil\.pt cannot be read: it holds more than tensors and plain values"
        ):
            store.load("evil")
    assert "ran" not in capfd.readouterr().out


def test_units_done_elsewhere_count_beside_each_other_but_the_clock_once(path: Path) -> None:
    with Store.open(path, ASKED, "auto") as store:
        for key in "ab":
            store.record(key, Unit(None, seconds=100.0))
        with pytest.raises(ValueError, match="`key` is 'a'"):
            store.record("a", Unit(None))
    with Store.open(path, ASKED, "auto") as store:
        assert [unit.seconds for unit in store.units().values()] == [100.0, 100.0]
        assert store.seconds < 100


def test_a_unit_done_again_counts_in_its_own_place(path: Path) -> None:
    with Store.open(path, ASKED, "auto") as store:
        for key, value in (("a", 1), ("b", 2), ("a", 3)):
            store.record(key, Unit(value), again=True)
        given = [(key, unit.value) for key, unit in store.units().items()]
    with Store.open(path, ASKED, "auto") as store:
        assert given == [("b", 2), ("a", 3)] == [(key, unit.value) for key, unit in store.units().items()]


def test_a_run_that_begins_anew_gets_an_id_of_its_own_also_after_a_kill(path: Path) -> None:
    """The process was killed once the earlier results were set aside, before `run.json` was replaced."""
    asked = {**ASKED, "python": "3.11", "val_data": "tensors (9, 8)", "digests": {"loss_fn": "a"}}
    with Store.open(path, asked, "auto") as store:
        store.record("unit-0", Unit(0))
    set_aside(path)
    with Store.open(path, {**asked, "digests": {"loss_fn": "b"}}, "changed") as store:
        assert store.id not in ("", run_id(path / "before-1"))
