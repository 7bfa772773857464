from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.replay.table import load
from hydro_rasda import RaceConfig, SweepConfig, TuneResult, choice
from hydro_rasda.common.heat_names import HeatName
from hydro_rasda.history.lines import Unit, metric_lines
from hydro_rasda.problem.problem import OwnLoop, Problem
from hydro_rasda.results.winner_checks import Losses, overfits_beyond, overfitting_line, undecided_line
from hydro_rasda.run.state import Run
from tests.hydro_rasda.models import Config
from tests.hydro_rasda.scripted import open_run

Pair = tuple[Tensor, Tensor]

# Validation gains 0.4, and loses 0.25 again, while training ends 0.85 below it.
FULL = [Losses(1.2, 1.0), Losses(0.6, 0.6), Losses(0.3, 0.7), Losses(0.0, 0.85)]
NARROW = [Losses(1.2, 1.1), Losses(0.6, 0.8)]


def shifted(curve: Sequence[Losses], unit: float, zero: float) -> list[Losses]:
    return [Losses(unit * train + zero, unit * val + zero) for train, val in curve]


def test_all_three_must_hold() -> None:
    assert overfits_beyond(FULL, NARROW)
    flat = [*FULL[:2], Losses(0.0, 0.799), Losses(0.0, 0.75)]  # it lost 0.15, of a gap of 0.75
    assert not overfits_beyond(flat, NARROW)
    narrow_gap = [Losses(1.2, 5.0), *FULL[1:]]  # a gap of 0.85, where 4.4 was gained
    assert not overfits_beyond(narrow_gap, NARROW)
    assert overfits_beyond(FULL, [Losses(0.4, 0.8)])  # less than half as far below
    assert not overfits_beyond(FULL, [Losses(0.37, 0.8)])
    assert overfits_beyond(FULL, [Losses(0.9, 0.8)])  # whose training loss is the higher one, as with dropout


@pytest.mark.parametrize(("unit", "zero"), [(1000.0, 0.0), (0.001, 0.0), (1.0, -50.0)])
def test_units_and_zeros_of_losses_do_not_matter(unit: float, zero: float) -> None:
    """Losses of densities are negative."""
    assert overfits_beyond(shifted(FULL, unit, zero), shifted(NARROW, unit, zero))
    flat = [*FULL[:2], Losses(0.0, 0.62)]
    assert not overfits_beyond(shifted(flat, unit, zero), shifted(NARROW, unit, zero))


@pytest.mark.parametrize(
    ("full", "narrow"),
    [
        ([], NARROW),
        (FULL[-1:], NARROW),
        (FULL, []),
        ([*FULL, Losses(math.nan, math.nan)], NARROW),
        (FULL, [Losses(0.1, math.inf)]),
        ([Losses(0.5, 0.4), Losses(0.45, 0.3), Losses(0.4, 0.35)], NARROW),  # training lies above validation
    ],
)
def test_what_cannot_be_compared_is_not_told(full: list[Losses], narrow: list[Losses]) -> None:
    assert not overfits_beyond(full, narrow)


@pytest.mark.parametrize(
    ("task", "overfits"),
    [
        *((task, False) for task in ("digits", "residual", "warm_up", "turbulence", "recurrent")),
        *((task, True) for task in ("breast_cancer", "diabetes")),
    ],
)
def test_on_recorded_trainings(task: str, overfits: bool) -> None:
    """Of the six best configurations of each seed, against surrogates of 1/8 of the width at the end of a sweep."""
    table = load(task)
    running = table.about.metrics.index("running_loss")
    train = {width: table.scores[table.about.widths.index(width), ..., running] for width in (1.0, 0.125)}
    val = {1.0: table.curves(1.0, ema=True, loss=True), 0.125: table.curves(0.125, loss=True)}
    end, sign = table.about.max_t // 3, -1 if table.about.mode == "max" else 1
    found = []
    for seed, scores in enumerate(table.curves(1.0, ema=True)):
        order = np.argsort(np.nan_to_num(sign * scores, nan=np.inf).min(-1))
        for config in order[:6].tolist():
            full = [*map(Losses, train[1.0][seed, config].tolist(), val[1.0][seed, config].tolist())]
            narrow = [*map(Losses, train[0.125][seed, config].tolist(), val[0.125][seed, config].tolist())][:end]
            found.append(overfits_beyond(full, narrow))
    assert (sum(found) >= len(found) / 3) if overfits else not any(found)


