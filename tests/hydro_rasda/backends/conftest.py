"""One Ray of 8 or of 2 logical CPUs for the tests that ask for it, and a look whether it left anything behind."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


def processes_of(raylet: int) -> list[str]:
    """Command lines of living processes that name this raylet as their guardian, and of the raylet itself."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode().split("\0")
            dead = (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            continue
        serves = "hydro_rasda.backends.ray.fork_server" in words and str(raylet) in words
        if not dead and (serves or folder.name == str(raylet)):
            found.append(" ".join(words))
    return found


@pytest.fixture(scope="module")
def ray8() -> None:
    """All tests that ask for it share one, module after module."""
    start(8)


@pytest.fixture(scope="module")
def ray2() -> None:
    """Likewise, where devices are to have one thread each, as those of this machine have in the tests."""
    start(2)


_running: list[tuple[int, int]] = []
"""Its CPUs and its raylet, while there is one."""


def start(cpus: int) -> None:
    """Have a Ray of so many CPUs."""
    ray = pytest.importorskip("ray")
    if [of for of, _ in _running] == [cpus]:
        return
    stop()
    ray.init(address="local", num_cpus=cpus, include_dashboard=False, log_to_driver=False, configure_logging=False)
    _running.append((cpus, ray.get(ray.remote(num_cpus=0)(lambda: os.getppid()).remote())))


def stop() -> None:
    """Have none: some tests make a cluster of their own, others assert that no Ray runs."""
    while _running:
        _, raylet = _running.pop()
        pytest.importorskip("ray").shutdown()
        until = time.monotonic() + 600
        while processes_of(raylet) and time.monotonic() < until:
            time.sleep(0.2)
        assert processes_of(raylet) == []


def cpus_of(item: pytest.Item | None) -> int:
    """Of the Ray that a test asks for; 0 for none."""
    asked = {*getattr(item, "fixturenames", ())}
    params = getattr(getattr(item, "callspec", None), "params", {})
    return 8 if "ray8" in asked or params.get("two") == "ray" else 2 if "ray2" in asked else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let tests of one Ray come after each other, and those that have none of these after them."""
    here = [i for i, item in enumerate(items) if item.path.is_relative_to(Path(__file__).parent)]
    for i, item in zip(here, sorted((items[i] for i in here), key=cpus_of, reverse=True)):
        items[i] = item


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """End the Ray that no later test shares."""
    try:
        return (yield)
    finally:
        if cpus_of(nextitem) != cpus_of(item):
            stop()


@pytest.fixture(autouse=True)
def all_given_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test leaves held on a shared Ray would keep a later one waiting for ever."""
    if not (cpus := cpus_of(request.node)):
        yield
        return
    start(cpus)  # the module's fixture may be from before another one
    yield
    ray = pytest.importorskip("ray")
    until = time.monotonic() + 600
    while ray.available_resources().get("CPU") != cpus and time.monotonic() < until:
        time.sleep(0.1)
    held = [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
    assert ray.available_resources().get("CPU") == cpus, held
