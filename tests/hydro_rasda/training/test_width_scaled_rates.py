"""Parameter groups of narrow models in the user's own loop; `mup`'s optimizers are the oracle."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from fusion.optim.lion import Lion
from hydro_rasda.training.width_scaled_rates import WidthScaledRates
from surrogate import make_surrogate
from tests.surrogate.models import ZOO, mlp
from tests.surrogate.test_roles_and_multipliers import oracle_groups

CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def noted(model: nn.Module) -> WidthScaledRates:
    rates = WidthScaledRates(1 / 4)
    rates.note(model)
    return rates


def settings_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, tuple[float, float]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = optimizer.param_groups
    return {names[id(p)]: (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}


@pytest.mark.parametrize("optimizer", CLASSES)
@pytest.mark.parametrize("name", ZOO)
def test_groups_are_mups(name: str, optimizer: str) -> None:
    model_fn, config, _ = ZOO[name]
    model, kind = make_surrogate(model_fn, config, 1 / 4), CLASSES[optimizer]
    settings: dict[str, Any] = {"lr": 1.0, "weight_decay": 1.0}
    made = kind(noted(model).groups(model, kind, settings), **settings)
    found, expected = settings_of(made, model), oracle_groups(name, optimizer, 1 / 4)
    assert found.keys() == expected.keys()
    assert all(pair == pytest.approx(expected[key], rel=1e-12) for key, pair in found.items())


def test_at_full_width_parameters_are_as_given() -> None:
    model = mlp({}, 1.0)
    assert WidthScaledRates().groups(model, torch.optim.SGD, {"lr": 0.1}) == [*model.parameters()]
    groups = [{"params": [*model.parameters()], "lr": 0.1}]
    assert WidthScaledRates().groups(groups, torch.optim.LBFGS, {}) == groups


def test_parts_groups_and_defaults_are_scaled() -> None:
    """The hidden layer alone; groups with rates of their own; a rate that is the default of the class."""
    model = make_surrogate(mlp, {}, 1 / 4)
    rates, hidden = noted(model), model.get_submodule("2")
    groups = rates.groups(hidden, torch.optim.AdamW, {})
    assert [(len(group["params"]), group.get("lr"), group.get("weight_decay")) for group in groups] == [
        (1, 4 * 1e-3, 1e-2 / 4),
        (1, None, None),
    ]
    given = [{"params": hidden.parameters(), "lr": 0.5}, {"params": model.get_parameter("0.weight")}]
    groups = rates.groups(given, torch.optim.Adam, {"lr": 0.1})
    assert [group.get("lr") for group in groups] == [2.0, 0.5, None]
    named = rates.groups(model.named_parameters(), torch.optim.SGD, {"lr": 0.1})
    torch.optim.SGD(named, lr=0.1)
    other = nn.Parameter(torch.zeros(()))
    (group,) = rates.groups([other], torch.optim.Adam, {"lr": 0.1})
    assert group["params"] == [other]
    assert "lr" not in group


class Own(torch.optim.AdamW):
    """An optimizer of the user's."""


def test_classes_go_by_name_or_base() -> None:
    model = make_surrogate(mlp, {}, 1 / 4)
    (hidden,) = (p for p in model.parameters() if p.ndim == 2 and p.shape[0] == p.shape[1])

    def rate(kind: type[torch.optim.Optimizer], **settings: Any) -> float:
        (group,) = noted(model).groups([hidden], kind, {"lr": 1.0, **settings})
        return float(group.get("lr", 1.0))

    assert rate(Own) == rate(Lion) == 4
    assert rate(torch.optim.Muon) == 1
    assert rate(torch.optim.Muon, adjust_lr_fn="match_rms_adamw") == pytest.approx(math.sqrt(4))
    with pytest.raises(ValueError, match="`optimizer` is 'LBFGS', but must be a class with a name among sgd"):
        rate(torch.optim.LBFGS)
