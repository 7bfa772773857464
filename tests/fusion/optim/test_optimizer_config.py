"""Reading an optimizer's hyperparameters from a configuration."""

from typing import Any

import pytest
import torch

from fusion.optim import Hyperparameters


def test_what_is_left_out_has_the_optimizers_default() -> None:
    hp = Hyperparameters.from_config({"optimizer": "rmsprop", "lr": 0.1})
    assert (hp.alpha, hp.momentum, hp.eps, hp.decay) == (0.99, 0.0, 1e-8, 0.0)
    assert Hyperparameters.from_config({"optimizer": "lion", "lr": 0.1}).beta2 == 0.99


def test_other_keys_are_ignored_and_adamw_is_the_default() -> None:
    hp = Hyperparameters.from_config({"lr": 1, "width": 64, "schedule": "cosine"})
    assert hp == Hyperparameters("adamw", lr=1.0, weight_decay=0.01)


def test_numbers_of_other_types() -> None:
    import numpy as np

    config = {"optimizer": "sgd", "lr": np.float32(0.5), "momentum": torch.tensor(0.25), "nesterov": np.bool_(True)}
    hp = Hyperparameters.from_config(config)
    assert (hp.lr, hp.momentum, hp.nesterov) == (0.5, 0.25, True)
    assert type(hp.lr) is float


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({}, "`lr`, the learning rate, is left out, but must be given"),
        ({"lr": 0.1, "optimizer": "lamb"}, "`optimizer` is 'lamb', but must be one of sgd, adam, adamw"),
        ({"lr": -0.1}, "`lr` is -0.1, but must be a finite number > 0"),
        ({"lr": float("nan")}, "`lr` is nan, but must be a finite number > 0"),
        ({"lr": 10**400}, "`lr` is 10+.*, but must be a finite number > 0"),
        ({"lr": 0.1, "weight_decay": 10**400}, "`weight_decay` is 10+.*, but must be a finite number >= 0"),
        ({"lr": 0.1, "beta2": 1.0}, r"`beta2` is 1.0, but must be in \[0, 1\)"),
        ({"lr": 0.1, "weight_decay": -1}, "`weight_decay` is -1, but must be a finite number >= 0"),
        ({"lr": 0.1, "optimizer": "sgd", "nesterov": True}, "`nesterov` is True, but must be False unless"),
        (
            {"lr": 0.1, "independent_weight_decay": "no"},
            "`independent_weight_decay` is 'no', but must be True",
        ),
        ({"lr": 0.1, "optimizer": "sgd", "nesterov": 1}, "`nesterov` is 1, but must be True or False"),
        (
            {"lr": 0.1, "optimizer": torch.optim.Adam, "amsgrad": True},
            r"`amsgrad` is True, but must be left out beside the class Adam: functools.partial\(Adam, amsgrad=...\)",
        ),
        ({"lr": 0.1, "optimizer": torch.optim.SGD, "maximize": True}, "`maximize` is True, but must be left out"),
        ({"lr": 0.1, "optimizer": torch.optim.AdamW, "betas": (0.5, 0.9)}, "`betas` is .* but must be left out"),
        ({"lr": "high"}, "`lr` is 'high', but must be a finite number"),
        ({"lr": torch.ones(2)}, r"`lr` is tensor\(\[1., 1.\]\), but must be"),
    ],
)
def test_values_out_of_range(config: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Hyperparameters.from_config(config)


def test_what_another_optimizer_reads_is_ignored_in_a_configuration() -> None:
    config = {"optimizer": "adam", "lr": 0.1, "momentum": 7, "nesterov": "?", "independent_weight_decay": "no"}
    assert Hyperparameters.from_config(config) == Hyperparameters("adam", 0.1)
    assert Hyperparameters.from_config({"optimizer": "sgd", "lr": 0.1, "beta1": 2}) == Hyperparameters("sgd", 0.1)


def test_what_another_optimizer_reads_is_refused_by_hand() -> None:
    told = "`independent_weight_decay` is True, but must be left out: adam does not read it"
    with pytest.raises(ValueError, match=told):
        Hyperparameters("adam", 0.1, independent_weight_decay=True)
