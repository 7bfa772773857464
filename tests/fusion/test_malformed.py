"""Every public argument, handed what it is not for: taken rightly, or refused by its name before any work."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fusion import (
    FusedModel,
    FusedOptimizer,
    GraphedStep,
    clip_grad_norm_,
    dry_run,
    fuse,
    fused_optimizer,
    fusion_key,
    lr_factor,
    pad_lora,
    plan_fusion,
    trim_lora,
)
from fusion.optim import FusedAdam, FusedAdamW, FusedSGD, optimizer
from tests.malformed import (
    Right,
    begin,
    either,
    empty_mapping,
    faults,
    flag,
    instance,
    integer,
    nothing,
    number,
    one_of,
)

BATCH = torch.ones(4, 2)
CONFIG = {"optimizer": "sgd", "lr": 0.1}


def fused() -> FusedModel:
    return fuse([nn.Linear(2, 3) for _ in range(2)])


def sgd() -> FusedSGD:
    return FusedSGD(fused(), lr=0.1)


def plan(**arguments: Any) -> object:
    defaults = {"modules": [nn.Linear(2, 3)] * 2, "configs": [CONFIG] * 2, "objective": begin, "batch": BATCH}
    return plan_fusion(**{**defaults, **arguments})


def graphed(**arguments: Any) -> GraphedStep:
    defaults: dict[str, Any] = {"step": len, "model": nn.Linear(1, 1), "optimizer": None}
    return GraphedStep(**{**defaults, **arguments})


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = model(batch)
    return out.square().mean()


positive, at_least_0 = number(0, open_=True), number(0)
fraction = either(number(0, 1, open_=True), one_of(0))

any_hashable: Right = lambda value: not isinstance(value, list | dict | set | np.ndarray)  # noqa: E731
norm = either(at_least_0, one_of(math.inf))
no_name = either(one_of(None), empty_mapping)

CASES: list[tuple[Callable[[Any], object], str, Right]] = [
    (fuse, "modules", nothing),
    (lambda v: fuse([nn.Linear(2, 3), v]), "modules", nothing),
    (lambda v: fuse([nn.Linear(2, 3)], one_by_one=v), "one_by_one", flag),
    (lambda v: fused().seed(v), "seeds", nothing),
    (lambda v: fused().seed([0, v]), "seeds", integer(-(2**63), 2**64 - 1)),
    (lambda v: fused().keep(v), "indices", nothing),
    (lambda v: fused().keep([v]), "indices", integer(-2, 1)),
    (lambda v: fused().copy(v), "sources", empty_mapping),
    (lambda v: fused().copy({0: v}), "sources", integer(-2, 1)),
    (lambda v: sgd().copy({0: v}), "sources", integer(-2, 1)),
    (lambda v: fused().concat(v), "other", nothing),
    (lambda v: fused().unfuse(v), "k", integer(-2, 1)),
    (lambda v: fused().map(begin if isinstance(v, FunctionType) else v, BATCH), "objective", instance(FunctionType)),
    (lambda v: fused().load_state_dict(fused().state_dict(), members=[0, v]), "members", integer(-2, 1)),
    (lambda v: fused().load_state_dict([] if isinstance(v, dict) else v), "state_dict", nothing),
    (fusion_key, "module", nothing),
    (lambda v: fusion_key(nn.Linear(2, 3), v), "extra", any_hashable),
    (lambda v: clip_grad_norm_(v, 1.0), "fused", nothing),
    (lambda v: clip_grad_norm_(fused(), v), "max_norm", norm),
    (lambda v: clip_grad_norm_(fused(), [1.0, v]), "max_norm", norm),
    (lambda v: dry_run(v, loss, BATCH), "fused", nothing),
    (lambda v: dry_run(fused(), v, BATCH), "objective", nothing),
    (lambda v: dry_run(fused(), loss, BATCH, compare=v), "compare", flag),
    (pad_lora, "modules", nothing),
    (trim_lora, "module", nothing),
    (lambda v: FusedOptimizer(fused(), v), "members", nothing),
    (lambda v: FusedOptimizer(fused(), [v, v]), "members", nothing),
    (lambda v: sgd().set_lr_factor(v), "factor", at_least_0),
    (lambda v: sgd().schedule(v), "factors", instance(np.ndarray)),
    (lambda v: sgd().schedule([[1.0, v]]), "factors", either(flag, at_least_0)),
    (lambda v: sgd().keep([v]), "indices", integer(-2, 1)),
    (lambda v: sgd().concat(v), "other", nothing),
    (lambda v: sgd().unfuse(v, nn.Linear(2, 3)), "k", integer(-2, 1)),
    (lambda v: sgd().unfuse(0, v), "module", nothing),
    (lambda v: sgd().load_state_dict(v), "state_dict", nothing),
    (lambda v: sgd().load_state_dict(sgd().state_dict(), hyperparameters=v), "hyperparameters", flag),
    (lambda v: fused_optimizer(v, [CONFIG] * 2), "fused", nothing),
    (lambda v: fused_optimizer(fused(), v), "configs", nothing),
    (lambda v: fused_optimizer(fused(), [CONFIG, v]), "configs", nothing),
    (lambda v: optimizer(v, CONFIG), "module", nothing),
    (lambda v: optimizer(nn.Linear(2, 3), v), "config|lr", nothing),
    *(
        (lambda v, name=name: fused_optimizer(fused(), [CONFIG] * 2, **{name: v}), name, no_name)
        for name in ("lr_multipliers", "weight_decay_multipliers")
    ),
    (lambda v: optimizer(nn.Linear(2, 3), CONFIG, lr_multipliers=v), "lr_multipliers", no_name),
    (lambda v: optimizer(nn.Linear(2, 3), CONFIG, lr_multipliers={"sgd": v}), "lr_multipliers", empty_mapping),
    (lambda v: FusedSGD(fused(), lr=1.0, lr_multipliers=v), "lr_multipliers", no_name),
    (lambda v: FusedSGD(fused(), lr=1.0, lr_multipliers={"weight": v}), "lr_multipliers", at_least_0),
    *((lambda v, cls=cls: cls(v, lr=1.0), "fused", nothing) for cls in (FusedSGD, FusedAdam, FusedAdamW)),
    *((lambda v, cls=cls: cls(fused(), lr=v), "lr", positive) for cls in (FusedSGD, FusedAdam, FusedAdamW)),
    (lambda v: FusedSGD(fused(), lr=[0.1, v]), "lr", positive),
    (lambda v: FusedSGD(fused(), lr=1.0, momentum=v), "momentum", fraction),
    (lambda v: FusedSGD(fused(), lr=1.0, dampening=v), "dampening", number(0, 1)),
    (lambda v: FusedSGD(fused(), lr=1.0, weight_decay=v), "weight_decay", at_least_0),
    (lambda v: FusedSGD(fused(), lr=1.0, momentum=0.5, nesterov=v), "nesterov", flag),
    (lambda v: FusedAdam(fused(), lr=1.0, betas=v), "beta", nothing),
    (lambda v: FusedAdam(fused(), lr=1.0, betas=(0.9, v)), "beta", fraction),
    (lambda v: FusedAdam(fused(), lr=1.0, eps=v), "eps", positive),
    (lambda v: FusedAdamW(fused(), lr=1.0, independent_weight_decay=v), "independent_weight_decay", flag),
    (lambda v: plan(modules=v), "modules", nothing),
    (lambda v: plan(modules=[v, v]), "modules", nothing),
    (lambda v: plan(configs=v), "configs", nothing),
    (lambda v: plan(configs=[CONFIG, v]), "configs", nothing),
    (lambda v: plan(objective=v), "objective", nothing),
    (lambda v: plan(memory=v), "memory", either(one_of(None), integer(1))),
    (lambda v: plan(max_width=v), "max_width", either(one_of(None), integer(1))),
    (lambda v: plan(seconds=v), "seconds", positive),
    (lambda v: plan(multipliers=v), "multipliers", no_name),
    (lambda v: plan(graph=v), "graph", flag),
    (lambda v: graphed(step=v), "step", nothing),
    (lambda v: graphed(model=v), "model", nothing),
    (lambda v: graphed(optimizer=v), "optimizer", one_of(None)),
    (lambda v: lr_factor(v, 0, 1), "config", either(empty_mapping, lambda v: isinstance(v, dict) and "a" in v)),
    (lambda v: lr_factor({}, v, 1), "epoch", at_least_0),
    (lambda v: lr_factor({}, 0, v), "max_epochs", integer(1)),
    (lambda v: lr_factor({}, 0, 1, v), "steps_per_epoch", number(1)),
]


@pytest.mark.parametrize(("call", "argument", "right"), CASES)
def test_no_argument_is_taken_for_what_it_is_not(call: Callable[[Any], object], argument: str, right: Right) -> None:
    assert "\n".join(faults(call, argument, right)) == ""
