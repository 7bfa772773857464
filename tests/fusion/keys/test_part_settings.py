from __future__ import annotations

from typing import Any

import pytest
import torch

from fusion.keys import check_settings, configs_of_parts, lr_factors, names_of_parts, optimizer_names


def own(params: Any, lr: float, alpha: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(params, lr=lr, alpha=alpha)


def test_settings_come_from_the_innermost_part_that_has_them() -> None:
    config = {"lr": 0.1, "optimizer": "sgd", "momentum": 0.9, "lr.net": 0.2, "momentum.net.head": 0.5, "width": 8}
    assert configs_of_parts(config) == {
        "": {"lr": 0.1, "optimizer": "sgd", "momentum": 0.9, "width": 8},
        "net.head": {"lr": 0.2, "optimizer": "sgd", "momentum": 0.5, "width": 8},
    }
    names = ["net.body.weight", "net.head.weight", "net.header.weight", "tail"]
    assert names_of_parts(config, names) == {"": [names[0], names[2], "tail"], "net.head": ["net.head.weight"]}
    # The learning rate of the inner part is `lr` there already.
    assert lr_factors(config, names) == {names[0]: 2.0, "net.head.weight": 1.0, names[2]: 2.0}


def test_a_rate_alone_makes_no_optimizer_of_its_own() -> None:
    assert optimizer_names({"lr": 0.1, "lr.head": 0.2}) == ("adamw",)
    assert optimizer_names({"lr": 0.1, "optimizer.b": "sgd", "weight_decay.a": 0.2}) == ("adamw", "adamw", "sgd")


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"nesterov.head": True, "optimizer.head": "sgd"}, "in the settings of 'head', `nesterov` is True"),
        ({"momentum.head": 0.9}, "`momentum.head` is 0.9, .* the optimizer of 'head', adamw, does not read it"),
        ({"rho.head": 0.9, "optimizer.head": own}, "`rho.head` is 0.9, .* 'head', own, does not read it"),
        ({"lr.head": -1}, "`lr.head` is -1, but must be a finite number > 0"),
        ({"optimizer": {"head": "sgd"}}, "`optimizer` is .* the key `optimizer.PART` gives a part"),
    ],
)
def test_wrong_settings_of_parts_are_refused(config: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check_settings({"lr": 0.1, **config})
    check_settings({"lr": 0.1, "alpha.head": "any", "optimizer.head": own, "my.own": 3, "grad_clip.head": "mine"})
