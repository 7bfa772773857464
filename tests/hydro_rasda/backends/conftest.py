"""One Ray of 8 logical CPUs for all tests that ask for it, and a look whether it left anything behind."""

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


HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that share a Ray come last: others make one of their own, or assert that none runs."""
    places = [place for place, item in enumerate(items) if item.path.is_relative_to(HERE)]
    ours = sorted((items[place] for place in places), key=lambda item: "ray8" in getattr(item, "fixturenames", ()))
    for place, item in zip(places, ours):
        items[place] = item


@pytest.fixture(scope="package")
def ray8() -> Iterator[None]:
    """To start one, with its processes and their imports, takes longer than most tests on it."""
    ray = pytest.importorskip("ray")
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, configure_logging=False)
    raylet = ray.get(ray.remote(num_cpus=0)(lambda: os.getppid()).remote())
    yield
    ray.shutdown()
    until = time.monotonic() + 15
    while processes_of(raylet) and time.monotonic() < until:
        time.sleep(0.2)
    assert processes_of(raylet) == []


@pytest.fixture(autouse=True)
def all_given_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test leaves held on the shared Ray would keep a later one waiting for ever."""
    yield
    if "ray8" not in request.fixturenames:
        return
    ray = pytest.importorskip("ray")
    until = time.monotonic() + 30
    while ray.available_resources().get("CPU") != 8 and time.monotonic() < until:
        time.sleep(0.1)
    assert ray.available_resources().get("CPU") == 8, ray.util.placement_group_table()
