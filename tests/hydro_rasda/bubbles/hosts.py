"""Hosts of two ranks, as processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


class Host:
    """Two ranks of `pipeline.py`.

    Args:
        schedule: By its name.
        micro_batches: Of a step.
        steps: At most.
        folder: Where it says what it came to.
        source: Of guests; None for none.
    """

    def __init__(self, schedule: str, micro_batches: int, steps: int, folder: Path, source: Path | None = None) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        told = json.dumps([schedule, micro_batches, steps, str(folder), None if source is None else str(source)])
        command = [sys.executable, "-m", "tests.hydro_rasda.bubbles.pipeline", told]
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
        root = Path(__file__).parents[3]
        self._may_end = source is None  # one without guests is only heard
        self.ranks = [
            subprocess.Popen(command, env={**environment, "RANK": str(rank)}, cwd=root, stdin=subprocess.DEVNULL)
            for rank in range(2)
        ]

    def enough(self) -> None:
        """No more steps after the one that is under way."""
        self._may_end = True
        (self.folder / "enough").touch()

    def told(self) -> list[dict[str, Any]]:
        """What each rank came to, once it is over."""
        while None in (ends := self._ends()) and not any(ends):
            time.sleep(0.05)
        if any(ends):  # the other rank would wait for it
            self.kill()
        assert ends == [0, 0]
        return [json.loads((self.folder / f"rank-{rank}.json").read_text()) for rank in range(2)]

    def kill(self) -> None:
        """As where a machine fails."""
        self._may_end = True
        for rank in self.ranks:
            rank.kill()
            rank.wait()

    def has_failed(self) -> bool:
        """Whether a rank has ended though the test has not ended it."""
        return not self._may_end and any(end is not None for end in self._ends())

    def _ends(self) -> list[int | None]:
        return [rank.poll() for rank in self.ranks]


@contextlib.contextmanager
def running(hosts: Sequence[Host]) -> Iterator[None]:
    """Hosts that run as long as the block. If a rank fails, the block raises: a sweep waits for hosts without end."""
    over = threading.Event()

    def fail(*_: object) -> None:
        if not over.is_set():
            raise RuntimeError("a rank of a host has ended")

    def watch() -> None:
        # Again and again, as the library may take the error for one of a callback.
        while not over.wait(0.5):
            if any(host.has_failed() for host in hosts):
                signal.pthread_kill(main, signal.SIGUSR1)

    main, before = threading.get_ident(), signal.signal(signal.SIGUSR1, fail)
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    except BaseException:
        over.set()
        for host in hosts:
            host.kill()
        raise
    finally:
        over.set()
        watcher.join()
        signal.signal(signal.SIGUSR1, before)
        for host in hosts:
            host.enough()
