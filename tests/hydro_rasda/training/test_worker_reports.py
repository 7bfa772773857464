"""Step times on a clock that the test sets."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from hydro_rasda.training.worker_reports import StepTimes

CPU = torch.device("cpu")


class Clock:
    """Steps of an optimizer that take as long as is said."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("hydro_rasda.training.worker_reports.time.perf_counter", lambda: self.now)
        self.optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)

    def iteration(self, times: StepTimes, *seconds: float, batch: int | None = None) -> float | None:
        """Steps that end so long after one another; a minute of validation follows."""
        self.optimizer.step()
        for taken in seconds:
            self.now += taken
            self.optimizer.step()
        times.settle(batch)
        self.now += 60
        return times.efficiency


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_efficiency_is_seconds_per_example_and_worker_at_the_fewest_over_those_now(clock: Clock) -> None:
    """A step takes 1 s on 2 workers with 16 examples each, and 1.25 s on 4: medians, whatever stalls."""
    first = StepTimes(clock.optimizer, 2, CPU)
    assert clock.iteration(first, batch=32) is None  # a single step
    assert clock.iteration(first, 1, 1, 9, batch=32) == 1
    assert clock.iteration(first, 30, 30, batch=32) == 1
    assert clock.iteration(first, 1, batch=32) == 1
    clock.optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    grown = StepTimes(clock.optimizer, 4, CPU, first.state())
    assert grown.efficiency is None
    assert clock.iteration(grown, 1.25, 1.25, 7, batch=64) == pytest.approx(0.8)


def test_what_is_kept_does_not_grow_for_ever(clock: Clock) -> None:
    """A journal has it once for each checkpoint."""
    times = StepTimes(clock.optimizer, 1, CPU)
    for _ in range(100):
        clock.iteration(times, 1.0)
    assert len(times.state()["1"]) < 50


@pytest.mark.parametrize(("batch", "seconds"), [((32, 32), 0.5), ((None, None), 1.0)])
def test_a_batch_may_stay_as_workers_are_added(
    clock: Clock, batch: tuple[int | None, int | None], seconds: float
) -> None:
    """Over all workers, or, where nobody says, on each: twice the workers gain twice the speed."""
    first = StepTimes(clock.optimizer, 1, CPU)
    clock.iteration(first, 1.0, batch=batch[0])
    clock.optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    assert clock.iteration(StepTimes(clock.optimizer, 2, CPU, first.state()), seconds, batch=batch[1]) == 1
