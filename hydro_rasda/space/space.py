"""Check, sample and describe search spaces."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import CodeType
from typing import Any

import numpy as np

from fusion.argument_checks import meant
from fusion.keys import KEYS, check_settings, configs_of_parts, is_read, keys_of, read, split_key, warmup_epochs
from fusion.streams import preserved_generators, seed_generators
from hydro_rasda.common.argument_checks import in_order, require
from hydro_rasda.common.short_values import without_address
from hydro_rasda.schedulers import Range
from hydro_rasda.settings.config import MOST_TRIALS, UNSPLIT, check_unsplit
from hydro_rasda.space.branches import check_branches, is_branching, is_nested, leaves, reachable, variants
from hydro_rasda.space.domains import check_quantum, is_a, is_grid, law_of, plain

Config = dict[str, Any]

ALIASES: Mapping[str, str] = {
    "learning_rate": "lr",
    "opt": "optimizer",
    "optim": "optimizer",
    "wd": "weight_decay",
    "bs": "batch_size",
    "clip": "grad_clip",
    "gradient_clip_val": "grad_clip",
    "max_grad_norm": "grad_clip",
    "gradient_accumulation_steps": "accumulate",
    "lr_scheduler": "schedule",
    "lr_scheduler_type": "schedule",
    "scheduler": "schedule",
    "warmup_ratio": "warmup",
}
"""Map names of other libraries and scripts to the keys that this library reads."""


def check_value(name: str, value: object) -> None:
    """Raise ValueError for a value that cannot be copied (such as a lock), contains itself, or has a wrong grid."""
    grids: list[Any] = []
    try:
        grids += [leaf["grid_search"] for _, leaf in leaves({name: value}) if is_grid(leaf)]
        if all(map(_is_listed, grids)):  # a grid that is not a list may be endless, and is refused below
            _show(value)
            copy.deepcopy(value)
    except RecursionError:
        require(False, name, value, "a value that does not contain itself")
    except Exception as error:
        rule = f"a value that can be copied for each trial ({type(error).__name__}: {error})"
        require(False, name, _Shown(value), rule)
    for grid in grids:
        require(_is_listed(grid), name, grid, "a list of one value or more")


def check_space(space: object, num_samples: int = 1, strategy: str | None = "ddp") -> None:
    """Check a search space before anything is sampled from it.

    Args:
        space: Maps names to domains (of `hydro_rasda` or Ray Tune), `grid_search`, constants, or nested mappings.
        num_samples: Number of times that each point of the grid is tried.
        strategy: `RaceConfig.strategy`; "fsdp" restricts some keys. None if the user's own function trains all models,
            so that the library reads no key.

    Raises:
        ValueError: If `space` is not a mapping with string keys, has no domain, or has a value that cannot be copied.
            If a domain has reversed bounds, or a quantum that is not above 0. If a grid or a choice is not a list, or
            has too many points. If a key that the library reads can take a value that breaks its rule.
    """
    require(isinstance(space, Mapping), "space", space, "a mapping of names to domains")
    assert isinstance(space, Mapping)
    for name, value in space.items():
        if not isinstance(name, str):
            raise ValueError(f"`space` has the key {name!r}, but must be a mapping of names to domains")
        require(name != "", "space", space, "a mapping whose names have at least one letter")
        check_value(f"space[{name!r}]", value)
    check_branches(space)
    domains = [(name, value) for name, value in leaves(space) if _is_domain(value)]
    nameless = [name for name, _ in domains if not isinstance(name, str)]
    require(not nameless, "space", nameless, "one whose domains have names as keys, in nested mappings, too")
    searched = bool(domains) or any(is_a(value, "Categorical") for value in space.values())
    require(searched, "space", space, "one with a domain, such as loguniform(1e-4, 1), to search")
    for name, domain in domains:
        if is_a(domain, "Float", "Integer"):
            rule = "a domain whose lower bound is below its upper one"
            bounded = None not in (domain.lower, domain.upper)
            require(not bounded or domain.lower < domain.upper, f"space[{name!r}]", _Shown(domain), rule)
            if (q := law_of(domain).q) is not None:
                check_quantum(f"space[{name!r}].q", q)
        if is_a(domain, "Categorical"):
            require(len(domain.categories) > 0, f"space[{name!r}]", _Shown(domain), "a choice of one value or more")
    points = num_samples
    for grid in (value["grid_search"] for _, value in domains if is_grid(value)):
        points *= len(grid)
        rule = f"a space with at most {MOST_TRIALS} points in its grid, for each of `num_samples`"
        require(points <= MOST_TRIALS, "space", f"a grid of {points} trials", rule)
    for name, values in reachable(space).items() if strategy is not None else ():
        own, part = split_key(name)
        if own in KEYS and _can_be_read(own, space, part):
            key = KEYS[own]
            for value in values:
                extremes = _extremes(value)
                wrong = [extreme for extreme in extremes if not key.holds(extreme)]
                named = f"; {wrong[0]!r} is not" if wrong and len(extremes) > 1 else ""
                hint = meant(wrong[0], key.rule) if wrong else ""
                require(not wrong, f"space[{name!r}]", _Shown(value), f"{key.rule}{named}{hint}")
                for extreme in extremes if strategy == "fsdp" else ():
                    check_unsplit(f"space[{name!r}]", own, key.kind(extreme), _Shown(value))


def check_config(config: Mapping[str, Any], strategy: str | None = "ddp", argument: str = "space") -> None:
    """Check one configuration of the argument `argument`.

    Values that `sample_from` or a searcher returns can only be checked in configurations.
    """
    if strategy is None:
        return
    alias = next((key for key in config if ALIASES.get(key) == "lr"), None)
    if "lr" not in config:
        rename = f": rename {alias!r}" if alias else ""
        told = f"`{argument}` gives a configuration with the keys {sorted(config)}"
        raise ValueError(f"{told}, but it must be a space with the key 'lr', the learning rate{rename}")
    try:
        check_settings(config)
        for own in configs_of_parts(config).values() if strategy == "fsdp" else ():
            for key in UNSPLIT:
                check_unsplit(key, key, read(own, key))
    except ValueError as error:
        raise ValueError(f"`{argument}` gives a configuration in which {error}") from None


def sample(space: Mapping[str, Any], num_samples: int, seed: int) -> list[Config]:
    """Sample configurations, reproducibly.

    As in Ray Tune, a space with `grid_search` yields its whole grid `num_samples` times.

    Args:
        seed: Seeds the domains and, for `sample_from`, the global generators of Python, NumPy and torch.

    Returns:
        The configurations, in the order of sampling, with Python numbers in place of NumPy's.
    """
    rng = np.random.default_rng(seed)
    with preserved_generators():
        seed_generators(seed)
        try:
            return [plain(config) for _ in range(num_samples) for config in variants(dict(space), rng)]
        except Exception as error:
            raise ValueError(f"`space` cannot be sampled: {error}") from error


def describe(space: Mapping[str, Any]) -> dict[str, Any]:
    """Return the space as JSON values that are equal for equal spaces; a run keeps them to recognize its space."""
    found: dict[str, Any] = {}
    for key, value in space.items():
        if is_branching(value):
            found[key] = [describe(branch) for branch in value.categories]
        else:
            found[key] = describe(value) if is_nested(value) else _show(value)
    return found


def tuned(space: Mapping[str, Any]) -> list[str]:
    """Return the names of the hyperparameters that a space tunes: those with a domain, not a constant."""
    return [*dict.fromkeys(key for key, value in leaves(space) if _is_domain(value))]


def derived(value: Any) -> bool:
    """Return whether `sample_from` occurs in a value of a space."""
    if isinstance(value, Mapping):
        return any(map(derived, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(derived, value))
    return is_a(value, "Function") or (is_a(value, "Categorical") and derived(value.categories))


def longest_warmup(space: Mapping[str, Any], configs: Iterable[Mapping[str, Any]], epochs: int) -> float:
    """Return the longest warm-up, in epochs, that a space allows or that one of its configurations `configs` has.

    `epochs` is the length of a training, of which the key `warmup` is a share.
    """
    bounds = [*reached("warmup_epochs", space), *(epochs * share for share in reached("warmup", space))]
    return max([0.0, *map(float, bounds), *(warmup_epochs(config, epochs) for config in configs)])


def has_shares(space: Mapping[str, Any], configs: Iterable[Mapping[str, Any]]) -> bool:
    """Tell whether a schedule depends on shares of the training (such as `warmup`), in the space or in `configs`."""
    found, names = reachable(space), ("decay_start", "floor", "warmup")
    if any(name in found and _can_be_read(name, space) for name in names) or "wsd" in reached("schedule", space):
        return True
    return any(read(c, "schedule") == "wsd" or any(n in c and is_read(n, c) for n in names) for c in configs)


def schedules(space: Mapping[str, Any], configs: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Return the values that `schedule` can have in a space, and those that it has in its configurations `configs`."""
    return [*reached("schedule", space), *(config["schedule"] for config in configs if "schedule" in config)]


