"""Jobs that are really run, killed and run again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from hydro_rasda.packing import Device, Estimate, PackResult, Task, pack
from hydro_rasda.packing.job_process import Resident
from hydro_rasda.packing.job_states import Grid
from hydro_rasda.packing.packer import OUT_OF_MEMORY
from hydro_rasda.packing.tasks import tasks_of
from hydro_rasda.run.run_folder import Store
from hydro_rasda.schedulers.packing_policy import Job, Placed, Room, first_fit, worst_fit_decreasing

MB = 1e6
SMALL = Estimate(20 * MB, 0.5, 1)


def cores(count: float = 2, memory: float = 2e9, name: str = "cpu") -> Device:
    return Device(name, memory, count)


def packed(folder: Path, jobs: Sequence[Any], devices: Any = None, **options: Any) -> PackResult:
    return pack(jobs, devices or [cores()], storage_path=folder, verbose=False, **options)


def script(code: str, *arguments: object) -> list[str]:
    """A Python program; its arguments are `a`, and the rest of what tests use is imported."""
    return [sys.executable, "-c", f"import os, sys, time, signal\na = sys.argv[1:]\n{code}", *map(str, arguments)]


def until(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(0.02)


FIRST_TIME = "first = not os.path.exists(a[0]); open(a[0], 'a').write(f'{os.getpid()}\\n')\n"
FOREVER = "while True: time.sleep(0.05)\n"


def test_commands_and_functions_run_and_say_how_they_ended(tmp_path: Path) -> None:
    jobs = [
        script("print('hello')"),
        lambda: {"loss": 0.5},
        Task(script("print('no such data'); sys.exit(3)"), name="wrong"),
        lambda: 1 / 0,
        ["no-such-program"],
    ]
    result = packed(tmp_path, jobs)
    assert [job.state for job in result.jobs] == ["complete", "complete", "failed", "failed", "failed"]
    assert [job.exit for job in result.jobs] == [0, 0, 3, 1, 127]
    assert result.values == [None, {"loss": 0.5}, None, None, None]
    assert result.failed["wrong"] == "exit status 3: no such data"
    assert "ZeroDivisionError" in result.failed["3"]
    assert "no-such-program" in result.failed["4"]
    assert (result.path / "logs" / "0.log").read_text() == "hello\n"
    assert all(job.attempt == 1 and job.device == "cpu" for job in result.jobs)
    assert not any((result.path / "ends").iterdir())
    assert not any((result.path / "calls").iterdir())
    assert (result.path / "calls").stat().st_mode & 0o077 == 0, "reading a function runs code"


def test_modules_of_the_working_folder_are_found(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("def f(): return 3")
    code = "from hydro_rasda.packing import cpu, pack; from helper import f; print(pack([f], [cpu()]).values)"
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, check=True, text=True)
    assert found.stdout.splitlines()[-1] == "[3]"


def test_what_jobs_take_is_measured(tmp_path: Path) -> None:
    code = "x = bytearray(150_000_000); end = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
    (job,) = packed(tmp_path, [script(code)]).jobs
    assert 150 * MB < job.memory < 250 * MB
    assert job.seconds >= 0.5
    assert 0.4 < job.share * job.seconds < 5  # seconds of a core, however many of them others have had meanwhile


def test_memory_that_forked_processes_share_counts_once() -> None:
    code = "x = bytearray(b'x') * 150_000_000\nif os.fork() and os.fork(): print(flush=True)\nsys.stdin.read()"
    with subprocess.Popen(script(code), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as job:
        assert job.stdin is not None
        assert job.stdout is not None
        job.stdout.readline()
        first, resident = psutil.Process(job.pid), Resident()
        for _ in range(2):  # measured, then scaled
            assert 150 * MB < resident([first, *first.children(recursive=True)]) < 300 * MB
        assert 150 * MB < resident([first]) < 300 * MB
        job.stdin.close()


def test_jobs_that_fit_run_together(tmp_path: Path) -> None:
    """Each ends once the other is there, too."""
    code = "open(a[0], 'w')\nwhile not os.path.exists(a[1]): time.sleep(0.02)"
    here, there = tmp_path / "here", tmp_path / "there"
    jobs = [Task(script(code, here, there), SMALL), Task(script(code, there, here), SMALL)]
    assert not packed(tmp_path, jobs).failed


def test_the_first_job_that_nobody_knows_is_alone(tmp_path: Path) -> None:
    code = "open(f'{a[0]}/{os.getpid()}', 'w'); time.sleep(0.3); print(len(os.listdir(a[0])))"
    here = tmp_path / "here"
    here.mkdir()
    result = packed(tmp_path, [script(code, here) for _ in range(3)])
    assert (result.path / "logs" / "0.log").read_text() == "1\n"
    assert not result.failed


@pytest.mark.parametrize("estimate", [Estimate(1.5e9, 0.1), Estimate(1, 2.0), Estimate(3e9, 0.1)])
def test_jobs_that_do_not_fit_run_after_each_other(tmp_path: Path, estimate: Estimate) -> None:
    code = "os.mkdir(a[0]); time.sleep(0.1); os.rmdir(a[0])"
    jobs = [Task(script(code, tmp_path / "only"), estimate, kind=str(i)) for i in range(3)]
    result = packed(tmp_path, jobs)
    assert not result.failed, result.failed


def test_what_a_job_leaves_running_ends_with_it(tmp_path: Path) -> None:
    code = "import subprocess\np = subprocess.Popen(['sleep', '1000'], start_new_session=True)\nprint(p.pid)"
    result = packed(tmp_path, [script(code)])
    assert not psutil.pid_exists(int((result.path / "logs" / "0.log").read_text()))


def test_a_job_that_is_killed_runs_alone_the_next_time(tmp_path: Path) -> None:
    code = FIRST_TIME + "if first: os.kill(os.getpid(), 9)\nprint(len(os.listdir(a[1])))"
    beside = "open(f'{a[0]}/{os.getpid()}', 'w'); time.sleep(0.2); os.remove(f'{a[0]}/{os.getpid()}')"
    others = tmp_path / "others"
    others.mkdir()
    jobs = [Task(script(beside, others), SMALL) for _ in range(6)]
    jobs.insert(1, Task(script(code, tmp_path / "starts", others), SMALL, name="killed"))
    result = packed(tmp_path, jobs)
    killed = result.jobs[1]
    assert (killed.state, killed.attempt, killed.alone) == ("complete", 2, True)
    assert (result.path / "logs" / "killed.log").read_text() == "0\n"
    assert all(job.attempt == 1 and not job.alone for job in result.jobs if job is not killed)


@pytest.mark.parametrize("code", ["os.kill(os.getpid(), 9)", "raise MemoryError"])
def test_a_job_that_runs_out_of_memory_alone_fails(tmp_path: Path, code: str) -> None:
    (job,) = packed(tmp_path, [Task(script(code), SMALL)]).jobs
    assert (job.state, job.attempt) == ("failed", 2)
    assert job.error.startswith(("SIGKILL", "exit status 1: MemoryError"))


def test_a_signal_without_a_name_is_told_by_its_number(tmp_path: Path) -> None:
    assert packed(tmp_path, [script("os.kill(os.getpid(), 40)")]).failed == {"0": "signal 40"}


def test_all_that_fusion_takes_for_want_of_memory_has_a_job_run_again() -> None:
    from fusion.evaluate.backoff import SIGNS  # imports torch, which the calls below that are killed need not

    assert [sign for sign in SIGNS if not any(words in sign for words in OUT_OF_MEMORY)] == []


def test_a_job_whose_watcher_is_ended_fails(tmp_path: Path) -> None:
    (job,) = packed(tmp_path, [Task(script("os.kill(os.getppid(), 15)\n" + FOREVER), SMALL)]).jobs
    assert (job.state, job.attempt, job.error, job.seconds) == ("failed", 1, "SIGTERM", 0.0)


def test_a_job_that_outgrows_its_estimate_gives_way_and_its_kind_is_corrected(tmp_path: Path) -> None:
    """The first has three times the memory that it was given, and would not end; the other ends once it is gone."""
    grows = FIRST_TIME + "x = bytearray(240_000_000)\nif first:\n    " + FOREVER
    waits = (
        "x = bytearray(120_000_000)\nwhile not os.path.exists(a[0]): time.sleep(0.02)\n"
        "pid = int(open(a[0]).read().split()[0])\nwhile os.path.exists(f'/proc/{pid}'): time.sleep(0.02)"
    )
    starts = tmp_path / "starts"
    jobs = [
        Task(script(grows, starts), Estimate(80 * MB, 0.5), "grows"),
        Task(script(waits, starts), Estimate(150 * MB, 0.5), "waits"),
    ]
    result = packed(tmp_path, jobs, [cores(memory=300 * MB)])
    assert [(job.state, job.attempt) for job in result.jobs] == [("complete", 2), ("complete", 1)]


def test_a_device_that_dies_gives_its_jobs_back_and_a_new_one_gets_some(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    code = FIRST_TIME + "if first:\n    " + FOREVER

    asked: list[bool] = []

    def devices() -> list[Device]:
        if not starts.exists():
            return [cores(name="old")]
        asked.append(True)
        return [cores(name="new")] if len(asked) > 3 else []

    (job,) = packed(tmp_path, [Task(script(code, starts), SMALL)], devices).jobs
    assert (job.state, job.attempt, job.device) == ("complete", 2, "new")


def test_a_call_that_is_repeated_runs_nothing_again_and_takes_more_jobs(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    jobs = [script("open(a[0], 'a').write('x')", ran), script("sys.exit(not os.path.exists(a[0]))", tmp_path / "data")]
    assert list(packed(tmp_path, jobs).failed) == ["1"]
    again = packed(tmp_path, [*jobs, script("")])
    assert [(job.state, job.attempt) for job in again.jobs] == [("complete", 1), ("failed", 1), ("complete", 1)]
    (tmp_path / "data").touch()
    mended = packed(tmp_path, [*jobs, script("")], retry_failed=True)
    assert [(job.state, job.attempt) for job in mended.jobs] == [("complete", 1), ("complete", 2), ("complete", 1)]
    assert ran.read_text() == "x"


def test_another_job_under_the_same_name_is_refused(tmp_path: Path) -> None:
    packed(tmp_path, [["true"]])
    for other in ([["false"]], []):
        with pytest.raises(ValueError, match=r"`jobs\['0'\]`"):
            packed(tmp_path, other)


def test_a_partial_of_other_arguments_is_another_job(tmp_path: Path) -> None:
    assert packed(tmp_path, [partial(abs, -1)]).values == [1]
    assert packed(tmp_path, [partial(abs, -1), partial(abs, -2)]).values == [1, 2]
    with pytest.raises(ValueError, match=r"`jobs\['0'\]` is \['builtins.abs', '-2'\]"):
        packed(tmp_path, [partial(abs, -2), partial(abs, -2)])


def test_a_job_that_ended_when_nobody_was_left_to_see_it_has_ended(tmp_path: Path) -> None:
    jobs = [["false"]]
    with Store.open(tmp_path / "pack", {"packing": 1}, "auto") as store:
        grid = Grid(store, tasks_of(jobs))
        grid.change("0", state="running", attempt=1, device="cpu")
        grid.end_file("0").write_text(json.dumps({"exit": 0, "seconds": 2.5, "cpu": 2.0, "memory": 1e7}))
    (job,) = packed(tmp_path, jobs).jobs
    assert (job.state, job.attempt, job.seconds, job.memory) == ("complete", 1, 2.5, 1e7)


RUN = "from tests.hydro_rasda.packing.test_pack import many; import sys; many(sys.argv[1])"
COUNT, AT_ONCE = 12, 3


def many(folder: str) -> None:
    """Jobs that say that they start, and that fail where another of their name is running."""
    code = (
        "import fcntl\nfile = open(a[0], 'a')\nfcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "file.write('start\\n'); file.flush(); time.sleep(0.15)"
    )
    jobs = [Task(script(code, f"{folder}/job-{i}"), Estimate(12 * MB, 0.1)) for i in range(COUNT)]
    result = packed(Path(folder), jobs, [cores(1, memory=AT_ONCE * 12 * MB)])
    assert not result.failed, result.failed
    print(*(job.attempt for job in result.jobs), flush=True)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_no_job_is_lost_or_runs_twice_where_the_call_is_killed(tmp_path: Path, how: signal.Signals) -> None:
    command = [sys.executable, "-c", RUN, str(tmp_path)]
    for far in (2, 5, 8):
        call = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(partial(has_come_far, call, tmp_path, far))
        call.send_signal(how)
        call.wait()
    out = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    attempts = [int(attempt) for attempt in out.split()]
    starts = [len((tmp_path / f"job-{i}").read_text().split()) for i in range(COUNT)]
    assert all(1 <= start <= attempt for start, attempt in zip(starts, attempts))
    assert sum(attempts) <= COUNT + 3 * AT_ONCE  # only what ran when the call was killed runs again


def has_come_far(call: subprocess.Popen[bytes], folder: Path, far: int) -> bool:
    """Whether so many jobs were started, or the call is over."""
    return sum(len(file.read_text().split()) for file in folder.glob("job-*")) >= far or call.poll() is not None


def test_jobs_end_with_the_call(tmp_path: Path) -> None:
    code = f"import os\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\nwhile True: pass"
    jobs = [[sys.executable, "-c", code]]
    run = f"from hydro_rasda.packing import cpu, pack; pack({jobs!r}, [cpu()], storage_path={str(tmp_path)!r})"
    call = subprocess.Popen([sys.executable, "-c", run], stdout=subprocess.DEVNULL)
    until(lambda: (tmp_path / "pid").exists() and bool((tmp_path / "pid").read_text()))
    call.kill()
    call.wait()
    pid = int((tmp_path / "pid").read_text())
    until(lambda: not psutil.pid_exists(pid))


def test_jobs_end_at_once_where_the_call_is_interrupted(tmp_path: Path) -> None:
    def interrupts(jobs: Sequence[Job], rooms: Sequence[Room]) -> list[Placed]:
        if rooms[0].jobs:
            raise KeyboardInterrupt
        return first_fit(jobs, rooms)

    jobs = [Task(["sh", "-c", f"sleep 5; touch {tmp_path / 'over'}"], SMALL) for _ in range(2)]
    with pytest.raises(KeyboardInterrupt):
        packed(tmp_path, jobs, [cores(0.5)], policy=interrupts)
    assert not (tmp_path / "over").exists()


def test_bad_devices_and_functions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`devices` is"):
        packed(tmp_path, [["true"]], [cores(), cores()])
    with pytest.raises(ValueError, match="`devices` is"):
        pack([["true"]], [], storage_path=tmp_path)
    lock = threading.Lock()
    with pytest.raises(ValueError, match="`run` of the job '1' cannot be sent"):
        packed(tmp_path, [script("open(a[0], 'w')", tmp_path / "ran"), lambda: lock])
    assert not (tmp_path / "ran").exists()


def test_what_one_call_measured_the_next_one_knows(tmp_path: Path) -> None:
    """Two jobs that wait for each other: where nobody knew what they take, the first would be alone, for ever."""
    (first,) = packed(tmp_path, [Task(script("time.sleep(0.3)"), kind="kind")], [cores(4)], name="first").jobs
    code = "open(a[0] + a[1], 'x').close()\nwhile not os.path.exists(a[0] + a[2]): time.sleep(0.02)"
    both = [Task(script(code, tmp_path / "file-", *pair), kind="kind") for pair in ("01", "10")]
    result = packed(tmp_path, both, [cores(4, memory=4 * first.memory)], name="second")
    assert not result.failed


def test_what_was_kept_of_an_earlier_call_may_be_odd(tmp_path: Path, own_cache: Path) -> None:
    packed(tmp_path, [["true"]], name="first")
    (file,) = (own_cache / "hydro_rasda" / "measured").iterdir()
    kept = json.loads(file.read_text())
    for odd in ({"estimates": 3}, {"estimates": {"memory of kind": -1}}):
        file.write_text(json.dumps({**kept, **odd}))
        assert not packed(tmp_path, [["true"]], name=f"with-{len(str(odd))}").failed


@pytest.mark.parametrize(("estimate", "attempts"), [(SMALL, 2), (Estimate(8e9, 0.5), 1)])
def test_a_job_alone_has_a_device_of_the_most_memory(tmp_path: Path, estimate: Estimate, attempts: int) -> None:
    devices = [Device(name, memory, 1, {"ON": name}) for name, memory in (("small", 1e9), ("large", 2e9))]
    jobs = [Task(script("if os.environ['ON'] == 'small': raise MemoryError"), estimate)]
    (job,) = packed(tmp_path, jobs, devices).jobs
    assert (job.state, job.attempt, job.device) == ("complete", attempts, "large")


def test_a_job_needs_no_more_compute_than_a_device_has_that_holds_it(tmp_path: Path) -> None:
    devices = [Device("roomy", 4e9, 1), Device("fast", 1e9, 2)]
    (job,) = packed(tmp_path, [Task(["true"], Estimate(2e9, 1.5))], devices, policy=worst_fit_decreasing).jobs
    assert (job.state, job.device) == ("complete", "roomy")


def test_a_policy_is_told_how_long_running_jobs_still_take(tmp_path: Path) -> None:
    left: list[float] = []

    def policy(jobs: Sequence[Job], rooms: Sequence[Room]) -> list[Placed]:
        left.extend(job.seconds for job in rooms[0].jobs)
        return first_fit(jobs, rooms)

    jobs = [Task(["sleep", "0.6"], Estimate(1e6, 1.0, 100), kind=str(i)) for i in range(2)]
    packed(tmp_path, jobs, [cores(1)], policy=policy)
    assert left
    assert all(90 < seconds < 100 for seconds in left)


def test_a_device_keeps_the_memory_with_which_it_was_first_listed(tmp_path: Path) -> None:
    """As the free memory of cores, which is less once jobs run there."""
    asked = tmp_path / "asked"
    asked.write_text("")

    def devices() -> list[Device]:
        asked.write_text(asked.read_text() + "x")
        return [cores(memory=2e9 if len(asked.read_text()) < 5 else 1e6)]

    waits = script("while len(open(a[0]).read()) < 8: time.sleep(0.02)", asked)
    result = packed(tmp_path, [Task(waits, SMALL), Task(waits, SMALL)], devices)
    assert [(job.state, job.attempt) for job in result.jobs] == [("complete", 1)] * 2


@pytest.mark.parametrize("listed", [ZeroDivisionError, None])
def test_jobs_have_ended_where_devices_cannot_be_listed_any_more(tmp_path: Path, listed: Any) -> None:
    here = tmp_path / "here"
    here.mkdir()

    def devices() -> list[Device]:
        if len(list(here.iterdir())) < 2:
            return [cores()]
        if listed is None:
            return None  # type: ignore[return-value]
        raise listed

    jobs = [Task(script("open(f'{a[0]}/{os.getppid()}', 'w')\n" + FOREVER, here), SMALL) for _ in range(2)]
    with pytest.raises(ZeroDivisionError if listed else ValueError):
        packed(tmp_path, jobs, devices)
    assert not any(psutil.pid_exists(int(file.name)) for file in here.iterdir())


@pytest.mark.usefixtures("interruptible")
def test_a_job_whose_start_is_interrupted_ends_with_the_call(tmp_path: Path) -> None:
    code = f"""
import os, signal
from hydro_rasda.packing import Device, Estimate, Task, job_process, pack
start, pids = job_process.start_child, []
def interrupted(*given):
    pids.append(start(*given))
    os.kill(os.getpid(), signal.SIGINT)
    return pids[-1]
job_process.start_child = interrupted
try:
    jobs = [Task(["sleep", "1000"], Estimate(1e6, 0.1)) for _ in range(3)]
    pack(jobs, [Device("cpu", 2e9, 2)], storage_path={str(tmp_path)!r}, verbose=False)
except KeyboardInterrupt:
    print([os.path.exists(f"/proc/{{child.pid}}") for child in pids])
"""
    found = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, text=True)
    assert found.stdout == "[False]\n"


@pytest.mark.parametrize("placed", [None, [("0", "other")], [("other", "cpu")], [("0", "cpu")] * 2, ["0"]])
def test_a_policy_that_places_no_job_of_its_own_is_refused(tmp_path: Path, placed: Any) -> None:
    with pytest.raises(ValueError, match=r"`policy\(\.\.\.\)` is .*, but must be a list of \(job, device\)"):
        packed(tmp_path, [Task(["true"], SMALL)], policy=lambda jobs, rooms: placed)
