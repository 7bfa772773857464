"""NVIDIA's Multi-Process Service, by a program of its daemon's name, files and commands."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from hydro_rasda.packing import Device, Estimate, PackResult, Task, nvml, pack
from hydro_rasda.packing.mps import CONTROL, percentage

DAEMON = """
import fcntl, json, os, subprocess, sys, time
pipe = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
control = os.path.join(pipe, "control")
if sys.argv[1:] == ["-f"]:
    if os.path.exists(os.environ["BROKEN"]):
        sys.exit("no device")
    server = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    with open(os.environ["SEEN"], "a") as file:
        line = {"daemon": os.getpid(), "server": server.pid, "gpu": os.environ["CUDA_VISIBLE_DEVICES"], "pipe": pipe}
        file.write(json.dumps(line) + "\\n")
    time.sleep(0.1)
    held = open(control, "w")
    fcntl.flock(held, fcntl.LOCK_EX)
    while os.path.exists(control):
        time.sleep(0.02)
    server.kill()
    server.wait()
else:
    try:
        fcntl.flock(open(control), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pass  # the daemon lives
    except FileNotFoundError:
        sys.exit("Cannot find MPS control daemon process")
    else:
        sys.exit("Cannot find MPS control daemon process")
if sys.argv[1:] != ["-f"] and sys.stdin.read() == "quit":
    os.remove(control)
"""
JOB = """
import json, os
names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_VISIBLE_DEVICES")
print(json.dumps([os.environ.get(name) for name in names]))
"""


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that has the daemon; the file gets a line for each that starts."""
    program = tmp_path / "bin" / CONTROL
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\n{DAEMON}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.setenv("BROKEN", str(tmp_path / "broken"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setattr(nvml, "memory_of", lambda gpu, pids: 1e6)
    monkeypatch.setattr(nvml, "share_of", lambda gpu, pids, jobs: 0.3)
    return tmp_path / "seen"


def gpu(number: int = 0) -> Device:
    return Device(f"gpu-{number}", 1e9, 1.0, {"CUDA_VISIBLE_DEVICES": f"GPU-{number}"}, gpu=f"GPU-{number}")


def packed(folder: Path, jobs: list[Task], devices: list[Device], **options: Any) -> PackResult:
    return pack(jobs, devices, storage_path=folder, verbose=False, **options)


def job(name: str, share: float | None = 0.305) -> Task:
    return Task([sys.executable, "-c", JOB], Estimate(1e6, share, 1), name=name)


def daemons(seen: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in seen.read_text().splitlines()] if seen.exists() else []


def environment(result: PackResult, name: str) -> list[str | None]:
    return list(json.loads((result.path / "logs" / f"{name}.log").read_text()))


def left(folder: Path) -> list[Path]:
    return list(folder.glob("hydro-rasda-mps-*"))


def test_each_gpu_has_a_daemon_that_ends_with_the_call(seen: Path, tmp_path: Path) -> None:
    result = packed(tmp_path / "runs", [job("a"), job("b", 0.9), job("c", 0.9)], [gpu(0), gpu(1)])
    assert not result.failed
    found = {line["gpu"]: line for line in daemons(seen)}
    assert found.keys() == {"GPU-0", "GPU-1"}
    assert len(daemons(seen)) == 2
    for name, share in (("a", "31"), ("b", "90"), ("c", "90")):
        pipe, threads, device = environment(result, name)
        assert (pipe, threads) == (found[str(device)]["pipe"], share)
    assert not any(psutil.pid_exists(line[which]) for line in found.values() for which in ("daemon", "server"))
    assert left(tmp_path) == []


def test_a_job_that_is_measured_is_not_held_back(seen: Path, tmp_path: Path) -> None:
    result = packed(tmp_path / "runs", [job("a", None)], [gpu()])
    assert environment(result, "a")[1] == "100"


def test_a_daemon_that_ended_is_started_again(seen: Path, tmp_path: Path) -> None:
    code = "import os, json, signal; os.kill(json.loads(open(os.environ['SEEN']).readline())['daemon'], signal.SIGKILL)"
    kills = Task([sys.executable, "-c", code], Estimate(1e6, 1.0, 1), name="kills")
    result = packed(tmp_path / "runs", [kills, job("a", 1.0)], [gpu()])
    assert not result.failed
    assert environment(result, "a")[0] == daemons(seen)[-1]["pipe"] != daemons(seen)[0]["pipe"]


def test_what_a_killed_process_left_is_ended_and_removed(seen: Path, tmp_path: Path) -> None:
    program = f"""
    from hydro_rasda.packing import nvml
    nvml.memory_of, nvml.share_of = lambda gpu, pids: 1e6, lambda gpu, pids, jobs: 0.3
    from hydro_rasda.packing import Device, Estimate, Task, pack
    job = Task(["sleep", "1000"], Estimate(1e6, 0.5, 1))
    pack([job], [Device("gpu", 1e9, gpu="GPU-0")], storage_path={str(tmp_path / "killed")!r}, verbose=False)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])
    while not list((tmp_path / "killed").glob("pack/logs/0.log")):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (line,), (folder,) = daemons(seen), left(tmp_path)
    with open(folder / "lock", "rb") as held:  # by who ends them, until they are over
        fcntl.flock(held, fcntl.LOCK_EX)
    assert not any(psutil.pid_exists(line[which]) for which in ("daemon", "server"))
    packed(tmp_path / "runs", [job("a")], [gpu()])
    assert left(tmp_path) == []


def test_a_fault_of_a_neighbour_has_a_job_run_again_alone(seen: Path, tmp_path: Path) -> None:
    code = "import os, sys; open(sys.argv[1], 'x'); sys.exit('CUDA error: the MPS client has been terminated')"
    command = ["sh", "-c", f'test -e "$1" || exec {sys.executable} -c "$2" "$1"', "sh", str(tmp_path / "first"), code]
    (record,) = packed(tmp_path / "runs", [Task(command, Estimate(1e6, 0.5, 1))], [gpu()]).jobs
    assert (record.state, record.attempt, record.alone) == ("complete", 2, True)


def test_without_it_jobs_take_turns(seen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    off = packed(tmp_path / "off", [job("a")], [gpu()], mps=False)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "of-the-user")
    own = packed(tmp_path / "own", [job("a")], [gpu()])
    assert [environment(off, "a")[0], environment(own, "a")[0]] == [None, "of-the-user"]
    with pytest.raises(ValueError, match="`mps` is True"):
        packed(tmp_path / "must", [job("a")], [gpu()], mps=True)
    assert daemons(seen) == []


def test_a_daemon_that_does_not_start_is_told_and_done_without(seen: Path, tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    with pytest.warns(UserWarning, match="take turns.*no device"):
        result = packed(tmp_path / "runs", [job("a"), job("b")], [gpu()])
    assert not result.failed
    assert environment(result, "a")[0] is None
    assert left(tmp_path) == []


@pytest.mark.parametrize(("share", "told"), [(0.0, "1"), (0.3, "30"), (0.301, "31"), (1.2, "100")])
def test_the_percentage_of_threads(share: float, told: str) -> None:
    assert percentage(share) == told
