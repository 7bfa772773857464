from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from ray.tune.search.optuna import OptunaSearch

from hydro_rasda import TuneResult, choice, grid_search, loguniform, randint, sample_from, uniform
from hydro_rasda.heats.search import RandomSearch, check_first
from hydro_rasda.space.branches import chosen, indexed, reachable, restricted, with_defaults
from hydro_rasda.space.space import check_space, describe, longest_warmup, sample, tuned

pytestmark = pytest.mark.usefixtures("one_process")

Quick = Callable[..., TuneResult]

SGD = {"optimizer": "sgd", "momentum": uniform(0.5, 0.99)}
ADAM = {"optimizer": "adamw", "beta1": uniform(0.8, 0.99)}
SPACE = {
    "lr": loguniform(1e-3, 1e-1),
    "by": choice([SGD, ADAM]),
    "net": {
        "kind": choice([{"depth": 1}, {"depth": randint(2, 4), "by": choice([{"scale": uniform(0, 1)}, {"gate": 1}])}])
    },
}


def shape(config: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(config), tuple(config["net"])


def test_the_chosen_branch_joins_the_configuration() -> None:
    configs = sample(SPACE, 200, seed=0)
    assert {shape(config) for config in configs} == {
        (("lr", *by, "net"), net)
        for by in (("optimizer", "momentum"), ("optimizer", "beta1"))
        for net in (("depth",), ("depth", "scale"), ("depth", "gate"))
    }
    for config in configs:
        assert ("momentum" in config) == (config["optimizer"] == "sgd")
        assert (config["net"]["depth"] == 1) == (tuple(config["net"]) == ("depth",))
    assert sample(SPACE, 200, seed=0) == configs
    assert sample(SPACE, 10, seed=0) == configs[:10]  # more samples change no earlier one


def test_a_choice_may_have_the_name_of_a_key_in_its_branches() -> None:
    space = {"lr": 0.1, "optimizer": choice([SGD, ADAM])}
    check_space(space)
    assert {config["optimizer"] for config in sample(space, 20, seed=0)} == {"sgd", "adamw"}
    assert [config["optimizer"] for config in sample(restricted(space, {"optimizer": "sgd"}), 5, seed=0)] == ["sgd"] * 5


def test_functions_and_grids_see_the_chosen_branch() -> None:
    space = {
        "lr": sample_from(lambda config: 0.5 if config.optimizer == "sgd" else 0.1),
        "by": choice([SGD, ADAM]),
        "batch_size": grid_search([8, 16]),
    }
    configs = sample(space, 20, seed=0)
    assert len(configs) == 40
    assert all(config["lr"] == (0.5 if config["optimizer"] == "sgd" else 0.1) for config in configs)
    assert [config["batch_size"] for config in configs] == [8, 16] * 20
    assert {config["optimizer"] for config in configs} == {"sgd", "adamw"}


def test_other_choices_stay_values() -> None:
    mixed = {"lr": 0.1, "a": choice([{"b": 1}, 2]), "c": [choice([{"d": 1}])], "e": choice([()])}
    for config in sample(mixed, 5, seed=0):
        assert config["a"] in ({"b": 1}, 2)
        assert config["c"] == [{"d": 1}]


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"lr": 0.1, "by": choice([{"lr": 0.2}])}, r"`space\['by'\]\[0\]` is \['lr'\], but must be without lr"),
        ({"lr": 0.1, "a": choice([{"b": 1}]), "c": choice([{"b": 2}])}, r"`space\['c'\]\[0\]` is \['b'\]"),
        ({"lr": 0.1, "a": choice([{"b": choice([{"lr": 1}])}])}, r"`space\['a'\]\[0\]` is \['b'\], .* without lr"),
        ({"lr": 0.1, "n": {"a": choice([{"b": 1}]), "b": 2}}, r"`space\['n'\]\['a'\]\[0\]`"),
        ({"lr": 0.1, "by": choice([{"optimizer": "sgd", "momentum": uniform(0, 2)}])}, r"`space\['momentum'\]`"),
        ({"by": choice([{"lr": loguniform(1e-3, 1), "weight_decay": -1}])}, r"`space\['weight_decay'\]` is -1"),
    ],
)
def test_bad_branches_are_refused(space: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_space(space)


def test_all_that_looks_at_a_space_looks_into_its_branches() -> None:
    check_space(SPACE)
    warm = {**SPACE, "when": choice([{"warmup_epochs": randint(1, 4)}, {}])}
    assert longest_warmup(warm, [], 9) == 3
    assert set(reachable(SPACE)) == {"lr", "optimizer", "momentum", "beta1", "net"}
    assert tuned(SPACE) == ["lr", "momentum", "beta1", "depth", "scale"]
    assert describe(SPACE) != describe({**SPACE, "by": choice([SGD])})
    assert describe(SPACE) == describe(dict(SPACE))


def test_known_configurations_choose_their_branches() -> None:
    first: list[dict[str, Any]] = [{"optimizer": "adamw", "lr": 0.01}, {"momentum": 0.9}, {"net": {"depth": 1}}]
    check_first(first, SPACE)
    one, two, three, *_ = (trial.config for trial in RandomSearch(SPACE, 8, 0, first).trials)
    assert (one["lr"], one["optimizer"]) == (0.01, "adamw")
    assert 0.8 <= one["beta1"] < 0.99
    assert (two["optimizer"], two["momentum"]) == ("sgd", 0.9)
    assert three["net"] == {"depth": 1}
    for odd in ({"momentum": 0.9, "beta1": 0.9}, {"optimizer": "sgd", "beta1": 0.9}, {"optimizer": "adam"}):
        with pytest.raises(ValueError, match=r"`by` is .*, but must be values of one branch of `space`"):
            restricted(SPACE, odd)
    with pytest.raises(ValueError, match=r"which has no gamma"):
        check_first([{"gamma": 1}], SPACE)


def test_a_part_of_a_nested_mapping_is_completed() -> None:
    space = {"lr": loguniform(1e-3, 1e-1), "net": {"width": choice([8, 16]), "more": {"depth": randint(1, 3)}}}
    first: list[dict[str, Any]] = [{"net": {"width": 8}}, {"net": {"more": {"depth": 7}}}]
    check_first(first, space)
    one, two = (trial.config["net"] for trial in RandomSearch(space, 2, 0, first).trials)
    assert one["width"] == 8
    assert one["more"]["depth"] in (1, 2)
    assert (two["width"] in (8, 16), two["more"]) == (True, {"depth": 7})
    with pytest.raises(ValueError, match="which has no net/more/deep, net/widht"):
        check_first([{"net": {"widht": 8, "more": {"deep": 1}}}], space)


def test_known_values_choose_the_branch_that_draws_them() -> None:
    """The branch of `res` took a `cnn`, too, and gave it a depth in place of its channels."""
    branches = choice([{"kind": "cnn", "channels": 8}, {"kind": choice(["mlp", "res"]), "depth": randint(1, 3)}])
    space = {"lr": loguniform(1e-3, 1e-1), "net": branches}
    for seed in range(8):
        (trial,) = RandomSearch(space, 1, seed, [{"kind": "cnn"}]).trials
        assert trial.config["channels"] == 8
    assert sample(restricted(space, {"depth": 9}), 1, 0)[0]["depth"] == 9  # drawn by none: known to be good


def test_defaults_go_into_the_branches_that_lack_them() -> None:
    made = with_defaults(SPACE, {"lr": 1.0, "momentum": 0.0, "batch_size": 8})
    check_space(made)
    for config in sample(made, 20, seed=0):
        assert config["lr"] < 1
        assert config["batch_size"] == 8
        assert (config["momentum"] == 0) == (config["optimizer"] == "adamw")


def test_a_point_of_the_indexed_space_is_a_configuration() -> None:
    for config in sample(indexed(SPACE), 50, seed=1):
        found = chosen(SPACE, config)
        assert ("momentum" in found) == (config["by"] == 0)
        assert shape(found) in {shape(each) for each in sample(SPACE, 100, seed=0)}


SMALL = {"lr": loguniform(1e-3, 0.3), "by": choice([SGD, ADAM]), "batch_size": 64}


@pytest.mark.parametrize("searcher", [None, "optuna"])
def test_tune_searches_branches(quick: Quick, searcher: str | None) -> None:
    def found() -> TuneResult:
        sweep = {"searcher": OptunaSearch(seed=0)} if searcher else {}
        return quick(space=SMALL, num_samples=12, sweep=sweep, name="branches")

    result = found()
    kinds = {trial.config["optimizer"] for trial in result.trials}
    assert kinds == {"sgd", "adamw"}
    for trial in result.trials:
        assert ("momentum" in trial.config) == (trial.config["optimizer"] == "sgd")
    again = found()
    assert [trial.config for trial in again.trials] == [trial.config for trial in result.trials]
    assert {"config/momentum", "config/beta1"} <= set(result.dataframe().columns)
    study = result.to_optuna()
    assert {frozenset(trial.params) for trial in study.trials} == {
        frozenset({"lr", "optimizer", "momentum"}),
        frozenset({"lr", "optimizer", "beta1"}),
    }
    result.report(result.path / "report.html")


def test_a_domain_may_stand_anywhere_in_a_tuple() -> None:
    space = {"net": (choice([7]), 2, [3, choice([8])], (4, choice([9]), 5), choice([6]))}
    assert sample(space, 1, 0) == [{"net": (7, 2, [3, 8], (4, 9, 5), 6)}]
