from __future__ import annotations

import math
import os
import random
import re
import subprocess
import sys
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from ray import tune
from torch import nn

from fusion.keys import KEYS
from hydro_rasda import choice, grid_search, loguniform, qloguniform, quniform, randint, sample_from, uniform
from hydro_rasda.heats.search import check_first
from hydro_rasda.history.lines import jsonable
from hydro_rasda.space.space import check_config, check_space, describe, explored, has_shares, longest_warmup, sample

DOMAINS: dict[str, Any] = {
    "lr": loguniform(1e-4, 1.0),
    "randint": randint(2, 5),
    "nested": {"inner": uniform(0.0, 1.0), "constant": "c"},
    "mapped": [choice([{"kind": "x", "value": uniform(4.0, 5.0)}])],
    "derived": sample_from(lambda config: 2 * config["lr"]),
}


def test_values_are_pythons_own_numbers() -> None:
    numbers = {"lr": choice([np.float64(0.5)]), "n": choice([np.int64(3)]), "pair": choice([(np.float32(1), 2)])}
    (config,) = sample(numbers, 1, seed=0)
    assert [type(config["lr"]), type(config["n"]), type(config["pair"][0])] == [float, int, float]


def test_grid_is_sampled_whole_num_samples_times() -> None:
    space = {"lr": loguniform(1e-4, 1.0), "a": grid_search([1, 2, 3]), "b": {"c": grid_search([0.1, 0.2])}}
    configs = sample(space, 4, seed=0)
    points = [(config["a"], config["b"]["c"]) for config in configs]
    assert len(points) == 4 * 6
    assert all(points.count(point) == 4 for point in ((a, c) for a in (1, 2, 3) for c in (0.1, 0.2)))
    assert len({config["lr"] for config in configs}) == 24


def test_one_seed_one_sample() -> None:
    assert sample(DOMAINS, 5, seed=3) == sample(DOMAINS, 5, seed=3)
    assert sample(DOMAINS, 5, seed=3) != sample(DOMAINS, 5, seed=4)


def test_fewer_samples_are_the_first_of_more() -> None:
    assert sample(DOMAINS, 8, seed=0)[:3] == sample(DOMAINS, 3, seed=0)


def from_global_generators(config: dict[str, Any]) -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_sample_from_with_global_generators_is_reproducible_and_leaves_them_alone() -> None:
    space = {"lr": loguniform(1e-4, 1.0), "noise": sample_from(from_global_generators)}

    def states() -> list[str]:
        return [repr(random.getstate()), repr(np.random.get_state()), repr(torch.get_rng_state().tolist())]

    before = states()
    first = sample(space, 4, seed=0)
    assert states() == before
    from_global_generators({})
    assert sample(space, 4, seed=0) == first
    assert len({value for config in first for value in config["noise"]}) == 12


def test_generators_are_left_alone_where_sampling_raises() -> None:
    def fails(config: dict[str, Any]) -> float:
        raise RuntimeError("no such value")

    before = random.getstate(), torch.get_rng_state().tolist()
    with pytest.raises(ValueError, match="`space` cannot be sampled: 'noise' raises RuntimeError: no such value"):
        sample({"lr": loguniform(1e-4, 1.0), "noise": sample_from(fails)}, 1, seed=0)
    assert (random.getstate(), torch.get_rng_state().tolist()) == before


def scaled(config: dict[str, Any], factor: float) -> float:
    return factor * float(config["lr"])


