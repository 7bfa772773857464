import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from fusion import lr_factor as schedule_factor
from fusion.optim import Hyperparameters
from fusion.optim.lion import Lion
from fusion.optim.muon import MuonWithAdamW
from fusion.optim.parts import ByPart
from hydro_rasda import RaceConfig
from hydro_rasda.training.lr_rescaling import RescaledLR, lr_factor


def parameter() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(1))]


def matrix() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2, 2))]


MUON = Hyperparameters("muon", lr=0.1)


def lrs_of_steps(optimizer: Optimizer, steps: int, between: Callable[[], None] = lambda: None) -> list[float]:
    """The learning rates that the update itself saw."""
    seen: list[float] = []
    handle = optimizer.register_step_pre_hook(lambda o, *_: seen.append(o.param_groups[0]["lr"]))
    for _ in range(steps):
        optimizer.step()
        between()
    handle.remove()
    return seen


def test_linear_where_that_was_measured_and_root_for_other_adaptive_ones() -> None:
    assert lr_factor(4, "auto", SGD(parameter(), lr=0.1)) == 4
    assert lr_factor(4, "auto", Adam(parameter())) == lr_factor(4, "auto", AdamW(parameter())) == 4
    assert lr_factor(2, "auto", torch.optim.RMSprop(parameter())) == math.sqrt(2)
    assert (
        lr_factor(4, "auto", Lion([{"params": parameter()}]))
        == lr_factor(4, "paper", Lion([{"params": parameter()}]))
        == 2
    )
    muon = MuonWithAdamW([{"params": matrix(), "lr": 0.1, "use_muon": True}], MUON)
    assert lr_factor(2, "auto", muon) == math.sqrt(2)
    assert lr_factor(2, "paper", torch.optim.Muon(matrix())) == math.sqrt(2)
    parts = ByPart({"a": SGD(parameter(), lr=0.1), "b": torch.optim.RMSprop(parameter())})
    assert lr_factor(4, "auto", parts) == 2
    assert lrs_of_steps(parts, 1) == [0.1]
    assert lr_factor(9, "none", SGD(parameter(), lr=0.1)) == 1
    assert lr_factor(9, "sqrt", SGD(parameter(), lr=0.1)) == 3
    assert lr_factor(9, lambda growth: growth + 1, Adam(parameter())) == 10


def test_the_papers_rule_is_linear_for_sgd_and_the_root_for_adam() -> None:
    assert lr_factor(4, "paper", SGD(parameter(), lr=0.1)) == 4
    assert lr_factor(4, "paper", Adam(parameter())) == lr_factor(4, "paper", AdamW(parameter())) == 2
    assert RaceConfig(lr_rule="paper").lr_rule == "paper"


SCALED: dict[str, tuple[Any, ...]] = {
    "two resizes": (SGD, 0.1, "auto", [(2, 4, [0.125, 0.15, 0.175, 0.2, 0.2]), (8, 2, [0.5, 0.8, 0.8])]),
    "the rule's end": (Adam, 0.01, "sqrt", [(4, 2, [0.015, 0.02, 0.02])]),
    "a resize in the middle of a warm-up": (SGD, 1.0, "auto", [(3, 4, [1.5, 2.0]), (6, 2, [4.0, 6.0, 6.0])]),
    "a warm-up that a failure broke off": (SGD, 1.0, "auto", [(3, 4, [1.5, 2.0]), (3, 4, [2.5, 3.0, 3.0])]),
}
"""Optimizer, rate and rule; then each start: the growth, the steps of its warm-up, and the rate of each step."""


@pytest.mark.parametrize(("kind", "lr", "rule", "starts"), SCALED.values(), ids=SCALED)
def test_the_learning_rate_of_every_step(
    kind: Callable[..., Optimizer], lr: float, rule: str, starts: list[tuple[float, int, list[float]]]
) -> None:
    state = None
    for growth, warmup, rates in starts:
        optimizer = kind(parameter(), lr=lr)
        rescaled = RescaledLR(optimizer, growth, rule, warmup, state)
        assert lrs_of_steps(optimizer, len(rates)) == pytest.approx(rates)
        state = rescaled.state_dict()


def test_the_schedule_never_sees_the_multiplier() -> None:
    optimizer, plain = SGD(parameter(), lr=0.5), SGD(parameter(), lr=0.5)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=5) for o in (optimizer, plain)]
    RescaledLR(optimizer, growth=4)
    for group in (optimizer, plain):
        group.step()
    scaled = lrs_of_steps(optimizer, 5, schedules[0].step)
    assert scaled == pytest.approx([4 * lr for lr in lrs_of_steps(plain, 5, schedules[1].step)])
    assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]


def test_the_update_uses_the_multiplied_rate() -> None:
    (weight,) = parameter()
    optimizer = SGD([weight], lr=0.1)
    RescaledLR(optimizer, growth=2)
    weight.grad = torch.ones(1)
    optimizer.step()
    assert weight.item() == pytest.approx(1 - 0.2)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="`rule` is 'cubic', but must be 'auto', 'paper', one of"):
        lr_factor(2, "cubic", Adam(parameter()))
    with pytest.raises(ValueError, match="`rule` is 'auto', but must be named for LBFGS"):
        lr_factor(2, "auto", torch.optim.LBFGS(parameter()))
    with pytest.raises(ValueError, match="`warmup_steps` is -1, but must be an integer >= 0"):
        RescaledLR(Adam(parameter()), 2, warmup_steps=-1)
    states: list[Any] = [{"start": 1.0}, ["start", "target", "steps", "done"], {}, "state"]
    for state in states:
        with pytest.raises(ValueError, match=r"`state` is .*, but must be None, or what `state_dict` gave"):
            RescaledLR(Adam(parameter()), 2, state=state)


def test_the_warmup_is_that_of_schedules() -> None:
    """Step for step, where the rate falls from 1 to 0 instead of rising."""
    steps = 4
    opt = SGD([torch.zeros(1)], lr=1.0)
    grown = RescaledLR(opt, growth=0.0, rule="linear", warmup_steps=2 * steps)
    for step in range(3 * steps):
        fallen = 1 - grown.multiplier
        assert schedule_factor({"warmup_epochs": 2}, step / steps, 12, steps) == pytest.approx(fallen)
        opt.step()
