"""Which tests stay together where several processes run them (`pytest -n 2`), and what all may ask for."""

from __future__ import annotations

import gc
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest

RAY = re.compile(
    r"tests/hydro_rasda/backends/(ray/"
    r"|test_contract\.py::test_two_devices_on_ray"
    r"|test_ranks_of_a_pool\.py::.*\[ray"
    r"|test_either_backend\.py)"
    r"|tests/benchmarks/vs_asha/test_cell\.py::test_rays_asha"
    r"|tests/test_examples\.py::test_(digits_on_ray|the_ray_script)"
)
"""Tests that use Ray, which one process after another may have: two at once would starve each other of workers."""

LONG = re.compile(
    r"(README\.md|tests/(test_(examples|notebook|wheel)|benchmarks/tasks/test_load"
    r"|fusion/evaluate/rules/test_torch_operators|hydro_rasda/(bubbles/test_host|run/test_resume"
    r"|training/test_(distributed|lr_and_decay_by_parameter)))\.py)::"
)
"""Modules and pages that take long. They start early: a process that began one last would keep the other waiting."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the tests that use Ray come first, then the long modules and pages."""
    items.sort(key=lambda item: 0 if RAY.match(item.nodeid) else 1 if LONG.match(item.nodeid) else 2)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A module's tests share its fixtures; those that use Ray share its cluster.

    Not by `xdist_group`: xdist 3.8 writes the group where pytest 9.2 no longer reads it.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByModule(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return "ray" if RAY.match(nodeid) else nodeid.partition("::")[0]

    config.option.loadscopereorder = False  # it starts modules of many tests first, which are not the long ones
    return ByModule(config, log)


@pytest.fixture(scope="session", autouse=True)
def _without_waiting_for_the_disk() -> Iterator[None]:
    """What is written outlives any process, synced or not; a test of what a power cut leaves notes the calls itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def set_aside() -> Iterator[None]:
    """Let the test's garbage collections pass over all that the suite has imported: each would take a second."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let the processes that a test starts take SIGINT, which those of a script's background job inherit as ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