def spaces() -> list[dict[str, Any]]:
    """Spaces of which no two are equal."""
    return [
        {"lr": loguniform(1e-4, 1.0)},
        {"lr": loguniform(1e-5, 1.0)},
        {"lr": uniform(1e-4, 1.0)},
        {"lr": quniform(0.1, 1.0, 0.1)},
        {"lr": quniform(0.1, 1.0, 0.05)},
        {"lr": qloguniform(0.1, 1.0, 0.1)},
        {"lr": tune.randn(0.0, 1.0)},
        {"lr": tune.randn(0.0, 2.0)},
        {"lr": randint(1, 2)},
        {"lr": choice([0.1, 0.2])},
        {"lr": choice(["0.1", "0.2"])},
        {"lr": choice([0.2, 0.1])},
        {"lr": grid_search([0.1, 0.2])},
        {"lr": 0.1},
        {"lr": "0.1"},
        {"lr": {"inner": uniform(0.0, 1.0)}},
        {"lr": {"inner": uniform(0.0, 2.0)}},
        {"lr": [uniform(0.0, 1.0)]},
        {"lr": [uniform(0.0, 2.0)]},
        {"lr": choice([{"inner": uniform(0.0, 1.0)}])},
        {"lr": choice([{"inner": uniform(0.0, 2.0)}])},
        {"lr": choice([nn.ReLU, nn.Tanh])},
        {"lr": choice([nn.ReLU, nn.GELU])},
        {"lr": choice([lambda x: x + 1])},
        {"lr": choice([lambda x: x + 2])},
        {"lr": sample_from(lambda config: 1)},
        {"lr": sample_from(lambda config: 2)},
        {"lr": sample_from(lambda config: (lambda: 3)())},
        {"lr": sample_from(lambda config: (lambda: 4)())},
        {"lr": sample_from(partial(scaled, factor=1.0))},
        {"lr": sample_from(partial(scaled, factor=2.0))},
        {"lr": sample_from(lambda config: config["x"] in {"one", "two", "three"})},
        {"momentum": loguniform(1e-4, 1.0)},
    ]


def test_description_is_equal_for_equal_spaces_only() -> None:
    described, again = [describe(s) for s in spaces()], [describe(s) for s in spaces()]
    assert described == again
    for i, one in enumerate(described):
        assert all(one != other for other in described[:i]), one


class Block:
    """A value without a `repr` of its own, whose `repr` has the object's address."""


def test_objects_are_described_without_their_addresses() -> None:
    first, again = ({"lr": uniform(0.1, 1), "block": Block(), "blocks": choice([[Block()]])} for _ in range(2))
    assert describe(first) == describe(again)
    assert jsonable(first["block"]) == jsonable(again["block"])


@pytest.mark.slow
def test_description_is_the_same_in_every_process() -> None:
    code = "from tests.hydro_rasda.space.test_space import *; print([describe(s) for s in spaces()])"
    hashed = [
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert hashed[0] == hashed[1]
    assert b" at 0x" not in hashed[0]


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("optimizer", "sgd", "lamb"),
        ("optimizer", choice(["sgd", "adam", "adamw"]), choice(["sgd", "lamb"])),
        ("optimizer", grid_search(["sgd"]), grid_search(["SGD"])),
        ("lr", loguniform(1e-4, 1), uniform(0, 1)),
        ("lr", np.float64(0.1), 0.0),
        ("lr", np.float32(0.1), -1.0),
        ("lr", quniform(0.1, 1, 0.1), quniform(0, 1, 0.1)),
        ("lr", 1, math.inf),
        ("lr", 1, math.nan),
        ("lr", 1, True),
        ("lr", 1, "0.1"),
        ("lr", choice([0.1]), choice([0.1, {"a": 1}])),
        ("lr", choice([uniform(0.1, 1)]), choice([0.1, uniform(0, 1)])),
        ("lr", sample_from(lambda config: 1), tune.randn(0, 1)),
        ("momentum", uniform(0.5, 1.0), 1.0),
        ("momentum", choice([0.9]), choice([0.9, 1.0])),
        ("momentum", quniform(0, 0.9, 0.1), quniform(0, 1.0, 0.1)),
        ("momentum", 0, -0.1),
        ("dampening", 1.0, 1.1),
        ("nesterov", choice([True, False]), 1),
        ("weight_decay", 0, -1e-4),
        ("weight_decay", uniform(0, 1), math.inf),
        ("independent_weight_decay", choice([True, False]), "no"),
        ("independent_weight_decay", np.bool_(True), choice([0, 1])),
        ("beta1", 0.0, 1.0),
        ("beta2", uniform(0.9, 1.0), uniform(0.9, 1.1)),
        ("beta2_decay", uniform(-1, 0.0), uniform(-1, 0.1)),
        ("alpha", 0.99, 1.0),
        ("rho", uniform(0.8, 1.0), uniform(0.8, 1.1)),
        ("eps", 1e-8, 0.0),
        ("d_coef", loguniform(0.1, 10), 0.0),
        ("d0", 1e-6, choice([1e-6, -1e-6])),
        ("use_bias_correction", choice([True, False]), 1),
        ("safeguard_warmup", True, "no"),
        ("adjust_lr_fn", choice(["original", "match_rms_adamw"]), "sqrt"),
        ("batch_size", choice([1, 32]), choice([0, 32])),
        ("batch_size", choice([np.int64(8)]), 32.0),
        ("batch_size", randint(1, 9), uniform(1, 9)),
        ("accumulate", choice([1, 4]), 0.5),
        ("grad_clip", choice([None, 1.0]), 0.0),
        ("grad_clip", math.inf, choice([None, -1.0])),
        ("schedule", choice(["constant", "cosine", "step", "exponential", "wsd"]), "poly"),
        ("schedule", choice([lambda step, steps: 1 - step / steps]), choice([[1.0, 0.5]])),
        ("gamma", 1.0, 0.0),
        ("gamma", uniform(0.1, 1.0), 1.5),
        ("step_size", randint(1, 5), randint(0, 5)),
        ("decay_start", uniform(0, 1), 1.5),
        ("floor", loguniform(1e-3, 1), uniform(-0.1, 0.5)),
        ("warmup", uniform(0, 0.2), uniform(0, 1.1)),
        ("warmup_epochs", 0.5, -1),
        ("rescale_warmup_epochs", choice([1, 2]), math.inf),
    ],
)
def test_each_key_has_a_rule(key: str, good: Any, bad: Any) -> None:
    row = KEYS[key]
    others = {"lr": loguniform(1e-4, 1.0), "x": uniform(0.0, 1.0)}
    if row.under is not None:
        others[row.under] = choice(["constant" if row.under == "schedule" else "adam", *row.defaults])
    check_space({**others, key: good})
    with pytest.raises(ValueError, match=rf"^`space\['{key}'\]` is .*, but must be "):
        check_space({**others, key: bad})


