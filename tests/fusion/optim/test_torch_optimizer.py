"""The optimizer of one module, from a configuration."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusion.optim import optimizer
from fusion.optim.lion import Lion
from fusion.optim.prodigy import Prodigy
from fusion.optim.schedule_free import ScheduleFreeAdamW, ScheduleFreeSGD


def test_kinds_and_settings() -> None:
    module = nn.Linear(2, 2)
    sgd = optimizer(module, {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.2})
    assert isinstance(sgd, torch.optim.SGD)
    (group,) = sgd.param_groups
    assert (group["lr"], group["momentum"], group["nesterov"], group["weight_decay"]) == (0.1, 0.9, True, 0.2)
    adam = optimizer(module, {"optimizer": "adam", "lr": 0.1, "beta1": 0.5, "eps": 1e-3})
    assert type(adam) is torch.optim.Adam
    assert (adam.param_groups[0]["betas"], adam.param_groups[0]["eps"]) == ((0.5, 0.999), 1e-3)
    assert type(optimizer(module, {"lr": 0.1})) is torch.optim.AdamW


def test_the_other_optimizers_of_torch_and_functions_that_make_one() -> None:
    module = nn.Linear(2, 2)
    rms = optimizer(module, {"optimizer": "rmsprop", "lr": 0.1, "momentum": 0.9, "alpha": 0.5, "beta1": 7})
    assert type(rms) is torch.optim.RMSprop
    assert rms.param_groups[0].items() >= {"lr": 0.1, "momentum": 0.9, "alpha": 0.5, "eps": 1e-8}.items()
    nadam = optimizer(module, {"optimizer": torch.optim.NAdam, "lr": 0.1, "beta2": 0.5, "weight_decay": 0.2})
    assert type(nadam) is torch.optim.NAdam
    assert nadam.param_groups[0].items() >= {"betas": (0.9, 0.5), "weight_decay": 0.2}.items()
    assert type(optimizer(module, {"optimizer": torch.optim.AdamW, "lr": 0.1})) is torch.optim.AdamW
    decays = {"asgd": {"weight": 2.0}}
    asgd = optimizer(module, {"optimizer": "asgd", "lr": 0.1, "weight_decay": 0.5}, weight_decay_multipliers=decays)
    assert [(g["weight_decay"], g["lambd"]) for g in asgd.param_groups] == [(1.0, 2e-4), (0.5, 1e-4)]
    own = {"optimizer": lambda params, lr, d=1.0: torch.optim.Adafactor(params, lr, d=d), "d": 2.0, "width": 3}
    assert optimizer(module, {**own, "lr": 0.1}).param_groups[0].items() >= {"lr": 0.1, "d": 2.0}.items()


CLASSES = [cls for cls in vars(torch.optim).values() if isinstance(cls, type) and cls is not torch.optim.Optimizer]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_class_of_torch_is_itself_or_refused(cls: Callable[..., torch.optim.Optimizer]) -> None:
    def trained(make: Callable[[nn.Module], torch.optim.Optimizer]) -> Tensor:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False))
        updates = make(module)
        for _ in range(5):
            updates.zero_grad()
            module(torch.randn(8, 6)).square().sum().backward()
            updates.step()
        return nn.utils.parameters_to_vector(module.parameters())

    asked = {"lr": 0.05, "optimizer": cls}
    if cls.__name__ in ("LBFGS", "Muon", "Rprop", "SparseAdam"):
        with pytest.raises(ValueError, match=r"`optimizer` is <class 'torch\.optim"):
            trained(lambda module: optimizer(module, asked))
    else:
        expected = trained(lambda module: cls(module.parameters(), lr=0.05))
        torch.testing.assert_close(trained(lambda module: optimizer(module, asked)), expected)


def one_group(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for group in params for p in group["params"]], lr)


@pytest.mark.parametrize(
    ("own", "rule"),
    [
        ("lbfgs", "one of sgd, .* lbfgs needs a closure"),
        ("AdamW", 'one of sgd, .* did you mean "adamw"'),
        (torch.optim.LBFGS, "one of sgd, .* lbfgs needs a closure"),
        ("muon", "another one for a model without hidden 2-D parameters"),
        (
            torch.optim.Muon,
            "torch.optim.Muon updates 2-D parameters alone, and 'muon' has AdamW beside it",
        ),
        (lambda params: None, "a function of \\(params, lr\\)"),
        (3, "a function of"),
        (lambda params, lr: torch.optim.LBFGS([p for g in params for p in g["params"]]), "needs no closure"),
        (lambda params, lr: None, "one that makes a torch optimizer"),
        (one_group, "one that takes all parameters, in the groups"),
    ],
)
def test_optimizers_that_cannot_work(own: Any, rule: str) -> None:
    with pytest.raises(ValueError, match=f"`optimizer` is .* but must be .*{rule}"):
        optimizer(nn.Linear(2, 2), {"optimizer": own, "lr": 0.1, "lr.bias": 0.2})


def test_one_group_for_each_pair_of_multipliers_and_frozen_parameters_in_none() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    opt = optimizer(
        module,
        {"lr": 0.1, "weight_decay": 0.5},
        lr_multipliers={"adamw": {"0.weight": 0.5, "1.weight": 9.0}, "sgd": {"0.bias": 7.0}},
        weight_decay_multipliers={"adamw": {"0.weight": 2.0}},
    )
    first, rest = opt.param_groups
    assert (first["lr"], first["weight_decay"], len(first["params"])) == (0.05, 1.0, 1)
    assert (rest["lr"], rest["weight_decay"], len(rest["params"])) == (0.1, 0.5, 3)


def test_parts_with_learning_rates_of_their_own() -> None:
    """The longest prefix counts; "head" is no part of "header"."""
    parts = {"head": nn.Linear(2, 2), "header": nn.Linear(2, 2), "frozen": nn.Linear(2, 2).requires_grad_(False)}
    config = {"lr": 0.1, "lr.head": 0.4, "lr.head.bias": 0.3, "lr.header": 0.2}
    opt = optimizer(nn.ModuleDict(parts), config, lr_multipliers={"adamw": {"head.weight": 0.5, "header.bias": 3.0}})
    rates = {id(p): group["lr"] for group in opt.param_groups for p in group["params"]}
    found = {name: rates[id(p)] for name, p in nn.ModuleDict(parts).named_parameters() if p.requires_grad}
    assert found == pytest.approx({"head.weight": 0.2, "head.bias": 0.3, "header.weight": 0.2, "header.bias": 0.6})
    for name in ("lr.hea", "lr.frozen"):
        with pytest.raises(ValueError, match=f"`{name}` is 0.2, but must be left out: no parameter's name begins"):
            optimizer(nn.ModuleDict(parts), {"lr": 0.1, name: 0.2})
    with pytest.raises(ValueError, match=r"`lr\.head` is 0, but must be a finite number > 0"):
        optimizer(nn.ModuleDict(parts), {"lr": 0.1, "lr.head": 0})


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"`lr_multipliers\['adamw'\]\['wieght'\]` .* the model has no such parameter"):
        optimizer(nn.Linear(2, 2), {"lr": 0.1}, lr_multipliers={"adamw": {"wieght": 1.0}})
    with pytest.raises(ValueError, match="no parameter that needs gradients"):
        optimizer(nn.Linear(2, 2).requires_grad_(False), {"lr": 0.1})


@pytest.mark.parametrize("kind", [Lion, Prodigy, ScheduleFreeSGD, ScheduleFreeAdamW])
def test_by_default_no_weight_decays(kind: Any) -> None:
    weight = nn.Parameter(torch.ones(3))
    steps = kind([{"params": [weight]}])
    for _ in range(2):
        weight.grad = torch.zeros(3)
        steps.step()
    assert weight.tolist() == [1.0] * 3
