"""Branches of a search space, and sampling of configurations as by Ray Tune's `generate_variants`.

A `choice` between mappings is a branching, and each mapping is a branch. The items of the chosen branch become part of
the configuration. `{"model": choice([{"optimizer": "sgd", "momentum": uniform(0.5, 0.99)}, {"optimizer": "adamw"}])}`
gives configurations with the key `optimizer` and, only for SGD, `momentum`. The key `model` names the choice, and no
configuration has it. Branches may contain branches.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hydro_rasda.common.argument_checks import is_int, is_number, require
from hydro_rasda.common.secret_masking import Secret, holds_secret
from hydro_rasda.space.domains import Categorical, is_a, is_grid

Space = Mapping[str, Any]


def is_branching(value: object) -> bool:
    """Return whether a value of a space is a choice between mappings."""
    if not is_a(value, "Categorical") or getattr(value, "is_grid", bool)():
        return False
    alternatives: Sequence[Any] = value.categories  # type: ignore[attr-defined]
    named = all(isinstance(each, Mapping) and all(isinstance(key, str) for key in each) for each in alternatives)
    return len(alternatives) > 0 and named and not any(map(is_grid, alternatives))


def reachable(space: Space) -> dict[str, list[Any]]:
    """Map each key that a configuration can have, in any branch, to its values in the space."""
    found: dict[str, list[Any]] = {}
    for key, value in space.items():
        inner = [reachable(each) for each in value.categories] if is_branching(value) else [{key: [value]}]
        for branch in inner:
            for name, values in branch.items():
                found.setdefault(name, []).extend(values)
    return found


def check_branches(space: Space, where: str = "space") -> None:
    """Raise ValueError if a configuration could get two values for one key, or if a list or choice has a secret."""
    own = {key for key, value in space.items() if not is_branching(value)}
    for key, value in space.items():
        if holds_secret(value) and not (isinstance(value, Secret) or is_nested(value)):
            raise ValueError(f"`{where}[{key!r}]` has a secret in a list or a choice, but must have it as a constant")
        if is_branching(value):
            for i, alternative in enumerate(value.categories):
                of = f"{where}[{key!r}][{i}]"
                check_branches(alternative, of)
                twice = sorted(own & reachable(alternative).keys())
                require(not twice, of, sorted(alternative), f"without {', '.join(twice)}, which `space` has elsewhere")
            own |= reachable({key: value}).keys()
        elif is_nested(value):
            check_branches(value, f"{where}[{key!r}]")


def restricted(space: Space, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a space with the values of a full or partial configuration, without branches that contradict them."""
    found: dict[str, Any] = {}
    for key, value in space.items():
        if not is_branching(value):
            found[key] = _restricted_value(value, config[key]) if key in config else value
            continue
        names = reachable({key: value}).keys() & config.keys()
        own = {name: config[name] for name in names}
        fitting = [each for each in value.categories if names <= reachable(each).keys() and _agrees(each, own)]
        require(bool(fitting), key, own, "values of one branch of `space`")
        # Among these branches, keep those that can draw the values. If none can, keep all, because any may be meant.
        fitting = [each for each in fitting if _draws(each, own)] or fitting
        found[key] = Categorical([restricted(each, own) for each in fitting])
    return found


def _restricted_value(value: Any, given: Any) -> Any:
    if is_nested(value) and isinstance(given, Mapping):
        return restricted(value, given)
    return float(given) if is_int(given) and _is_of_floats(value) else copy.deepcopy(given)


def _is_of_floats(value: Any) -> bool:
    """Return whether a value of a space draws only floats. An integer that is given for it then means a float."""
    if is_a(value, "Categorical"):
        return all(isinstance(each, float) for each in value.categories)
    return is_a(value, "Float")


def is_nested(value: object) -> bool:
    """Return whether a value of a space is a mapping of names to values."""
    return isinstance(value, Mapping) and not is_grid(value)


