from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from hydro_rasda.problem.read_keys import ConfigKept, Notes, all_of, paths

Config = dict[str, Any]
CONFIG: Config = {"lr": 0.1, "a": 1, "net": {"depth": 2, "sizes": [4, 8]}}


def noted(reads: Callable[[Config], object], config: Config = CONFIG, **settings: bool) -> Notes:
    def model_fn(given: Config) -> nn.Module:
        model = nn.Linear(1, 1)
        model.kept = reads(given)  # type: ignore[assignment]
        return model

    notes = Notes(**settings)
    notes.taken_by(model_fn)(config)
    return notes


def test_keys_of_nested_configurations() -> None:
    assert list(paths({"a": 1, "net": {"depth": 2, "none": {}}})) == ["a", "net.depth", "net.none"]


@pytest.mark.parametrize("change", [{"lr": 0.2}, {"net": {"depth": 3, "sizes": [4, 8]}}, {"lr": object()}])
def test_what_is_not_read_may_differ(change: Config) -> None:
    read = noted(lambda c: c["a"] + c["net"]["sizes"][0]).of(CONFIG)
    assert read is not None
    assert read <= all_of({**CONFIG, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"a": 2},
        {"a": 1.0},
        {"a": True},
        {"a": object()},
        {"net": {"depth": 2, "sizes": [4, 9]}},
        {"net": {"depth": 2}},
        {"net": None},
        {"b": 1},
    ],
)
def test_what_is_read_and_which_keys_there_are_may_not(change: Config) -> None:
    read = noted(lambda c: c["a"] + c["net"]["sizes"][0]).of(CONFIG)
    assert read is not None
    assert not read <= all_of({**CONFIG, **change})


@pytest.mark.parametrize("reads", [dict, repr, lambda c: c != {}])
def test_whoever_goes_through_a_configuration_reads_all(reads: Callable[[Config], object]) -> None:
    assert noted(reads).of(CONFIG) == all_of(CONFIG)


def test_a_value_that_says_nothing_of_itself_is_like_no_other() -> None:
    assert noted(lambda c: c["a"], {"a": object()}).of({"a": object()}) is None


def test_notes_are_taken_by_all_who_listen() -> None:
    outer, inner = Notes(), Notes()
    inner.taken_by(outer.taken_by(lambda config: nn.Linear(config["net"]["depth"], 1)))(CONFIG)
    assert outer.read == inner.read == {"net", "net.depth"}


def test_a_kept_configuration_is_refused_where_it_may_not_be() -> None:
    noted(lambda c: c)
    with pytest.raises(ConfigKept):
        noted(lambda c: c, may_be_kept=False)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_of_a_configuration_may_be_kept(copied: Callable[[Config], Config]) -> None:
    copies: list[Config] = []
    notes = noted(lambda c: copies.append(copied(c)), may_be_kept=False)
    assert copies == [CONFIG]
    assert (type(copies[0]), type(copies[0]["net"])) == (dict, dict)
    assert notes.of(CONFIG) == all_of(CONFIG)
