"""The program that runs one job and records how it ended. It needs only the standard library.

    python -I -S run_job.py PARENT LOCK END COMMAND ...

LOCK is locked as long as any process of the job exists. END is written atomically once the job has ended by itself,
even if nobody waits for it any more. If PARENT dies, or on SIGTERM, all processes of the job are killed and END is not
written.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


class Stopped(BaseException):
    """Raised on SIGTERM, after which the job must end."""


def main() -> None:
    """Run the job."""
    parent, lock, end, *command = sys.argv[1:]
    held = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    fcntl.flock(held, fcntl.LOCK_EX)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = ctypes.CDLL(None).prctl
    control(PR_SET_CHILD_SUBREAPER, 1)
    control(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):
        return

    def of_the_job() -> None:
        control(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # if memory runs out, the kernel kills a job rather than its parent

    started, code = time.monotonic(), None
    job = None
    try:
        job = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=of_the_job)
        code = job.wait()
    except Stopped:
        code = None if job is None else job.poll()
    except OSError as error:
        print(error, file=sys.stderr, flush=True)
        code = 127
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    seconds = time.monotonic() - started
    kill_descendants()
    if code is not None:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu, memory = used.ru_utime + used.ru_stime, used.ru_maxrss * 1024
        write(end, {"exit": code, "seconds": seconds, "cpu": cpu, "memory": memory})


def stop(*_: object) -> None:
    """Handle the first SIGTERM, and ignore later ones."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Stopped


def kill_descendants() -> None:
    """Kill all processes that the job left, and wait for them. Orphans of the job are children of this process."""
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            left = [int(pid) for pid in file.read().split()]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def write(path: str, content: dict[str, float]) -> None:
    """Write a file atomically: it is complete or does not exist."""
    with open(f"{path}.tmp", "w", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666)) as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.tmp", path)


if __name__ == "__main__":
    main()
