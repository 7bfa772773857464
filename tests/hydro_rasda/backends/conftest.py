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
def ray8() -> Iterator[None]:
    """A module's own: some tests make a cluster of their own, others assert that no Ray runs."""
    yield from ray_of(8)


@pytest.fixture(scope="module")
def ray2() -> Iterator[None]:
    """Likewise, where devices are to have one thread each, as those of this machine have in the tests."""
    yield from ray_of(2)


def ray_of(cpus: int) -> Iterator[None]:
    ray = pytest.importorskip("ray")
    ray.init(address="local", num_cpus=cpus, include_dashboard=False, log_to_driver=False, configure_logging=False)
    raylet = ray.get(ray.remote(num_cpus=0)(lambda: os.getppid()).remote())
    yield
    ray.shutdown()
    until = time.monotonic() + 600
    while processes_of(raylet) and time.monotonic() < until:
        time.sleep(0.2)
    assert processes_of(raylet) == []


@pytest.fixture(autouse=True)
def all_given_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test leaves held on a module's Ray would keep a later one waiting for ever."""
    yield
    if not {"ray8", "ray2"} & set(request.fixturenames):
        return
    ray = pytest.importorskip("ray")
    until, cpus = time.monotonic() + 600, ray.cluster_resources()["CPU"]
    while ray.available_resources().get("CPU") != cpus and time.monotonic() < until:
        time.sleep(0.1)
    held = [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
    assert ray.available_resources().get("CPU") == cpus, held
