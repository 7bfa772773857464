"""Distribute tests among several processes (`pytest -n 2`), and define fixtures that any test may use."""

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
"""Tests that use Ray. One process runs all of them, because two with Ray would starve each other of workers."""

LONG = re.compile(
    r"(README\.md|tests/(test_(examples|notebook|wheel)|benchmarks/tasks/test_load"
    r"|fusion/evaluate/rules/test_torch_operators|hydro_rasda/(bubbles/test_host|run/test_resume"
    r"|training/test_(distributed|lr_and_decay_by_parameter)))\.py)::"
)
"""Modules and pages that take long. They start early, because other processes would be idle while one runs last."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the tests that use Ray come first, then the long modules and pages."""
    items.sort(key=lambda item: 0 if RAY.match(item.nodeid) else 1 if LONG.match(item.nodeid) else 2)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run the tests of a module in one process, because they share fixtures. Do the same with all tests that use Ray.

    The mark `xdist_group` does not do this: xdist 3.8 writes the group to a place that pytest 9.2 no longer reads.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByModule(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return "ray" if RAY.match(nodeid) else nodeid.partition("::")[0]

    config.option.loadscopereorder = False  # True starts modules with many tests first, not the long ones
    return ByModule(config, log)


@pytest.fixture(scope="session", autouse=True)
def _without_waiting_for_the_disk() -> Iterator[None]:
    """Skip `fsync`, which only protects from a power cut. Tests of a power cut record the calls themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def set_aside() -> Iterator[None]:
    """Let garbage collections in a test skip all earlier objects; otherwise, each collection would take a second."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let processes that a test starts react to SIGINT, which a script's background jobs and their children ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