def explored(space: Mapping[str, Any], reads: bool = True) -> dict[str, Range | tuple[float, ...]]:
    """Return the hyperparameters that population based training changes: floats at the top level of a space.

    Args:
        reads: True if the library reads keys. Then keys of schedules are left out. If a function makes an optimizer,
            the optimizer's keys except `lr` are left out, too. False leaves out no key.
    """
    found: dict[str, Range | tuple[float, ...]] = {}
    for name, values in reachable(space).items():
        key, part = split_key(name)
        readers = {"training loop", "optimizer"} if _has_named_optimizer(space, part) else {"training loop"}
        if reads and key != "lr" and key in KEYS and KEYS[key].reader not in readers:
            continue
        ranges = [_range(value) for value in values]
        (one, *others) = ranges
        if one is not None and all(other == one for other in others):
            found[name] = one
    rule = "one with a float that population based training can change, such as lr=loguniform(1e-4, 1)"
    require(bool(found), "space", space, rule)
    return found


def _has_named_optimizer(space: Mapping[str, Any], part: str) -> bool:
    """Return whether the optimizer of a model part is always a name, never a function; "" is the whole model."""
    names = [name for name in keys_of("optimizer", part) if name in reachable(space)]
    optimizers = reached(names[0], space) if names else []
    return not names or (bool(optimizers) and all(isinstance(of, str) for of in optimizers))


