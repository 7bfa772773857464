"""An objective that says itself how its parameters are updated, against `torch.optim` with groups of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusion.optim import optimizer
from hydro_rasda import RaceConfig, SweepConfig
from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import Group, Span, Task
from hydro_rasda.problem.objective import OptimizerSettings, supervised
from hydro_rasda.problem.precision import in_precision
from hydro_rasda.problem.problem import Problem
from hydro_rasda.training.full_size import full_size_learner
from hydro_rasda.training.group_training import states_of, train_group
from hydro_rasda.training.loop import train_epochs
from hydro_rasda.training.lr_and_decay_by_parameter import multipliers
from surrogate import coordinate_check, lr_multipliers, make_surrogate
from surrogate.coordinates import CoordinateCheck
from tests.surrogate.models import ModelFn, transformer
from tests.surrogate.test_coordinates import WIDTHS, deep, random_batches, tied
from tests.surrogate.test_coordinates import objective as next_token

pytestmark = pytest.mark.usefixtures("one_process")

TRIALS = {n: Trial(n, {"rate": rate, "batch_size": 64}) for n, rate in enumerate([1e-2, 3e-3])}
DECAY, SLOWER = 0.5, 0.1


class SparesBiases:
    """Its learning rate has another name, biases do not decay, and the first layer learns more slowly."""

    def __call__(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        return supervised()(model, batch)

    def optimizer_settings(self, model: nn.Module, config: Mapping[str, Any]) -> OptimizerSettings:
        names = [name for name, _ in model.named_parameters()]
        return OptimizerSettings(
            {"optimizer": "adamw", "lr": config["rate"], "weight_decay": DECAY},
            lr_factors={name: SLOWER for name in names if name.startswith("0.")},
            weight_decay_factors={name: 0.0 for name in names if name.endswith("bias")},
        )


def by_the_book(problem: Problem, trial: Trial, epochs: int) -> dict[str, Tensor]:
    model, rate = problem.target(trial), trial.config["rate"]
    groups = [
        {
            "params": [p],
            "lr": rate * (SLOWER if name.startswith("0.") else 1),
            "weight_decay": 0.0 if name.endswith("bias") else DECAY,
        }
        for name, p in model.named_parameters()
    ]
    book = torch.optim.AdamW(groups)
    for epoch in range(epochs):
        for x, y in problem.train_data.epoch(64, epoch):
            book.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            book.step()
    return dict(model.named_parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_fused_sweep_and_the_full_size_that_goes_on_from_it(problem: Problem, precision: Any) -> None:
    problem = replace(problem, objective=in_precision(SparesBiases(), precision)).with_settings(
        sweep=SweepConfig(surrogate=1), race=RaceConfig(keep="last")
    )
    task = Task("sweep", (Group("kind", (0, 1), fused=True),), (), Span(0, 1))
    outcome = train_group(problem, TRIALS, task, lambda key: {})
    assert outcome.failures == {}
    for number, trial in TRIALS.items():
        learner = full_size_learner(problem, trial)
        learner.load(*states_of(problem, TRIALS, number, "sweep", lambda key: {"parts": outcome.checkpoint}))
        assert [epoch for epoch, _ in train_epochs(learner, problem, Span(1, 3), 64, [number])] == [2, 3]
        if precision == "fp32":
            expected = by_the_book(problem, trial, 3)
            for name, value in learner.model.named_parameters():
                torch.testing.assert_close(value, expected[name], rtol=2e-3, atol=2e-4)


def test_its_factors_multiply_mups(problem: Problem) -> None:
    model = problem.surrogate(Trial(0, {"lr": 0.1}))
    plain = multipliers(OptimizerSettings({}), model, 0.5)
    own = multipliers(OptimizerSettings({}, {"2.weight": 3.0}, {"2.weight": 0.0}), model, 0.5)
    assert own["lr_multipliers"]["adamw"]["2.weight"] == 3 * plain["lr_multipliers"]["adamw"]["2.weight"] == 6
    assert own["weight_decay_multipliers"]["adamw"]["2.weight"] == 0
    assert own["lr_multipliers"]["sgd"]["0.weight"] == plain["lr_multipliers"]["sgd"]["0.weight"]


CHECKED: dict[str, dict[str, Any]] = {
    **{
        adjust: {"optimizer": "muon", "lr": 0.02, "lr.adamw": 0.005, "adjust_lr_fn": adjust, "weight_decay": 0.0}
        for adjust in ("original", "match_rms_adamw")
    },
    "lion": {"optimizer": "lion", "lr": 0.003},
    "adafactor": {"optimizer": "adafactor", "lr": 0.05},
    "prodigy": {"optimizer": "prodigy", "lr": 1.0, "d0": 1e-4},
    "schedule_free_adamw": {"optimizer": "schedule_free_adamw", "lr": 0.003},
    "schedule_free_sgd": {"optimizer": "schedule_free_sgd", "lr": 0.1},
}


def _coordinates(monkeypatch: pytest.MonkeyPatch, model_fn: ModelFn, name: str, *, muls: bool) -> CoordinateCheck:
    """Check coordinates of a model that trains at full size's optimizer, with muP's multipliers or without."""
    config = CHECKED[name]

    def make(model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
        return optimizer(model, config, **(multipliers(OptimizerSettings(config), model, 1 / 2) if muls else {}))

    monkeypatch.setattr("surrogate.training.make_plain_optimizer", make)
    batches = random_batches(model_fn)[:1] * 5
    # Muon multiplies matrices of the width by each other: at half of 512, its steps cost an eighth.
    widths = WIDTHS[:-1] if model_fn is deep and config["optimizer"] == "muon" else WIDTHS
    return coordinate_check(model_fn, config, widths, batches, next_token, seeds=2)


CHECKS = [(deep, name) for name in CHECKED if name != "original"] + [(transformer, "adafactor"), (tied, "lion")]
"""Each optimizer with one model, and each model."""
MORE_CHECKS = [(of, name) for of in (deep, transformer, tied) for name in CHECKED if (of, name) not in CHECKS]


@pytest.mark.parametrize(
    ("model_fn", "name"), [*CHECKS, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE_CHECKS)]
)
def test_multipliers_keep_coordinates(model_fn: ModelFn, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _coordinates(monkeypatch, model_fn, name, muls=True)
    assert found.passed, found.table()


@pytest.mark.parametrize(
    "name", ["lion", "adafactor", "prodigy", pytest.param("match_rms_adamw", marks=pytest.mark.slow)]
)
def test_without_them_hidden_layers_grow(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _coordinates(monkeypatch, deep, name, muls=False)
    assert {"2", "4"} <= {*found.growing}, found.table()


@pytest.mark.parametrize("model_fn", [deep, pytest.param(transformer, marks=pytest.mark.slow)])
def test_prodigys_estimate_is_the_targets_at_each_width(model_fn: ModelFn) -> None:
    """With muP's factors alone: it estimates how far weights over these are from a solution."""

    def estimate(ratio: float, seed: int, muls: bool) -> float:
        torch.manual_seed(seed)
        model, config = make_surrogate(model_fn, {}, ratio), {"optimizer": "prodigy", "lr": 1.0}
        opt = optimizer(model, config, **(multipliers(OptimizerSettings(config), model, 1 / 2) if muls else {}))
        for batch in random_batches(model_fn)[:1] * 20:
            opt.zero_grad()
            next_token(model, batch).backward()
            opt.step()
        found: float = opt.param_groups[0]["d"]
        return found

    target, narrow, plain = (
        math.exp(sum(math.log(estimate(ratio, seed, muls)) for seed in range(3)) / 3)
        for ratio, muls in ((1.0, True), (1 / 8, True), (1 / 8, False))
    )
    assert target > 1e-3
    assert narrow == pytest.approx(target, rel=0.3)
    assert plain > 2.5 * target


def test_muon_by_the_table() -> None:
    """Of a hidden matrix, 1 by the original adjustment and the root of the width by the other."""
    surrogate = make_surrogate(deep, {}, 1 / 4)
    original, matched = lr_multipliers(surrogate, "muon.original"), lr_multipliers(surrogate, "muon")
    assert (original["2.weight"], matched["2.weight"]) == (1.0, 2.0)
    # [128, 64] for [512, 64]: the root of rows over columns is in the original adjustment, and in the shape.
    assert (original["0.weight"], matched["0.weight"]) == (1.0, 1.0)
    assert original["2.bias"] == lr_multipliers(surrogate, "adamw")["2.bias"]