def test_every_rule_is_tested() -> None:
    marks = test_each_key_has_a_rule.pytestmark
    assert {case[0] for case in marks[0].args[1]} == set(KEYS)


@pytest.mark.parametrize("domain", [uniform(1, 0.5), loguniform(0.1, 0.001), randint(5, 3), randint(3, 3)])
def test_bounds_in_the_wrong_order_are_named(domain: Any) -> None:
    told = r"`space\['encoder/width'\]` is (float|integer) .*, but must be a domain whose lower bound is below"
    with pytest.raises(ValueError, match=told):
        check_space({"lr": loguniform(1e-3, 1), "encoder/width": domain})


CYCLE: dict[str, Any] = {}
CYCLE["a"] = CYCLE


@pytest.mark.parametrize("within", [lambda value: value, lambda value: {"b": [value]}, lambda value: choice([value])])
@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (threading.Lock, r"a value that can be copied for each trial \(TypeError: cannot pickle '_thread.lock'"),
        (lambda: sys.stdout, "a value that can be copied for each trial"),
        (lambda: iter(x for x in "ab"), "a value that can be copied for each trial .*'generator'"),
        (lambda: math, "a value that can be copied for each trial .*'module'"),
        (lambda: CYCLE, "a value that does not contain itself"),
    ],
)
def test_what_no_trial_could_have_a_copy_of_is_refused(make: Any, rule: str, within: Any) -> None:
    value = within(make())
    with pytest.raises(ValueError, match=rf"^`space\['x'\]` is .*, but must be {rule}"):
        check_space({"lr": loguniform(1e-3, 1), "x": value})
    with pytest.raises(ValueError, match=rf"^`sweep\.first\[0\]\['x'\]` is .*, but must be {rule}"):
        check_first([{"x": value}], {"lr": loguniform(1e-3, 1), "x": choice([1, 2])})
    with pytest.raises(ValueError, match="`space` cannot be sampled"):
        sample({"x": sample_from(lambda config: make())}, 1, 0)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: quniform(0, 1, 0), "`q` is 0, but must be a finite number above 0"),
        (lambda: quniform(0, 1, -1), "`q` is -1"),
        (lambda: quniform(0, 1, math.nan), "`q` is nan, but must be a finite number"),
        (lambda: quniform(0, 1, q=None), "`q` is None"),  # type: ignore[arg-type]
        (lambda: qloguniform(0.1, 1, 0), "`q` is 0"),
        (lambda: check_space({"lr": 1, "x": tune.qrandint(1, 5, 0)}), r"`space\['x'\].q` is 0, but must be a finite"),
        (lambda: check_space({"lr": 1, "x": tune.qrandn(0, 1, -0.5)}), r"`space\['x'\].q` is -0.5, but must be"),
        (lambda: check_space({"lr": 1, "x": choice([])}), r"`space\['x'\]` is choice\(\[\]\), but must be"),
    ],
)
def test_a_quantum_or_a_choice_of_nothing_is_refused(make: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


def test_a_message_shows_the_domain() -> None:
    with pytest.raises(ValueError, match=r"`space\['lr'\]` is float uniform\(0, 1\), but must be a finite number > 0"):
        check_space({"lr": uniform(0, 1)})


@pytest.mark.parametrize("space", [{}, {"lr": 0.1}, {"lr": 0.1, "nested": {"depth": 2}}, {"lr": [0.1]}])
def test_a_space_needs_a_domain(space: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"`space` is .*, but must be one with a domain"):
        check_space(space)


@pytest.mark.parametrize(
    "space",
    [{"n": {"x": uniform(0, 1)}}, {"l": [choice([1, 2])]}, {"g": grid_search([1])}, {"f": sample_from(lambda c: 1)}],
)
def test_a_domain_anywhere_counts(space: dict[str, Any]) -> None:
    check_space(space)


@pytest.mark.parametrize("space", [None, [("lr", 0.1)], "lr", {1: uniform(0, 1)}])
def test_a_space_is_a_mapping_of_names(space: object) -> None:
    with pytest.raises(ValueError, match=r"`space` (is .*|has the key 1), but must be a mapping of names to domains"):
        check_space(space)


def test_the_key_of_a_domain_is_a_name_in_nested_mappings_too() -> None:
    with pytest.raises(ValueError, match=r"`space` is \[0\], but must be one whose domains have names as keys"):
        check_space({"lr": 0.1, "layers": {0: choice([1, 2])}})
    check_space({"lr": loguniform(1e-3, 1), "class weights": {0: 1.0, 1: 5.0}})


class Beta(tune.search.sample.Domain):  # type: ignore[misc]
    """A domain of the user's own class."""

    def sample(self, config: Any = None, size: int = 1, random_state: Any = None) -> float:
        return float(random_state.beta(2, 2))


def test_what_a_domain_of_another_class_draws_is_checked_when_it_is_drawn() -> None:
    check_space({"lr": Beta(), "own": Beta()})
    (drawn,) = sample({"lr": Beta(), "own": Beta()}, 1, 0)
    assert 0 < drawn["lr"] != drawn["own"]


@pytest.mark.parametrize("wide", [uniform(-1e308, 1e308), randint(0, 10**30)])
def test_a_range_that_cannot_be_drawn_from_is_named(wide: Any) -> None:
    with pytest.raises(ValueError, match=r"`space` cannot be sampled: 'a\.b' raises (Overflow|Value)Error: "):
        sample({"lr": 0.1, "a": {"b": wide}}, 1, 0)


def test_a_sampled_configuration_is_checked_too() -> None:
    check_config({"lr": 0.1, "anything": object()})
    with pytest.raises(ValueError, match="a space with the key 'lr'"):
        check_config({"momentum": 0.9})
    with pytest.raises(ValueError, match="the learning rate: rename 'learning_rate'"):
        check_config({"learning_rate": 0.9})
    with pytest.raises(ValueError, match="in which `lr` is -1, but must be a finite number > 0"):
        check_config({"lr": -1})
    with pytest.raises(ValueError, match=r"`momentum` is 1.0, but must be in \[0, 1\)"):
        check_config({"lr": 0.1, "optimizer": "sgd", "momentum": 1.0})


@pytest.mark.parametrize(
    "own",
    [
        {"gamma": choice(["scale", "auto"])},
        {"gamma": uniform(0, 9), "schedule": choice(["constant", "cosine"])},
        {"step_size": 0.5, "schedule": "exponential"},
        {"gamma": 9, "schedule": choice([lambda step, steps: 1 - step / steps])},
        {"momentum": choice([0.1, None]), "optimizer": choice(["adam", "adamw"])},
        {"beta1": 2.0, "optimizer": grid_search(["sgd"])},
    ],
)
def test_a_key_that_the_library_does_not_read_is_the_users_own(own: dict[str, Any]) -> None:
    space = {"lr": loguniform(1e-4, 1.0), **own}
    check_space(space)
    for config in sample(space, 3, 0):
        check_config(config)


def test_where_only_sampling_tells_what_is_read_the_sample_is_checked() -> None:
    space = {"lr": loguniform(1e-4, 1.0), "schedule": sample_from(lambda _: "step"), "gamma": 7}
    check_space(space)
    with pytest.raises(ValueError, match=r"`gamma` is 7, but must be in \(0, 1\]"):
        check_config(sample(space, 1, 0)[0])


@pytest.mark.parametrize("kind", ["schedule_free_adamw", "schedule_free_sgd"])
def test_schedule_free_optimizers_take_a_warmup_and_no_schedule(kind: str) -> None:
    config = {"lr": 0.1, "optimizer": kind, "schedule": "constant", "warmup": 0.1}
    check_config(config)
    for schedule in ("cosine", max):
        with pytest.raises(ValueError, match=rf"`schedule` is .*, but must be 'constant' with the optimizer {kind}"):
            check_config({**config, "schedule": schedule})
    for key, other in (("momentum", "beta1"), ("beta1", "momentum")):
        if kind == {"momentum": "schedule_free_sgd", "beta1": "schedule_free_adamw"}[key]:
            check_config({**config, key: 0.5, other: 0.0})
            with pytest.raises(ValueError, match=rf"`{key}` is 0.0, but must be in \(0, 1\) with the optimizer {kind}"):
                check_config({**config, key: 0.0})


def test_nesterov_needs_momentum() -> None:
    check_config({"lr": 0.1, "optimizer": "sgd", "nesterov": True, "momentum": 0.9})
    check_config({"lr": 0.1, "optimizer": "adamw", "nesterov": True})
    for broken in ({}, {"momentum": 0.0}, {"momentum": 0.9, "dampening": 0.1}):
        with pytest.raises(ValueError, match=r"nesterov.*momentum"):
            check_config({"lr": 0.1, "optimizer": "sgd", "nesterov": True, **broken})


@pytest.mark.parametrize(
    ("domain", "sampled", "longest"),
    [
        (0, [], 0.0),
        (uniform(0, 3), [1.0], math.nextafter(3, 0)),
        (choice([0, 2.5, 1]), [], 2.5),
        (sample_from(lambda _: 1), [1, 4], 4.0),
        (choice([1, sample_from(lambda _: 1)]), [7], 7.0),
    ],
)
def test_the_longest_warmup(domain: Any, sampled: list[float], longest: float) -> None:
    assert longest_warmup({"warmup_epochs": domain}, [{"warmup_epochs": epochs} for epochs in sampled], 9) == longest
    assert longest_warmup({}, [{}], 9) == 0


def test_the_longest_warmup_as_a_share() -> None:
    assert longest_warmup({"warmup": choice([0.1, 0.25])}, [], 8) == 2
    assert longest_warmup({"warmup": sample_from(lambda _: 0.5)}, [{"warmup": 0.5}], 8) == 4


@pytest.mark.parametrize(
    ("space", "configs", "found"),
    [
        ({"schedule": "linear"}, [], False),
        ({"schedule": "linear", "floor": 0.1}, [], True),
        ({"schedule": choice(["constant", "cosine"]), "decay_start": uniform(0, 1)}, [], True),
        ({"schedule": choice(["constant", "step"]), "decay_start": uniform(0, 1)}, [], False),
        ({"warmup": 0.1}, [], True),
        ({"schedule": choice(["wsd", "linear"])}, [], True),
        ({"by": choice([{"schedule": "constant"}, {"schedule": "cosine", "floor": 0.1}])}, [], True),
        ({"schedule": sample_from(lambda _: "wsd")}, [{"schedule": "wsd"}], True),
        ({"schedule": lambda step, steps: 1.0, "floor": "oak"}, [{"floor": "oak"}], False),
    ],
)
def test_whether_a_schedule_takes_shares_of_the_training(space: Any, configs: Any, found: bool) -> None:
    assert has_shares(space, configs) == found


@pytest.mark.parametrize(
    ("space", "told"),
    [
        ({"lr": 0.1, "optimizer": choice(["sgd", "Adam"])}, "; 'Adam' is not; did you mean \"adam\"?"),
        ({"lr": loguniform(0.1, 1), "schedule": "cosin"}, 'number of steps; did you mean "cosine"?'),
        ({"lr": uniform(0, 1)}, "must be a finite number > 0; 0 is not"),
        ({"lr": loguniform(0.1, 1), "": 1}, "must be a mapping whose names have at least one letter"),
    ],
)
def test_the_wrong_one_of_several_values_is_named(space: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=f"{re.escape(told)}$"):
        check_space(space)


def test_a_population_changes_no_list_with_a_float_that_has_no_neighbours() -> None:
    space = {"lr": choice([0.1, 0.2]), "cut": choice([1.0, math.inf]), "clip": choice([1.0, math.nan])}
    assert explored(space) == {"lr": (0.1, 0.2)}