def unknown_keys(config: Mapping[str, Any], space: Space) -> list[str]:
    """Return the names in a full or partial configuration that a space lacks; `a/b` is the name `b` in `a`."""
    known, found = reachable(space), list[str]()
    for name, value in config.items():
        if name not in known:
            found.append(str(name))
        elif isinstance(value, Mapping) and all(map(is_nested, known[name])):
            inner = min((unknown_keys(value, each) for each in known[name]), key=len)
            found += [f"{name}/{each}" for each in inner]
    return sorted(found)


def _draws(alternative: Space, config: Mapping[str, Any]) -> bool:
    """Return whether the branch `alternative` can draw all values of a configuration, full or partial."""
    values = reachable(alternative)
    return all(any(_can_be(each, value) for each in values[name]) for name, value in config.items())


def _can_be(drawn: Any, value: Any) -> bool:
    if is_a(drawn, "Categorical"):
        return any(_can_be(each, value) for each in drawn.categories)
    if is_a(drawn, "Float", "Integer"):
        least, most = (-math.inf if drawn.lower is None else drawn.lower), drawn.upper
        return is_number(value) and least <= value <= (math.inf if most is None else most)
    if is_grid(drawn):
        return any(_can_be(each, value) for each in drawn["grid_search"])
    return is_a(drawn, "Function") or is_nested(drawn) or _equal(drawn, value)


def _equal(one: Any, other: Any) -> bool:
    equal = one == other
    return bool(equal.all() if hasattr(equal, "all") else equal)


def _agrees(alternative: Space, config: Mapping[str, Any]) -> bool:
    """Return whether a configuration does not contradict the constants of the branch `alternative`."""
    for name, value in alternative.items():
        if is_branching(value):
            if not any(_agrees(each, config) for each in value.categories):
                return False
        elif isinstance(value, Mapping) or is_a(value, "Domain"):
            continue
        elif name in config and not _equal(value, config[name]):
            return False
    return True


