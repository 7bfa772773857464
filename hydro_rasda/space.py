"""Search spaces: Ray Tune's own domains, sampled from one seed, checked before anything trains.

The domains are Ray Tune's, re-exported, so that one import is enough and every Ray Tune searcher understands them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from ray.tune import (
    choice,
    grid_search,
    loguniform,
    qloguniform,
    quniform,
    randint,
    sample_from,
    uniform,
)
from ray.tune.search.sample import Categorical, Domain, Float, Function, Integer, Quantized
from ray.tune.search.variant_generator import generate_variants

from .config import require

__all__ = [
    "OPTIMIZERS",
    "SCHEDULES",
    "check_config",
    "check_space",
    "choice",
    "describe",
    "grid_search",
    "loguniform",
    "qloguniform",
    "quniform",
    "randint",
    "sample",
    "sample_from",
    "uniform",
]

Config = dict[str, Any]

OPTIMIZERS = ("sgd", "adam", "adamw")
DEFAULT_OPTIMIZER = "adamw"
SCHEDULES = ("constant", "cosine", "step", "exponential")


class _Rule(NamedTuple):
    """What values a key that the library reads may take."""

    holds: Callable[[Any], bool]
    text: str


def _number(holds: Callable[[float], bool]) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and holds(value)

    return check


def _integer(least: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least


_FRACTION = _Rule(_number(lambda v: 0 <= v <= 1), "in [0, 1)")
_EPOCHS = _Rule(_number(lambda v: v >= 0), "a number of epochs >= 0")

RULES: Mapping[str, _Rule] = {
    "optimizer": _Rule(lambda v: v in OPTIMIZERS, f"one of {OPTIMIZERS}"),
    "lr": _Rule(_number(lambda v: v > 0 and not math.isinf(v)), "a finite number > 0"),
    "momentum": _FRACTION,
    "dampening": _Rule(_number(lambda v: 0 <= v <= 1), "in [0, 1]"),
    "nesterov": _Rule(lambda v: isinstance(v, bool), "True or False"),
    "weight_decay": _Rule(_number(lambda v: v >= 0), "a number >= 0"),
    "beta1": _FRACTION,
    "beta2": _FRACTION,
    "eps": _Rule(_number(lambda v: v > 0), "a number > 0"),
    "batch_size": _Rule(_integer(1), "an integer >= 1"),
    "grad_clip": _Rule(lambda v: v is None or _number(lambda x: x > 0)(v), "None or a norm > 0"),
    "schedule": _Rule(lambda v: v in SCHEDULES, f"one of {SCHEDULES}"),
    "gamma": _Rule(_number(lambda v: 0 < v <= 1), "in (0, 1]"),
    "step_size": _Rule(_integer(1), "a number of epochs >= 1"),
    "warmup_epochs": _EPOCHS,
    "rescale_warmup_epochs": _EPOCHS,
}
"""The keys of a configuration that the library itself reads. Every key reaches `model_fn`."""

_BELOW_ONE = ("momentum", "beta1", "beta2")


def check_space(space: object) -> None:
    """Check a search space before anything is sampled from it.

    Args:
        space: Maps names to Ray Tune domains, `grid_search`, constants, or nested mappings of these.

    Raises:
        TypeError: where it is no mapping with string keys.
        ValueError: where it has no domain, or a key that the library reads can take a value that breaks its rule.
    """
    if not isinstance(space, Mapping) or not all(isinstance(key, str) for key in space):
        raise TypeError(f"`space` is {space!r}, but must be a mapping of names to domains")
    if not any(_is_domain(value) for _, value in _leaves(space)):
        raise ValueError(f"`space` is {dict(space)!r}, but must have a domain, such as loguniform(1e-4, 1), to search")
    for key, value in space.items():
        if key in RULES:
            for reachable in _extremes(value):
                _check(f"space[{key!r}]", key, reachable, value)


def check_config(config: Mapping[str, Any]) -> None:
    """Check one sampled configuration (what `sample_from` or a searcher returns is known only now).

    Raises:
        ValueError: where a key that the library reads is missing (`lr`) or breaks its rule.
    """
    require("lr" in config, "space", sorted(config), "a space with the key 'lr', the learning rate")
    for key in RULES.keys() & config.keys():
        _check(f"config[{key!r}]", key, config[key], config[key])


def _check(argument: str, key: str, reachable: Any, shown: Any) -> None:
    rule = RULES[key]
    holds = rule.holds(reachable)
    # A domain's upper bound is exclusive, a constant's value is not.
    if holds and key in _BELOW_ONE and not isinstance(shown, Domain):
        holds = reachable < 1
    require(holds, argument, _show(shown), rule.text)


def sample(space: Mapping[str, Any], num_samples: int, seed: int) -> list[Config]:
    """Sample configurations, reproducibly.

    As in Ray Tune, a space with `grid_search` yields its whole grid `num_samples` times.

    Args:
        space: The search space.
        num_samples: How many times to sample.
        seed: Seeds the domains and, for `sample_from`, the `random` and `numpy.random` modules.

    Returns:
        The configurations, in the order of sampling; plain Python numbers, not NumPy's.
    """
    rng = np.random.default_rng(seed)
    with _seeded_globals(seed):
        return [
            _plain(config) for _ in range(num_samples) for _, config in generate_variants(dict(space), random_state=rng)
        ]


def describe(space: Mapping[str, Any]) -> dict[str, Any]:
    """The space as JSON values, equal for equal spaces: kept with a run to recognise it."""
    return {key: describe(value) if _is_nested(value) else _show(value) for key, value in space.items()}


def _is_grid(value: object) -> bool:
    return isinstance(value, Mapping) and set(value) == {"grid_search"}


def _is_nested(value: object) -> bool:
    return isinstance(value, Mapping) and not _is_grid(value)


def _is_domain(value: object) -> bool:
    return isinstance(value, Domain) or _is_grid(value)


def _leaves(space: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in space.items():
        if _is_nested(value):
            yield from _leaves(value)
        else:
            yield key, value


def _extremes(value: Any) -> Sequence[Any]:
    """Values that bound what a leaf of the space can become; empty where only sampling can tell."""
    if isinstance(value, Function):
        return ()
    if isinstance(value, Categorical):
        return list(value.categories)
    if isinstance(value, Float):
        lower = -math.inf if value.lower is None else value.lower
        return (lower, math.inf if value.upper is None else value.upper)
    if isinstance(value, Integer):
        return (value.lower, value.upper)
    if _is_grid(value):
        return list(value["grid_search"])
    return (value,)


def _show(value: Any) -> str:
    """One line for a domain or constant: `loguniform(0.0001, 1)`, without memory addresses."""
    if isinstance(value, Function):
        code = getattr(value.func, "__code__", None)
        body = hash_code(code) if code else ""
        return f"sample_from({getattr(value.func, '__qualname__', type(value.func).__name__)}{body})"
    if isinstance(value, Categorical):
        return f"choice([{', '.join(map(_show, value.categories))}])"
    if isinstance(value, (Float, Integer)):
        sampler = value.get_sampler()
        quantum = f", q={sampler.q}" if isinstance(sampler, Quantized) else ""
        inner = sampler.get_sampler() if isinstance(sampler, Quantized) else sampler
        kind = f"{type(value).__name__.lower()} {str(inner).lower()}"
        spread = f", mean={inner.mean}, sd={inner.sd}" if hasattr(inner, "sd") else ""
        return f"{kind}({value.lower}, {value.upper}{quantum}{spread})"
    if _is_grid(value):
        return f"grid_search([{', '.join(map(_show, value['grid_search']))}])"
    if isinstance(value, type) or callable(value):
        return str(getattr(value, "__qualname__", type(value).__name__))
    return repr(value)


def hash_code(code: Any) -> str:
    """A short digest of a function's byte code and constants, for telling two lambdas apart."""
    import hashlib

    text = (
        code.co_code
        + repr(code.co_names).encode()
        + repr([c for c in code.co_consts if not hasattr(c, "co_code")]).encode()
    )
    return "#" + hashlib.sha256(text).hexdigest()[:8]


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


@contextmanager
def _seeded_globals(seed: int) -> Iterator[None]:
    states = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
