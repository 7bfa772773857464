"""Growth beyond the nodes that are up, with a stand-in for Ray's autoscaler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.ray_stand_in import StandInController
from hydro_rasda import RASDAScheduler
from hydro_rasda.backends.ray import nodes, read_journal
from hydro_rasda.backends.ray.nodes import NodeRequests, Slots

Bundles = list[dict[str, float]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Bundles]:
    found: list[Bundles] = []
    monkeypatch.setattr(nodes, "request_resources", lambda bundles: found.append(bundles))
    return found


@pytest.mark.parametrize("wait_s", [0.0, 60.0])
def test_survivors_get_the_workers_of_nodes_that_come_in_time(
    wait_s: float, asked: list[Bundles], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes that are asked for are there when the scheduler looks next; one node is there at first."""
    monkeypatch.setattr(Slots, "_fresh_for_s", -1.0)
    monkeypatch.setattr(
        "ray.nodes", lambda: [{"Alive": True, "Resources": {"CPU": 2.0}}] * max(1, *(len(b) // 2 for b in [[], *asked]))
    )
    scheduler = RASDAScheduler(max_t=8, metric="loss", mode="min", autoscale_wait_s=wait_s)
    StandInController(scheduler, [[0.0] * 8], str(tmp_path)).run()
    workers = [entry.workers for entry in read_journal(str(tmp_path))]
    assert workers == ([1, 2, 4, 4, 8, 8, 8, 8] if wait_s else [1] + [2] * 7)
    assert [len(bundles) for bundles in asked] == ([4, 0, 8, 0] if wait_s else [])


def test_the_wait_is_bounded_for_each_size(
    asked: list[Bundles], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    nodes = NodeRequests({"CPU": 2.0}, wait_s=10)
    nodes.ask(due=4, held=1, count=2)
    nodes.settle(2)
    assert asked == [[{"CPU": 2.0}] * 5]
    assert "A trial is due 4 workers, and the nodes hold 2: Ray's autoscaler is asked for more" in caplog.text
    assert "the trial waits 10 s at most" in caplog.text
    now = 9.0
    assert nodes.awaited(4, 2)
    assert not nodes.awaited(2, 2)
    assert nodes.awaited(4, 3)  # a node came, and with it ten seconds more
    now = 18.0
    assert nodes.awaited(4, 3)
    now = 20.0
    assert not nodes.awaited(4, 3)
    nodes.ask(due=4, held=1, count=3)
    assert not nodes.awaited(4, 3)  # another survivor of the size waits no longer
    nodes.settle(3)
    nodes.settle(3)
    assert asked[1:] == [[]]


def test_a_script_that_ends_while_trials_wait_takes_its_request_back(
    asked: list[Bundles], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[Any] = []
    monkeypatch.setattr("atexit.register", ends.append)
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    NodeRequests({"CPU": 2.0}, wait_s=10).ask(due=4, held=1, count=2)
    for end in ends:
        end()
    assert asked == [[{"CPU": 2.0}] * 5, []]


@pytest.mark.parametrize("wrong", [-1, float("inf"), "60", True])
def test_bad_input(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"`autoscale_wait_s` is .*, but must be a finite number of seconds >= 0"):
        RASDAScheduler(autoscale_wait_s=wrong)
