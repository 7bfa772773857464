"""Domains mean and draw what Ray Tune's do, which is the oracle, whether it is loaded or not."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from ray import tune
from ray.tune.search.optuna import OptunaSearch
from ray.tune.search.variant_generator import generate_variants

import hydro_rasda
from fusion.streams import preserved_generators, seed_generators
from hydro_rasda import choice, loguniform, qloguniform, quniform, randint, sample_from, uniform
from hydro_rasda.heats.search import prepare
from hydro_rasda.run.fingerprint import content, digest
from hydro_rasda.space import domains
from hydro_rasda.space.domains import Domain, Integer, to_own, to_ray
from hydro_rasda.space.space import check_space, derived, describe, longest_warmup, sample, schedules, tuned


@contextmanager
def without_ray() -> Iterator[None]:
    """As in a process that has not loaded Ray Tune."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "ray.tune.search.sample", raising=False)
        yield


def double(config: Mapping[str, Any]) -> Any:
    return 2 * config["lr"]


def drawn() -> float:
    return random.random() + float(np.random.rand())


def every(of: Any) -> dict[str, Any]:
    """A space with each domain, by the functions of a module."""
    return {
        "lr": of.loguniform(1e-4, 1.0),
        "uniform": of.uniform(-1.0, 1.0),
        "quniform": of.quniform(0.0, 1.0, 0.25),
        "qloguniform": of.qloguniform(0.1, 10.0, 0.1),
        "randint": of.randint(2, 5),
        "numbers": of.choice([0.1, 1, None, "one"]),
        "constant": 7,
        "nested": {"inner": of.uniform(0.0, 1.0), "constant": "c"},
        "listed": [of.uniform(2.0, 3.0), {"deeper": of.randint(0, 9)}],
        "paired": {"of": (of.uniform(2.0, 3.0), "constant")},
        "one_of": of.choice([{"kind": "x", "value": of.uniform(4.0, 5.0)}, (of.randint(1, 3), 2), of.uniform(0, 1)]),
        "warmup_epochs": of.choice([0, of.uniform(1, 2)]),
        "schedule": of.choice(["cosine", "constant"]),
        "derived": of.sample_from(double),
        "waits": of.sample_from(lambda config: config.last if config.lr < 0.1 else config.nested.inner),
        "as_before": of.sample_from(lambda spec: spec.config.lr + spec.config.nested.inner),
        "of_nothing": of.sample_from(drawn),
        "last": of.quniform(-0.5, 0.5, 0.1),
    }


def with_grid(of: Any) -> dict[str, Any]:
    return {
        "z": of.grid_search([1, 2, 3]),
        "lr": of.loguniform(1e-4, 1.0),
        "a": {"b": of.grid_search(["x", of.uniform(0, 1)]), "c": of.uniform(0, 1)},
        "l": [of.grid_search([0.1, 0.2])],
    }


SPACES = [every, with_grid]