def with_defaults(space: Space, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a space with constants from `defaults` for keys that the space, or one of its branches, lacks."""
    found = {key: value for key, value in defaults.items() if key not in reachable(space)}
    for key, value in space.items():
        if is_branching(value):
            left = {name: defaults[name] for name in defaults.keys() & reachable({key: value}).keys()}
            value = Categorical([with_defaults(each, left) for each in value.categories])
        found[key] = value
    return found


def indexed(space: Space) -> dict[str, Any]:
    """Return a space without branches, for searchers.

    In place of a branching, the returned space has a domain for the index of the chosen branch, and the domains of all
    branches. So a searcher also draws values for branches that are not chosen; `chosen` leaves them out.
    """
    found: dict[str, Any] = {}
    for key, value in space.items():
        if is_branching(value):
            found[key] = Categorical(range(len(value.categories)))
            found |= {f"{key}@{i}": indexed(each) for i, each in enumerate(value.categories)}
        else:
            found[key] = indexed(value) if is_nested(value) else value
    return found


def chosen(space: Space, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration that a point of an `indexed` space represents."""
    found: dict[str, Any] = {}
    for key, value in space.items():
        if is_branching(value):
            found |= chosen(value.categories[config[key]], config[f"{key}@{config[key]}"])
        elif is_nested(value):
            found[key] = chosen(value, config[key])
        else:
            found[key] = config[key]
    return found


def merge(container: dict[str, Any], key: str) -> None:
    """Replace a key by the items of the branch that was drawn for it."""
    items = list(container.items())
    container.clear()
    for name, value in items:
        container.update(value if name == key else {name: value})


def leaves(space: Space) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each leaf of a space, also in branches, nested mappings and lists."""
    for key, value in space.items():
        if is_branching(value):
            for each in value.categories:
                yield from leaves(each)
        elif is_nested(value):
            yield from leaves(value)
        elif isinstance(value, (list, tuple)):
            yield from leaves({f"{key}/{i}": item for i, item in enumerate(value)})
        else:
            yield key, value


Path = tuple[str | int, ...]
"""Keys, and indices of lists, that lead to a value of a space."""

_PASSES = 20
"""A function that needs values not yet drawn is tried at most this number of times."""


class Unresolved(Exception):
    """A function needs a value that is not drawn yet."""


def variants(space: dict[str, Any], rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    """Yield a configuration for each point of the grid; a single one if there is no grid.

    Branches are drawn first. If a drawn value contains domains, they are drawn next.
    """
    space = copy.deepcopy(space)
    found = [*_open(space)]
    if not found:
        yield space
        return
    if branching := [(path, value) for path, value in found if isinstance(path[-1], str) and is_branching(value)]:
        _draw(space, branching, rng)
        for path, _ in branching:
            *above, key = path
            container: Any = space
            for name in above:
                container = container[name]
            merge(container, str(key))
        yield from variants(space, rng)
        return
    grids = sorted(((path, _points(value)) for path, value in found if _points(value) is not None), key=lambda g: g[0])
    domains = [(path, value) for path, value in found if _points(value) is None]
    # The product takes the grids in reverse, so that the grid whose name comes first varies fastest.
    for point in itertools.product(*(values for _, values in reversed(grids))):
        config = copy.deepcopy(space)
        for (path, _), value in zip(grids, reversed(point), strict=True):
            _put(config, path, value)
        _draw(config, domains, rng)
        yield from variants(config, rng)


def _open(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the paths and domains that are still to be drawn."""
    if is_a(value, "Domain") or (isinstance(value, dict) and is_grid(value)):
        yield path, value
    elif isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _open(item, (*path, key))


def _points(value: Any) -> Sequence[Any] | None:
    """Return the points of a grid; None if the value is not a grid."""
    if is_grid(value):
        return list(value["grid_search"])
    # Ray Tune also makes a grid by `Categorical(...).grid()`.
    points: Sequence[Any] | None = value.categories if getattr(value, "is_grid", bool)() else None
    return points


def _put(container: Any, path: Path, value: Any) -> Any:
    """Put a value at a path, and return the container. Tuples on the path are replaced by new ones."""
    if not path:
        return value
    key: Any = path[0]
    inner = _put(container[key], path[1:], value)
    if isinstance(container, tuple):
        return (*container[:key], inner, *container[key + 1 :])
    container[key] = inner
    return container


def _draw(config: dict[str, Any], domains: Sequence[tuple[Path, Any]], rng: np.random.Generator) -> None:
    """Draw from domains and put the values at their paths; functions are tried again until their inputs are drawn."""
    error: Unresolved | None = None
    for _ in range(_PASSES):
        waiting, error = list[tuple[Path, Any]](), None
        for path, domain in domains:
            try:
                value = _value(domain, config, rng)
            except Unresolved as unresolved:
                waiting.append((path, domain))
                error = unresolved
            except Exception as raised:
                key = ".".join(map(str, path))
                raise ValueError(f"{key!r} raises {type(raised).__name__}: {raised}") from raised
            else:
                _put(config, path, value)
        if error is None:
            return
        domains = waiting
    assert error is not None
    raise error


def _value(domain: Any, config: dict[str, Any], rng: np.random.Generator) -> Any:
    if not is_a(domain, "Function"):
        return domain.sample(config, random_state=rng)
    if not domain.pass_config:
        return domain.func()
    try:
        return domain.func(_Config(config))
    except (AttributeError, KeyError) as error:
        try:  # older functions for Ray Tune read `spec.config.lr`
            return domain.func(_Config(config=config))
        except Unresolved:
            raise
        except Exception:
            raise error from None


class _Config(dict[str, Any]):
    """A configuration whose values are also attributes; reading a value that is not drawn yet raises Unresolved."""

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if (is_grid(value) or not isinstance(value, dict)) and any(_open(value)):
            raise Unresolved(f"{name!r} depends on itself")
        return _Config(value) if isinstance(value, dict) else value

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"the configuration has no {name!r}")
        return self[name]

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default