@pytest.fixture
def opened(problem: Problem, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """A run of two trials, whose losses are as told."""
    runs: list[Run] = []

    def call(**settings: object) -> Run:
        run = open_run(tmp_path / str(len(runs)), problem, 2, **settings)
        runs.append(run)
        of: tuple[tuple[HeatName, int, Sequence[Losses]], ...] = (
            ("sweep", 0, NARROW),
            ("race", 0, FULL),
            ("sweep", 1, NARROW),
            ("race", 1, [Losses(0.9, 1.0), Losses(0.9, 0.9)]),
        )
        for heat, number, curve in of:
            history = [(epoch, {"train_loss": t, "val_loss": v}) for epoch, (t, v) in enumerate(curve, 1)]
            run.record(f"{heat}/of-{number}", Unit(None, metric_lines(heat, number, history)))
        run.history.best |= {0: (2, 0.6), 1: (2, 0.9)}
        return run

    yield call
    for run in runs:
        run.store.close()


def test_it_is_told_of_the_winner(opened: Callable[..., Run]) -> None:
    told = (
        "trial 0 overfits at full size, which its surrogate of 2 epochs did not show: val_loss rises from 0.6 after "
        "epoch 2 to 0.85, and train_loss ends at 0. Sweep the model itself (`sweep=SweepConfig(surrogate=1)`)"
    )
    assert overfitting_line(opened(), [0, 1]) == [
        f"{told}, or end such trainings early (`race=RaceConfig(patience=3)`)"
    ]
    run = opened(race=RaceConfig(patience=2))
    assert overfitting_line(run, [0, 1]) == [told]
    run.history.metrics["race", 0][0]["val_loss"] = None  # an epoch without a finite loss is not the best one
    assert overfitting_line(run, [0, 1]) == [told]
    assert overfitting_line(opened(sweep=SweepConfig(surrogate=1)), [0, 1]) == []
    assert overfitting_line(opened(), [1]) == []
    assert overfitting_line(opened(), []) == []


def regressor(config: Config, width_ratio: float = 1.0) -> nn.Module:
    width = int(256 * width_ratio)
    hidden = nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
    return nn.Sequential(hidden, nn.Linear(width, 1))


@pytest.mark.usefixtures("one_process")
def test_an_error_of_the_comparison_is_said(quick: Callable[..., TuneResult]) -> None:
    """The loss takes no batches as small as those that the two are compared by."""

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) + 0 / max(0, len(target) - 7)

    arguments = {"num_samples": 3, "max_t": 1, "race": RaceConfig(top_k=2), "full_trainings": 2}
    result = quick(loss_fn=loss_fn, **arguments)
    assert sum(record.status == "finished" for record in result.trials) == 2
    (line,) = undecided_line(result)
    assert re.fullmatch(r"chance may have chosen between trials \d and \d: .* failed with ZeroDivisionError: .*", line)
    problem = result._problem
    for other in (
        replace(problem, own_loop=OwnLoop(lambda worker: None, None)),
        replace(problem, whole_names=("loss",)),
        problem.with_settings(folds=2),
    ):
        assert undecided_line(replace(result, _problem=other)) == []
    assert undecided_line(replace(result, metric="train_loss")) == []


@pytest.mark.usefixtures("one_process")
def test_tune_says_so_once_and_not_of_digits(quick: Callable[..., TuneResult], digits: tuple[Pair, Pair]) -> None:
    data = load_diabetes()
    x = torch.tensor(data.data, dtype=torch.float32) * 20
    y = torch.tensor((data.target - 152) / 77, dtype=torch.float32)[:, None]
    few = {"train_data": (x[:150], y[:150]), "val_data": (x[150:], y[150:]), "loss_fn": F.mse_loss}
    space = {"lr": choice([0.003, 0.004]), "optimizer": "adamw", "batch_size": 16}
    asked = {
        "num_samples": 3,
        "max_t": 27,
        "sweep": {"reduction_factor": 3, "surrogate": 1 / 8},
        "race": RaceConfig(top_k=1),
    }
    for _ in range(2):  # the second call finds all done
        result = quick(model_fn=regressor, space=space, **few, **asked)
        (told,) = [text for _, text in result.messages if "overfits at full size" in text]
        assert told.endswith(
            "Sweep the model itself (`sweep=SweepConfig(surrogate=1)`), "
            "or end such trainings early (`race=RaceConfig(patience=3)`)"
        )
    plain = quick(name="digits")
    assert not any("overfits" in text for _, text in plain.messages)