def ours(space: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    with without_ray():
        return space(hydro_rasda)


def ray_samples(space: dict[str, Any], count: int, seed: int) -> list[dict[str, Any]]:
    """What Ray Tune draws."""
    rng = np.random.default_rng(seed)
    with preserved_generators():
        seed_generators(seed)
        return [config for _ in range(count) for _, config in generate_variants(space, random_state=rng)]


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("seed", range(3))
def test_the_same_seed_gives_what_ray_tune_draws(space: Callable[[Any], dict[str, Any]], seed: int) -> None:
    expected = ray_samples(space(tune), 20, seed)
    assert expected
    with without_ray():
        assert sample(ours(space), 20, seed) == expected
    assert sample(ours(space), 20, seed) == expected
    assert sample(space(tune), 20, seed) == expected
    assert sample(space(hydro_rasda), 20, seed) == expected


@pytest.mark.parametrize("space", SPACES)
def test_a_space_may_mix_both(space: Callable[[Any], dict[str, Any]]) -> None:
    one, other = ours(space), space(tune)
    mixed = {key: (one if i % 2 else other)[key] for i, key in enumerate(one)}
    assert sample(mixed, 20, 0) == sample(one, 20, 0)
    assert describe(mixed) == describe(one)


def said(space: dict[str, Any]) -> tuple[Any, ...]:
    return describe(space), tuned(space), derived(space), longest_warmup(space, [], 9), schedules(space, [])


@pytest.mark.parametrize("space", SPACES)
def test_both_are_described_and_searched_alike(space: Callable[[Any], dict[str, Any]]) -> None:
    theirs = space(tune)
    with without_ray():
        own = space(hydro_rasda)
        found = said(own)
        check_space(own)
    assert found == (
        describe(theirs),
        tuned(theirs),
        derived(theirs),
        longest_warmup(theirs, [], 9),
        schedules(theirs, []),
    )


def test_where_ray_tune_is_loaded_its_own_domains_are_made() -> None:
    """So that a script of Ray Tune's can give them to its `Tuner`."""
    for name, of_ray in every(tune).items():
        assert type(every(hydro_rasda)[name]) is type(of_ray), name
        assert not isinstance(every(hydro_rasda)[name], Domain)
    with without_ray():
        made = every(hydro_rasda)
        assert sum(isinstance(value, Domain) for value in made.values()) == 14


@pytest.mark.parametrize("space", SPACES)
def test_ray_tune_gets_its_own_domains(space: Callable[[Any], dict[str, Any]]) -> None:
    converted, theirs = to_ray(ours(space)), space(tune)
    assert describe(converted) == describe(theirs)
    assert ray_samples(converted, 10, 0) == ray_samples(theirs, 10, 0)


def searchable(of: Any) -> dict[str, Any]:
    return {key: every(of)[key] for key in ("lr", "uniform", "quniform", "randint", "numbers", "constant")}


def test_a_searcher_searches_them_as_ray_tunes_own() -> None:
    def suggested(space: dict[str, Any]) -> list[Any]:
        searcher = OptunaSearch(seed=0)
        prepare(searcher, space, (("loss", "min"),))
        return [searcher.suggest(str(number)) for number in range(8)]

    expected = suggested(searchable(tune))
    assert len({str(config) for config in expected}) == 8
    assert suggested(ours(searchable)) == expected


def test_a_function_that_cannot_have_its_values_is_named() -> None:
    circle = {"a": sample_from(lambda config: config.b), "b": sample_from(lambda config: config.a)}
    with pytest.raises(ValueError, match=r"`space` cannot be sampled: '[ab]' depends on itself"):
        sample(circle, 1, 0)
    with pytest.raises(ValueError, match=r"`space` cannot be sampled: 'a' raises KeyError: 'typo'"):
        sample({"a": sample_from(lambda config: config["typo"])}, 1, 0)
    with pytest.raises(ValueError, match=r"`func` is .*, but must be a function of the configuration, or of nothing"):
        sample_from(lambda a, b: a)


@pytest.mark.parametrize(
    "read",
    [lambda c: c["opt"], lambda c: c.get("opt"), lambda c: c.opt, lambda c: c["net"]["opt"], lambda c: c["l"][0]],
)
def test_a_function_waits_for_values_however_it_asks_for_them(read: Callable[[Any], str]) -> None:
    """By its key, a value that was drawn later was its domain, which equals none of the values."""
    space = {
        "lr": sample_from(lambda config: 0.5 if read(config) == "sgd" else 0.1),
        "opt": choice(["sgd"]),
        "net": {"opt": choice(["sgd"])},
        "l": [choice(["sgd"])],
    }
    assert [config["lr"] for config in sample(space, 3, 0)] == [0.5, 0.5, 0.5]
    with pytest.raises(
        ValueError, match="`space` cannot be sampled: 'lr' raises AttributeError: the configuration has no 'typo'"
    ):
        sample({"lr": sample_from(lambda config: config.typo)}, 1, 0)


def test_ray_tunes_categorical_of_a_grid_is_a_grid() -> None:
    space = {"a": tune.search.sample.Categorical([1, 2]).grid(), "lr": uniform(0, 1)}
    assert [config["a"] for config in sample(space, 2, 0)] == [1, 2, 1, 2]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: uniform(0, math.inf), "`upper` is inf, but must be a finite number"),
        (lambda: uniform(None, 1), "`lower` is None, but must be a finite number"),  # type: ignore[arg-type]
        (lambda: loguniform(0, 1), "`lower` is 0, but must be a finite number above 0"),
        (lambda: quniform(0, 1, 0.3), "`upper` is 1, but must be a multiple of `q`, 0.3"),
        (lambda: qloguniform(0.25, 1, 0.5), "`lower` is 0.25, but must be a multiple of `q`, 0.5"),
        (lambda: randint(1, 4.5), "`upper` is 4.5, but must be an integer"),  # type: ignore[arg-type]
        (lambda: randint(None, 4), "`lower` is None, but must be an integer"),  # type: ignore[arg-type]
        (lambda: choice("sgd"), "`categories` is 'sgd', but must be a list of values"),
        (lambda: choice({"sgd"}), "`categories` is {'sgd'}, but must be a list of values"),  # type: ignore[arg-type]
        (lambda: choice({"a": 1}), "`categories` is {'a': 1}, but must be"),  # type: ignore[arg-type]
        (lambda: choice(3), "`categories` is 3, but must be a list of values"),  # type: ignore[arg-type]
    ],
)
def test_bad_bounds_are_named_whether_ray_is_loaded_or_not(make: Callable[[], Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()
    with without_ray(), pytest.raises(ValueError, match=told):
        make()


def test_domains_show_how_they_were_made_and_survive_copies() -> None:
    with without_ray():
        made = [
            loguniform(1e-4, 1),
            quniform(0, 1, 0.25),
            randint(1, 5),
            choice(["a", uniform(0, 1)]),
            sample_from(double),
        ]
        assert [repr(domain) for domain in made][:4] == [
            "loguniform(0.0001, 1)",
            "quniform(0, 1, 0.25)",
            "randint(1, 5)",
            "choice(['a', uniform(0, 1)])",
        ]
        for domain in made:
            for copied in (copy.deepcopy(domain), pickle.loads(pickle.dumps(domain))):
                assert describe({"x": copied}) == describe({"x": domain})


def test_arguments_have_ray_tunes_names() -> None:
    for name in domains.__all__:
        own, rays = (inspect.signature(getattr(of, name)).parameters for of in (hydro_rasda, tune))
        assert list(own) == [argument for argument in rays if argument != "base"]


def test_a_run_is_the_same_whether_ray_was_loaded_when_its_space_was_made() -> None:
    """Except for laws that only Ray Tune has, and for classes of a user's, which may draw other values."""
    with without_ray():
        own = every(hydro_rasda)
    assert content(every(tune)) != content(own)
    assert digest(content(to_own(every(tune)))) == digest(content(to_own(own))) == digest(content(own))

    class Odd(Integer):
        pass

    others = {"a": tune.randn(0.0, 1.0), "b": tune.qrandint(0, 9, 3), "c": tune.lograndint(1, 9), "d": Odd(1, 9)}
    assert to_own(others) == others


def test_a_space_made_before_ray_is_loaded_serves_after() -> None:
    script = """
import sys
from hydro_rasda import choice, grid_search, loguniform
from hydro_rasda.space.space import check_space, describe, sample
space = {"lr": loguniform(1e-4, 1), "a": choice([1, 2]), "g": grid_search([1, 2])}
check_space(space)
before = describe(space), sample(space, 5, 0)
assert "ray" not in sys.modules
import ray.tune
check_space(space)
assert (describe(space), sample(space, 5, 0)) == before
again = {"lr": ray.tune.loguniform(1e-4, 1), "a": choice([1, 2]), "g": grid_search([1, 2])}
assert (describe(again), sample(again, 5, 0)) == before
"""
    subprocess.run([sys.executable, "-c", script], check=True)
