"""The training of a guest that nobody stops: each quantum of a step begins in a bubble that is long enough."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hydro_rasda.backends.process_pool import write_shared
from hydro_rasda.bubbles import guest_training
from hydro_rasda.bubbles.guest_training import Quanta
from hydro_rasda.problem.problem import OwnLoop, Problem
from tests.hydro_rasda.conftest import Clock

CPU = torch.device("cpu")


class Host(Clock):
    """The clock of a host, and its page: a bubble is open from 0 to 100 s, from 200 to 300 s, and so on."""

    now = 0.0
    leaving = False

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    @property
    def until(self) -> float:
        closes = self.now // 200 * 200 + 100
        return closes if self.now < closes else 0.0


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    found = Host()
    monkeypatch.setattr(guest_training, "time", found)
    monkeypatch.setattr(guest_training, "_LOOK_S", 1.0)
    return found


class Steps:
    """Steps of training whose forward pass takes 10 s, and whose rest takes 3 s; `began` has the times of both."""

    def __init__(self, host: Host) -> None:
        self.host, self.began = host, list[tuple[float, float]]()
        self._objective = Quanta(host, CPU).objective(self._forward)  # type: ignore[arg-type]
        self._model = nn.Linear(1, 1)

    def _forward(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        self._at = self.host.now
        self.host.now += 10.0
        return {"loss": batch}

    def step(self) -> tuple[float, float]:
        """Return when the forward pass of a step began, and when its rest did."""
        assert self._objective(self._model, 7) == {"loss": 7}
        began = self._at, self.host.now
        self.host.now += 3.0
        return began


def test_each_of_two_quanta_waits_for_a_bubble(host: Host) -> None:
    host.now = 150.0
    steps = Steps(host)
    assert steps.step() == (200.0, 210.0)
    host.now = 290.0
    assert steps.step() == (290.0, 400.0), "the forward pass ends with its bubble"
    host.now = 500.0
    assert steps.step() == (600.0, 610.0)


def test_a_quantum_does_not_begin_where_one_of_its_kind_would_outlast_the_bubble(host: Host) -> None:
    """A tenth is added to the 10 s and 3 s, or a fifth at first."""
    steps = Steps(host)
    for _ in range(3):
        steps.step()
    host.now = 87.0
    assert steps.step() == (87.0, 200.0), "13 s are enough for a forward pass, the 3 s after it are not for the rest"
    host.now = 289.0
    assert steps.step() == (400.0, 410.0), "11 s are not enough"


def test_a_guest_that_leaves_waits_for_no_bubble(host: Host) -> None:
    """Its epoch ends before it does."""
    host.now, host.leaving = 150.0, True
    assert Steps(host).step() == (150.0, 160.0)


def test_a_loop_of_the_users_own_is_refused_by_a_guest_that_nobody_stops(
    host: Host, problem: Problem, tmp_path: Path
) -> None:
    own = replace(problem, own_loop=OwnLoop(print, None))
    write_shared(tmp_path / "problem", own)
    with pytest.raises(ValueError, match="`train` cannot train in bubbles with `preempt=False`, as on GPUs"):
        guest_training._opened(host, CPU, False, print, tmp_path / "problem")  # type: ignore[arg-type]
