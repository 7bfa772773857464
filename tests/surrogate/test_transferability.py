from __future__ import annotations

from surrogate import doubtful_hyperparameters

KEYS = ["lr", "model/dropout", "momentum", "weight_decay", "beta1", "label_smoothing", "schedule", "gamma"]


def test_regularizers_below_a_quarter() -> None:
    assert doubtful_hyperparameters(KEYS, 1 / 8) == ["model/dropout", "weight_decay", "label_smoothing"]


def test_none_from_a_quarter_up() -> None:
    assert doubtful_hyperparameters(KEYS, 1 / 4) == []
    assert doubtful_hyperparameters(KEYS, 0.2499) != []
