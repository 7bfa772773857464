"""The processes of a run, on Ray too: which there are, one of them killed at random, those left behind."""

from __future__ import annotations

import contextlib
import random
import signal
import sys
from collections.abc import Iterable

import psutil

_OF_RAY = (
    "ray::DashboardAgent",
    "ray::RuntimeEnvAgent",
    "ray/_private/workers/default_worker.py",
    "ray/_private/runtime_env/agent/main.py",
    "ray/dashboard/agent.py",
)
"""In the commands of Ray's own processes: of agents, and of those that are still starting, and have no other name."""


class ProcessGroup:
    """The processes of a run: its driver, those that it forked, and on Ray actors, fork servers and ranks."""

    def __init__(self, driver: psutil.Process) -> None:
        self._driver = driver
        self._seen: set[psutil.Process] = set()
        self.agents: set[psutil.Process] = set()
        """Of Ray's own, which look for the processes that they serve now and then, and end half a minute after them;
        and workers that Ray has started and that have not taken work yet, which look once they are ready."""

    def note(self) -> dict[str, list[psutil.Process]]:
        """Those that there are now, by what they are."""
        found: dict[str, list[psutil.Process]] = {"driver": [self._driver], "child": [], "actor": [], "rank": []}
        others = self._driver.children(recursive=True) if self._driver.is_running() else []
        pids = {str(other.pid) for other in others}
        for other in psutil.process_iter(["cmdline"]):
            words = other.info["cmdline"] or [""]
            if "hydro_rasda.backends.ray.fork_server" in words and words[-1] in pids:
                found["rank"].append(other)  # forked of the fork server, or that itself
        for other in others:
            with contextlib.suppress(psutil.NoSuchProcess):
                words = other.cmdline() or [""]
                if any(word.strip().endswith(_OF_RAY) for word in words):  # not raylet, which only names them
                    self.agents.add(other)
                elif words[0].startswith("ray::") and "IDLE" not in words[0]:
                    found["actor"].append(other)
                elif words == self._driver.cmdline():
                    found["child"].append(other)
        self._seen |= {self._driver, *others, *found["rank"]}
        return found

    def kill_one(self, rng: random.Random) -> str:
        """Kill one of them; what it was."""
        found = {kind: those for kind, those in self.note().items() if those}
        kind = rng.choice(sorted(found))
        try:
            rng.choice(found[kind]).send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            return "none, as it had ended"
        return kind

    def left(self) -> int:
        """How many of those that were seen still live seconds after the driver has ended."""
        return count_alive(self._seen - self.agents, 15)


def count_alive(processes: Iterable[psutil.Process], seconds: float) -> int:
    """How many of these there are after so long; which, is printed."""
    _, late = psutil.wait_procs(processes, timeout=seconds)
    alive = 0
    for other in late:
        with contextlib.suppress(psutil.NoSuchProcess):
            if other.status() != psutil.STATUS_ZOMBIE:
                alive += other.is_running()
                print(f"left after {seconds:g} s: {' '.join(other.cmdline())[:200]}", file=sys.stderr)
    return alive
