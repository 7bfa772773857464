from __future__ import annotations

import enum
import json
import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch

from hydro_rasda.history.lines import jsonable
from hydro_rasda.history.unkept_values import changed, literals, restored, withholding


class Act(enum.Enum):
    TANH = 1


class Text(enum.StrEnum):
    TANH = "tanh"


class Count(enum.IntEnum):
    TWO = 2


@pytest.mark.parametrize(
    "value",
    [0.1, 3, True, None, "x", [1, [2.0]], {"a": 1}, (3, 3), [(1, "x")], {1: 2}, {1, 2}, b"x", math.inf, -math.inf, 2j],
)
def test_a_value_with_a_literal_comes_back_as_it_was(value: Any) -> None:
    config = {"net": {"value": value}, "lr": 0.1}
    noted = json.loads(json.dumps(literals(config)))
    assert restored(json.loads(json.dumps(jsonable(config))), noted) == config


def test_numbers_of_numpy_come_back_as_those_of_python() -> None:
    config = {"a": np.int64(3), "b": np.float64(0.1)}
    assert restored(json.loads(json.dumps(jsonable(config))), literals(config)) == {"a": 3, "b": 0.1}


@pytest.mark.parametrize(
    "value",
    [
        Act.TANH,
        Text.TANH,
        Count.TWO,
        [Act.TANH],
        (Text.TANH,),
        torch.nn.ReLU,
        len,
        torch.zeros(2),
        np.zeros(2),
        np.zeros(1),
    ],
    ids=str,
)
def test_a_value_without_a_literal_is_noted_by_its_place(value: Any) -> None:
    assert literals({"net": {"value": value}, "lr": 0.1}) == [(("net", "value"), None)]


def test_changes_of_the_journal_have_a_list_in_place_of_a_tuple() -> None:
    config = {"size": (3, 3), "lr": 0.1}
    assert changed(config, {"size": [5, 5], "lr": 0.2}) == {"size": (5, 5), "lr": 0.2}


READS: dict[str, Callable[[Any], Any]] = {
    "item": lambda config: config["act"],
    "get": lambda config: config.get("act"),
    "pop": lambda config: config.pop("act"),
    "arguments": lambda config: (lambda **given: given)(**config),
    "dict": lambda config: dict(config),
    "merged": lambda config: {**config},
    "items": lambda config: [*config.items()],
    "values": lambda config: [*config.values()],
    "copy": lambda config: config.copy(),
    "deepcopy": deepcopy,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_model_function_cannot_take_a_name_for_a_value(read: Callable[[Any], Any]) -> None:
    config = {"lr": 0.1, "act": "TANH", "net": {"act": "TANH"}}
    with pytest.raises(ValueError, match=r"`config\['act'\]` is only a text .* model_fn\(config \| {'act': \.\.\.}\)"):
        withholding(read, [("act",), ("net", "act")])(config)


def test_a_value_in_a_dict_of_the_configuration_is_named_whole_and_given_again() -> None:
    config = {"net": {"act": "TANH", "norm": "NONE"}}

    def withheld(model_fn: Callable[[Any], Any]) -> Any:
        return withholding(model_fn, [("net", "act"), ("net", "norm")])(config)

    with pytest.raises(ValueError, match=r"`config\['net'\]\['act'\]` is only a text ") as caught:
        withheld(lambda config: config["net"]["act"])
    assert "model_fn(config | {'net': config['net'] | {'act': ...}})" in str(caught.value)

    def given(config: Any) -> Any:
        return config | {"net": config["net"] | {"act": Act.TANH}}

    assert withheld(lambda config: given(config)["net"]["act"]) is Act.TANH
    with pytest.raises(ValueError, match=r"`config\['net'\]\['norm'\]` is only"):
        withheld(lambda config: given(config)["net"]["norm"])


def test_it_is_given_the_value_again() -> None:
    read = withholding(lambda config: dict(config | {"act": Act.TANH}), [("act",)])
    assert read({"lr": 0.1, "act": "TANH"}) == {"lr": 0.1, "act": Act.TANH}
    assert withholding(lambda config: config["lr"], [("act",)])({"lr": 0.1, "act": "TANH"}) == 0.1
