"""A host and a sweep at the same time: neither comes to another result for it, whatever ends either of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hydro_rasda import SweepConfig, TuneResult
from hydro_rasda.bubbles import BubbleBackend
from hydro_rasda.run.events import EpochsTrained, Event
from tests.hydro_rasda.bubbles.conftest import waiting_hosts
from tests.hydro_rasda.bubbles.hosts import Host, running
from tests.hydro_rasda.conftest import on_threads

Quick = Callable[..., TuneResult]


def answer(result: TuneResult) -> Any:
    """All that a sweep found, to the last digit."""
    curves = result.curves().drop(columns=["seconds"], errors="ignore")
    return result.best_config, result.best_metric, curves.sort_values(list(curves.columns)).to_csv(index=False)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """As many as there are groups at the same time."""
    with on_threads(2):
        yield


_alone: list[Any] = []


@pytest.fixture
def alone(two_threads: None, quick: Quick, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The answer without a host, found once for all tests."""
    if not _alone:
        _alone.append(answer(quick(storage_path=tmp_path_factory.mktemp("alone"))))
    return _alone[0]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_neither_host_nor_sweep_comes_to_another_result(
    schedule: str, alone: Any, two_threads: None, quick: Quick, tmp_path: Path
) -> None:
    source = tmp_path / "bubbles"
    host = Host(schedule, 2, 10_000, tmp_path / "with", source)
    with running([host]):
        beside = quick(name="beside", backend=BubbleBackend(source, checkpoint_s=0.5))
    assert answer(beside) == alone
    found, expected = host.told(), Host(schedule, 2, 100, tmp_path / "without").told()
    assert len(expected[1]["losses"]) == 100
    assert found[1]["losses"][:100] == expected[1]["losses"]  # each depends on all weights of both ranks
    assert all(0 < rank["open"] <= rank["waited"] for rank in found)


@pytest.mark.slow
def test_a_host_that_is_killed_and_one_of_another_size_lose_nothing(
    alone: Any, two_threads: None, quick: Quick, tmp_path: Path
) -> None:
    source, hosts = tmp_path / "bubbles", list[Host]()

    def come_and_go(event: Event) -> None:
        if isinstance(event, EpochsTrained) and len(hosts) == 1:
            hosts[0].kill()
            hosts.append(Host("GPipe", 3, 10_000, tmp_path / "resized", source))

    hosts.append(Host("1F1B", 2, 10_000, tmp_path / "killed", source))
    with running(hosts):
        beside = quick(name="beside", backend=BubbleBackend(source, checkpoint_s=0.5), callbacks=[come_and_go])
    assert len(hosts) == 2
    assert answer(beside) == alone
    found, expected = hosts[1].told(), Host("GPipe", 3, 50, tmp_path / "without").told()
    assert found[1]["losses"][:50] == expected[1]["losses"]


@pytest.mark.slow  # of hosts that the slow tests alone have
def test_a_rank_that_fails_ends_the_wait_for_it(quick: Quick, tmp_path: Path) -> None:
    host = Host("no such schedule", 2, 10_000, tmp_path / "with", tmp_path / "bubbles")
    with pytest.raises(RuntimeError, match="a rank of a host has ended"), running([host]):
        quick(name="beside", backend=BubbleBackend(tmp_path / "bubbles"))
    assert all(rank.poll() for rank in host.ranks)


@pytest.mark.slow
def test_a_guest_that_is_killed_comes_back(alone: Any, two_threads: None, quick: Quick, tmp_path: Path) -> None:
    source, killed = tmp_path / "bubbles", list[int]()
    with waiting_hosts(source, 2) as guests:

        def kill_one(event: Event) -> None:
            if isinstance(event, EpochsTrained) and not killed and guests[0].working and guests[0].pid:
                killed.append(guests[0].pid)
                os.kill(killed[0], signal.SIGKILL)

        beside = quick(name="beside", backend=BubbleBackend(source), callbacks=[kill_one])
        # On a busy machine, the other guest may have done all of the work by now.
        while guests[0].pid in killed:
            time.sleep(0.05)
    assert len(killed) == 1
    assert answer(beside) == alone


@pytest.mark.slow
def test_a_sweep_that_is_interrupted_goes_on_from_its_guests_last_checkpoint(
    two_threads: None, quick: Quick, tmp_path: Path
) -> None:
    alone = answer(quick(name="alone", sweep=SweepConfig(grace_period=4)))
    epochs = list[int]()

    def interrupt(event: Event) -> None:
        if isinstance(event, EpochsTrained):
            epochs.append(event.epochs)
            if len(epochs) == 4:
                raise KeyboardInterrupt

    backend = BubbleBackend(tmp_path / "bubbles", checkpoint_s=0)
    with waiting_hosts(tmp_path / "bubbles", 2):
        with pytest.raises(KeyboardInterrupt):
            quick(name="beside", sweep=SweepConfig(grace_period=4), backend=backend, callbacks=[interrupt])
        assert list((tmp_path / "beside" / "checkpoints").glob("*so-far*"))
        beside = quick(name="beside", sweep=SweepConfig(grace_period=4), backend=backend)
    assert answer(beside) == alone
    assert not list((tmp_path / "beside" / "checkpoints").glob("*so-far*"))