def _range(domain: Any) -> Range | tuple[float, ...] | None:
    """Return the range or the list of a domain of finite floats; None for other domains, and for rounded floats."""
    if is_a(domain, "Categorical"):
        floats = [plain(value) for value in domain.categories]
        finite = all(isinstance(value, float) and math.isfinite(value) for value in floats)
        return tuple(sorted(floats)) if finite else None
    if not is_a(domain, "Float") or None in (domain.lower, domain.upper):
        return None
    law, (low, high) = law_of(domain), _extremes(domain)
    if law.q is not None or law.name not in ("uniform", "loguniform"):
        return None
    return Range(float(low), float(high), law.name == "loguniform")


def _is_listed(grid: object) -> bool:
    return isinstance(grid, Sequence) and not isinstance(grid, str | bytes) and len(grid) > 0


def _is_domain(value: object) -> bool:
    return is_a(value, "Domain") or is_grid(value)


def _can_be_read(name: str, space: Mapping[str, Any], part: str = "") -> bool:
    """Return whether the library may read a key in some configuration. True may be wrong, as nothing is sampled."""
    key = KEYS[name]
    if key.under is None:
        return True
    bounds = [*filter(None, (reached(under, space) for under in keys_of(key.under, part))), [KEYS[key.under].default]]
    return any(value in tuple(key.defaults) for value in bounds[0])


def reached(name: str, space: Mapping[str, Any]) -> list[Any]:
    """Return the extreme values of a key: both ends of a range, and each value of a choice or a grid.

    The list is empty if no configuration has the key, or if only sampling can tell its values.
    """
    return [extreme for value in reachable(space).get(name, ()) for extreme in _extremes(value)]


def _extremes(value: Any) -> Sequence[Any]:
    """Return the extreme values of a leaf of the space; an empty list if only sampling can tell."""
    if is_a(value, "Categorical"):
        return [extreme for category in value.categories for extreme in _extremes(category)]
    if is_a(value, "Float", "Integer"):
        lower = -math.inf if value.lower is None else value.lower
        upper = math.inf if value.upper is None else value.upper
        # Upper bounds are exclusive, unless values are rounded to a multiple of q.
        if law_of(value).q is not None:
            return (lower, upper)
        return (lower, math.nextafter(upper, lower) if is_a(value, "Float") else upper - 1)
    if is_grid(value):
        return [plain(item) for item in value["grid_search"]]
    return () if is_a(value, "Domain") else (plain(value),)  # a function, or a domain of a class of the user's


class _Shown:
    """A value of a space that a message shows by `_show`."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __repr__(self) -> str:
        return _show(self._value)


def _show(value: Any) -> str:
    """Return one line for a domain or constant, such as `float loguniform(0.0001, 1)`, without memory addresses."""
    if is_a(value, "Function"):
        return f"sample_from({_show(value.func)})"
    if is_a(value, "Categorical"):
        return f"choice([{', '.join(map(_show, value.categories))}])"
    if is_a(value, "Float", "Integer"):
        law = law_of(value)
        quantum = "" if law.q is None else f", q={law.q}"
        spread = "" if law.spread is None else ", mean={}, sd={}".format(*law.spread)
        kind = "float" if is_a(value, "Float") else "integer"
        return f"{kind} {law.name}({value.lower}, {value.upper}{quantum}{spread})"
    if is_grid(value):
        return f"grid_search([{', '.join(map(_show, value['grid_search']))}])"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_show(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_show, value)) + "]"
    if isinstance(value, (set, frozenset)):
        return in_order(value, _show)
    if isinstance(value, partial):
        return f"partial({_show(value.func)}, {_show(value.args)}, {_show(value.keywords)})"
    if isinstance(value, type) or callable(value):
        code = getattr(value, "__code__", None)
        return getattr(value, "__qualname__", type(value).__name__) + (f"#{_digest(code)}" if code else "")
    return without_address(plain(value))


def _digest(code: CodeType) -> str:
    """Return a short digest that distinguishes functions of the same name; it is equal in every process."""
    return hashlib.sha256(repr(_outline(code)).encode()).hexdigest()[:8]


def _outline(constant: Any) -> Any:
    """Return a function's constant in a form that is equal in every process, with the byte code of inner functions.

    Sets are sorted, because their order differs between processes.
    """
    if isinstance(constant, CodeType):
        return (constant.co_code, constant.co_names, tuple(map(_outline, constant.co_consts)))
    return sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant
