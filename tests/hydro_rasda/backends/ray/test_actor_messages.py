"""What a device of a cluster tells its tuner while it trains, without a cluster."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle

from hydro_rasda.backends.ray import actor_messages
from hydro_rasda.backends.ray.actor_messages import Reporter
from hydro_rasda.history.lines import EpochTold
from tests.hydro_rasda.conftest import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(actor_messages, "time", found)
    return found


@pytest.fixture
def told() -> list[Any]:
    """The messages of device 3, each with its kind and content."""
    return []


@pytest.fixture
def reporter(told: list[Any]) -> Reporter:
    def write(device: int, message: bytes) -> None:
        assert device == 3
        told.append(cloudpickle.loads(message))

    return Reporter(SimpleNamespace(write=SimpleNamespace(remote=write)), 3)


def entry(epoch: int) -> EpochTold:
    return 7, epoch, {"val_loss": 1 / epoch}


def test_epochs_that_follow_each_other_quickly_are_told_together(
    clock: Clock, reporter: Reporter, told: list[Any]
) -> None:
    """With the metrics of the last of them, and the journal's entries of all."""
    with reporter.telling():
        reporter.notify(2, {"val_loss": [1.0]}, [entry(1)])
        assert told == [("notified", (2, {"val_loss": [1.0]}, [entry(1)]))]
        for epoch in (2, 3, 4):
            clock.now += 0.04
            reporter.notify(2, {"val_loss": [1 / epoch]}, [entry(epoch)])
        assert told[1:] == [("notified", (6, {"val_loss": [1 / 4]}, [entry(2), entry(3), entry(4)]))]
        clock.now += 0.04
        reporter.notify(2, {"val_loss": [1 / 5]})
        assert len(told) == 2
    assert told[2:] == [("notified", (2, {"val_loss": [1 / 5]}, []))], "the last epoch is told at the end"


@pytest.mark.filterwarnings("always")
def test_warnings_are_told_at_the_end_and_without_epochs_nothing_else_is(
    clock: Clock, reporter: Reporter, told: list[Any]
) -> None:
    with reporter.telling():
        warnings.warn("it is slow", UserWarning, stacklevel=1)
        assert told == []
    ((kind, (warning,)),) = told
    assert (kind, warning["message"], warning["category"]) == ("warned", "it is slow", UserWarning)
    with reporter.telling():
        pass
    assert len(told) == 1
