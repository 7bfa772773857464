"""Hosts that do nothing but wait, in threads of the tests' own process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest
import torch

from hydro_rasda.bubbles.host import Guest


@contextmanager
def waiting_hosts(source: Path, count: int, preempt: bool = True, device: str = "cpu") -> Iterator[list[Guest]]:
    """Ranks whose steps are a wait each: guests run there nearly all of the time."""
    over, guests = Event(), [Guest(source, torch.device(device), 0, preempt) for _ in range(count)]

    def host(guest: Guest) -> None:
        guest.start()
        while not over.is_set():
            guest.begin_step()
            guest.wait(0, lambda: time.sleep(0.05))
        guest.leave(600)

    threads = [Thread(target=host, args=[guest]) for guest in guests]
    with pytest.MonkeyPatch.context() as patch:
        # Processes of the idle class hardly run where other tests compute.
        patch.setattr(os, "SCHED_IDLE", os.SCHED_OTHER)
        for thread in threads:
            thread.start()
        try:
            yield guests
        finally:
            over.set()
            for thread in threads:
                thread.join()


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[Path]:
    """The folder that two of them come to."""
    source = tmp_path / "bubbles"
    with waiting_hosts(source, 2):
        yield source
