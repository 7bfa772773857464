"""What is expected of jobs, by what was given and what was measured."""

from __future__ import annotations

from typing import Any

import pytest

from hydro_rasda.packing import Device, Estimate, Task, nvml
from hydro_rasda.packing.job_estimates import Estimates
from hydro_rasda.packing.packer import Packer
from hydro_rasda.schedulers import Job
from hydro_rasda.schedulers.packing_policy import GUESS, MARGIN


def task(name: str, memory: float | None = None, share: float | None = None, seconds: float | None = None) -> Task:
    return Task(["true"], Estimate(memory, share, seconds), "kind", name)


def test_what_was_given_holds_until_something_is_measured() -> None:
    assert Estimates().of(task("a", 100, 0.5, 60)) == Job("a", 100, 0.5, 60, "kind")
    assert Estimates().of(task("a", 100, 0.5)) == Job("a", 100, 0.5, 0, "kind")
    assert Estimates().of(task("a", share=0.5)) is None
    assert Estimates().of(task("a", memory=100)) is None


def test_estimates_of_a_kind_are_corrected_in_proportion() -> None:
    estimates = Estimates()
    estimates.learn(task("a", 100, 0.5, 60), Estimate(200, 0.25, 30))
    estimates.learn(task("b", 50, 0.5, 60), Estimate(75, 0.2, 90))
    assert estimates.of(task("c", 10, 0.4, 6)) == pytest.approx(
        Job(
            "c", 20 * MARGIN, 0.2 * MARGIN, 6, "kind"
        )  # twice the memory, half the share; seconds were right on average
    )


def test_jobs_without_estimates_are_taken_to_be_alike() -> None:
    estimates = Estimates()
    estimates.learn(task("a"), Estimate(200, 0.25, 30))
    estimates.learn(task("b"), Estimate(100, 0.5, 10))
    assert estimates.of(task("c")) == Job("c", MARGIN * 200, MARGIN * 0.5, 20, "kind")
    assert estimates.of(task("d", memory=7, share=0.1)) == Job("d", 7, 0.1, 20, "kind")


def test_of_a_kind_that_nobody_knows_more_than_the_largest_of_others_is_expected() -> None:
    estimates = Estimates()
    estimates.learn(task("a"), Estimate(200, 0.25, 30))
    estimates.learn(task("b", memory=10), Estimate(300, 0.5, 10))
    assert estimates.of(Task(["true"], kind="other", name="c")) == Job("c", GUESS * 300, 0.5, 30, "other")
    assert estimates.of(Task(["true"], Estimate(7), "other", "d")) == Job("d", 7, 0.5, 30, "other")


def test_a_job_that_is_measured_again_counts_once() -> None:
    estimates = Estimates()
    for seconds in (10, 20, 30):
        estimates.learn(task("a"), Estimate(100, 0.5, seconds))
    estimates.learn(task("b"), Estimate(seconds=50))
    found = estimates.of(task("c"))
    assert found is not None
    assert found.seconds == 40


def test_what_one_call_learnt_holds_in_the_next_until_it_is_measured_again() -> None:
    first = Estimates()
    first.learn(task("a"), Estimate(200, 0.25, 30))
    first.learn(task("b", memory=100), Estimate(memory=50))
    second = Estimates(first.learnt())
    assert second.of(task("c")) == first.of(task("c"))
    assert second.of(task("d", memory=10)) == Job("d", MARGIN * 5, MARGIN * 0.25, 30, "kind")
    assert second.of(Task(["true"], kind="other", name="e")) is None
    second.learn(task("f"), Estimate(memory=10))
    assert second.of(task("c")) == Job("c", MARGIN * 10, MARGIN * 0.25, 30, "kind")
    assert Estimates(second.learnt()).learnt() == second.learnt()


class Running:
    """A job on a GPU that holds `now` bytes; None if the driver does not tell."""

    def __init__(self, device: Device, expected: float, now: float | None = None) -> None:
        self.device, self.expected, self.untold, self.now = device, expected, now is None, now or 0.0

    def holds(self, memory: float) -> None:
        self.now = memory


@pytest.mark.parametrize(
    ("used", "now", "held"),
    [
        (1000.0, [300.0, None, None], [300, 200, 400]),
        (1000.0, [None, None, None], [225, 225, 450]),
        (1000.0, [300.0, 100.0, None], [300, 100, 500]),
        (300.0, [300.0, None, None], [300, 0, 0]),
        (1000.0, [300.0, 100.0, 50.0], [300, 100, 50]),
    ],
)
def test_jobs_share_what_their_gpu_holds_if_its_driver_does_not_tell_whose_it_is(
    used: float, now: list[float | None], held: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In proportion to what they are expected to take. 100 bytes were in use before the first of them."""
    monkeypatch.setattr(nvml, "used_memory", lambda gpu: used)
    device, other = (Device(name, 1e9, 1.0, gpu=name) for name in ("GPU-0", "GPU-1"))
    packer: Any = Packer.__new__(Packer)
    packer._before = {"GPU-0": 100.0}
    jobs = [Running(device, expected, of) for expected, of in zip((10.0, 10.0, 20.0), now)]
    packer.running = dict(enumerate([*jobs, Running(other, 10.0, 7.0)]))
    packer._share_out(device)
    assert [job.now for job in packer.running.values()] == [*held, 7.0]
