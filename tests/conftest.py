"""Which tests stay together where several processes run them (`pytest -n 2`), and what all may ask for."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from typing import Any

import pytest

RAY = (
    "tests/hydro_rasda/backends/ray/",
    "tests/hydro_rasda/backends/test_contract.py",
    "tests/hydro_rasda/backends/test_elastic_pool.py",
    "tests/hydro_rasda/backends/test_either_backend.py",
    "tests/benchmarks/vs_asha/test_cell.py",
    "tests/test_examples.py::test_digits_on_ray",
    "tests/test_examples.py::test_the_ray_script",
)
"""One process after another may have a Ray: two at once would starve each other of workers."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A module's tests share its fixtures; those that use Ray share its cluster.

    Not by `xdist_group`: xdist 3.8 writes the group where pytest 9.2 no longer reads it.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByModule(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return "ray" if nodeid.startswith(RAY) else nodeid.partition("::")[0]

    return ByModule(config, log)


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
