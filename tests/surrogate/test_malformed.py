"""Every public argument, handed what it is not for: taken rightly, or refused by its name before any work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surrogate import (
    compare_rankings,
    coordinate_check,
    doubtful_hyperparameters,
    lr_multipliers,
    make_surrogate,
    plain_score_fn,
    plan_shrink,
    plan_surrogate,
    shrink,
    transfer_check,
    weight_decay_multipliers,
)
from tests.malformed import Right, begin, either, faults, flag, instance, integer, nothing, number, one_of

BATCH = torch.ones(4, 2)
CONFIG = {"lr": 0.1}
SCORES = [1.0, 2.0, 3.0, 4.0]


def model(config: Any, width_ratio: float) -> nn.Module:
    width = int(16 * width_ratio)
    return nn.Sequential(nn.Linear(2, width), nn.Linear(width, 3))


def full() -> nn.Module:
    return model({}, 1.0)


def loss(module: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = module(batch)
    return out.square().mean()


def coordinates(**arguments: Any) -> object:
    known = {"model_fn": begin, "config": CONFIG, "width_ratios": [0.5, 1.0], "batches": [BATCH], "objective": loss}
    return coordinate_check(**{**known, **arguments})


def transfer(**arguments: Any) -> object:
    return transfer_check(**{"score_fn": begin, "configs": [CONFIG] * 4, **arguments})


def scorer(**arguments: Any) -> object:
    known = {"model_fn": model, "train_batches": [BATCH], "val_batches": [BATCH], "objective": loss}
    return plain_score_fn(**{**known, **arguments})


ratio, at_least_0 = number(0, 1, open_=True), number(0)
width = either(ratio, one_of(1))
score = instance(int, float)
scores = either(lambda v: isinstance(v, int | float) and not isinstance(v, bool))
tolerance: Right = lambda v: scores(v) and v >= 0  # noqa: E731
a_list: Right = lambda v: isinstance(v, list | tuple) and len(v) > 0  # noqa: E731
names: Right = lambda v: isinstance(v, list | tuple | dict) and all(isinstance(k, str) for k in v)  # noqa: E731

CASES: list[tuple[Callable[[Any], object], str, Right]] = [
    (lambda v: make_surrogate(v, CONFIG, 0.5), "model_fn", nothing),
    (lambda v: make_surrogate(model, CONFIG, v), "width_ratio|model_fn", width),
    (lambda v: make_surrogate(model, CONFIG, 0.5, zero_readout=v), "zero_readout", flag),
    (lambda v: make_surrogate(model, CONFIG, 0.5, example_input=v), "example_input", one_of(None)),
    (lambda v: make_surrogate(model, CONFIG, 0.5, plan=v), "plan", one_of(None)),
    (lambda v: plan_surrogate(v, CONFIG, 0.5), "model_fn", nothing),
    (lambda v: plan_surrogate(model, CONFIG, v), "width_ratio|model_fn", ratio),
    (lambda v: shrink(v, 0.5, BATCH), "module", nothing),
    (lambda v: shrink(full(), v, BATCH), "width_ratio", width),
    (lambda v: shrink(full(), 0.5, v), "example_input", nothing),
    (lambda v: shrink(full(), 0.5, BATCH, zero_readout=v), "zero_readout", flag),
    (lambda v: shrink(full(), 0.5, BATCH, plan=v), "plan", one_of(None)),
    (lambda v: plan_shrink(v, 0.5, BATCH), "module", nothing),
    (lambda v: plan_shrink(full(), v, BATCH), "width_ratio", ratio),
    (lambda v: lr_multipliers(v, "sgd"), "surrogate", nothing),
    (lambda v: lr_multipliers(make_surrogate(model, CONFIG, 0.5), v), "optimizer", nothing),
    (lambda v: weight_decay_multipliers(make_surrogate(model, CONFIG, 0.5), "sgd", independent=v), "independent", flag),
    (lambda v: compare_rankings(v, SCORES), "narrow", nothing),
    (lambda v: compare_rankings([1, 2, 3, v], SCORES), "narrow", scores),
    (lambda v: compare_rankings(SCORES, v), "wide", nothing),
    (lambda v: compare_rankings(SCORES, SCORES, mode=v), "mode", nothing),
    (lambda v: compare_rankings(SCORES, SCORES, top_k=v), "top_k", integer(1, 4)),
    (lambda v: compare_rankings(SCORES, SCORES, tolerance=v), "tolerance", tolerance),
    (lambda v: doubtful_hyperparameters(v, 0.5), "keys", names),
    (lambda v: doubtful_hyperparameters(["lr"], v), "width_ratio", width),
    (lambda v: coordinates(model_fn=v), "model_fn", nothing),
    (lambda v: coordinates(config=v), "config", instance(dict)),
    (lambda v: coordinates(width_ratios=v), "width_ratios", nothing),
    (lambda v: coordinates(width_ratios=[0.25, v]), "width_ratios", width),
    (lambda v: coordinates(batches=v), "batches", a_list),
    (lambda v: coordinates(objective=v), "objective", nothing),
    (lambda v: coordinates(seeds=v), "seeds", integer(1)),
    (lambda v: coordinates(plain=v), "plain", flag),
    (lambda v: coordinates(max_slope=v), "max_slope", tolerance),
    (lambda v: transfer(score_fn=v), "score_fn", nothing),
    (lambda v: transfer(configs=v), "configs", nothing),
    (lambda v: transfer(configs=[v] * 4), "configs", instance(dict)),
    (lambda v: transfer(narrow_width_ratio=v, wide_width_ratio=1), "narrow_width_ratio", ratio),
    (lambda v: transfer(wide_width_ratio=v), "wide_width_ratio", width),
    (lambda v: transfer(mode=v), "mode", nothing),
    (lambda v: transfer(top_k=v), "top_k", integer(1, 4)),
    (lambda v: transfer(tolerance=v), "tolerance", tolerance),
    (lambda v: scorer(model_fn=v), "model_fn", nothing),
    (lambda v: scorer(train_batches=v), "train_batches", a_list),
    (lambda v: scorer(val_batches=v), "val_batches", a_list),
    (lambda v: scorer(objective=v), "objective", nothing),
    (lambda v: scorer(seed=v), "seed", integer(0, 2**63 - 1)),
]


@pytest.mark.parametrize(("call", "argument", "right"), CASES)
def test_no_argument_is_taken_for_what_it_is_not(call: Callable[[Any], object], argument: str, right: Right) -> None:
    assert "\n".join(faults(call, argument, right)) == ""
