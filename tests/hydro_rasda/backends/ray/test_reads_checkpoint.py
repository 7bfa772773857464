"""Which training functions are said to go on from their checkpoints, and what is said of others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle, tune
from ray.tune.trainable.function_trainable import wrap_function

from benchmarks.ray_stand_in import StandInController, stand_in_trial
from hydro_rasda import RASDAScheduler, elastic
from hydro_rasda.backends.ray.worker_counts import reads_checkpoint
from tests.hydro_rasda.backends.ray import curves, trainables


def forgets(config: dict[str, Any]) -> None:
    tune.report({"loss": 1.0}, checkpoint=tune.Checkpoint.from_directory("."))


def goes_on_elsewhere(config: dict[str, Any]) -> None:
    helper(config)
    forgets(config)


def helper(config: dict[str, Any]) -> None:
    [curves.curve(config) for _ in range(1)]  # type: ignore[func-returns-value]


class Called:
    def __call__(self, config: dict[str, Any]) -> None:
        helper(config)

    def forgets(self, config: dict[str, Any]) -> None:
        forgets(config)


CASES: list[tuple[Callable[..., None], bool]] = [
    (forgets, False),
    (partial(forgets), False),
    (tune.with_parameters(forgets, data=1), False),
    (Called().forgets, False),
    (curves.curve, True),
    (partial(curves.curve), True),
    (goes_on_elsewhere, True),
    (Called().__call__, True),
    (lambda config: helper(config), True),
    (elastic(trainables.counting), True),
]


def in_ray(train: Callable[..., None]) -> bool:
    """Whether a function has values in the store of the cluster that was there when it was made."""
    return "with_parameters" in getattr(train, "__qualname__", "")


@pytest.mark.parametrize(("train", "reads"), CASES)
def test_which_functions_read_their_checkpoint(train: Any, reads: bool) -> None:
    assert reads_checkpoint(wrap_function(train)) == reads


@pytest.mark.parametrize(("train", "reads"), [case for case in CASES if not in_ray(case[0])])
def test_which_of_them_do_is_seen_of_their_pickles_too(train: Any, reads: bool) -> None:
    assert reads_checkpoint(cloudpickle.loads(cloudpickle.dumps(wrap_function(train)))) == reads


@pytest.mark.parametrize("train", [forgets, curves.curve])
def test_one_that_does_not_is_named_at_its_first_restart(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "Resources": {"CPU": 32.0}}])
    scheduler = RASDAScheduler(max_t=4, metric="loss", mode="min")
    controller = StandInController(scheduler, [[0.0] * 4], str(tmp_path))
    trainable = wrap_function(train)

    def trial(number: int, folder: str) -> SimpleNamespace:
        made: SimpleNamespace = stand_in_trial(number, folder)
        made.get_trainable_cls = lambda: trainable
        return made

    monkeypatch.setattr("benchmarks.ray_stand_in.stand_in_trial", trial)
    with caplog.at_level(logging.WARNING, logger="hydro_rasda"):
        controller.run()
    said = "goes on after iteration 1 with 2 workers. It does not call `tune.get_checkpoint()`"
    assert caplog.text.count(said) == (train is forgets)
    assert caplog.text.count("It does not call") == (train is forgets)
