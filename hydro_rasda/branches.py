"""Branches of a search space: a `choice` between mappings, of which the chosen one joins the configuration.

`{"model": choice([{"optimizer": "sgd", "momentum": uniform(0.5, 0.99)}, {"optimizer": "adamw"}])}` gives configurations
with the keys `optimizer` and, under SGD alone, `momentum`. The key `model` names the choice and is in none of them.
Branches may hold branches.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydro_rasda.checks import require
from hydro_rasda.domains import Categorical, is_a, is_grid
from hydro_rasda.secret_masking import secrets_of

Space = Mapping[str, Any]


def is_branching(value: object) -> bool:
    """Return whether a value of a space is a choice between mappings."""
    if not is_a(value, "Categorical") or getattr(value, "is_grid", bool)():
        return False
    alternatives: Sequence[Any] = value.categories  # type: ignore[attr-defined]
    named = all(isinstance(each, Mapping) and all(isinstance(key, str) for key in each) for each in alternatives)
    return len(alternatives) > 0 and named and not any(map(is_grid, alternatives))


def reachable(space: Space) -> dict[str, list[Any]]:
    """Return the values under each key that a configuration can have, in one branch or another."""
    found: dict[str, list[Any]] = {}
    for key, value in space.items():
        inner = [reachable(each) for each in value.categories] if is_branching(value) else [{key: [value]}]
        for branch in inner:
            for name, values in branch.items():
                found.setdefault(name, []).extend(values)
    return found


def check_branches(space: Space, where: str = "space") -> None:
    """Refuse a space that could give one key of a configuration two values (ValueError)."""
    own = {key for key, value in space.items() if not is_branching(value)}
    for key, value in space.items():
        if is_branching(value):
            for i, alternative in enumerate(value.categories):
                of = f"{where}[{key!r}][{i}]"
                if secrets := sorted("/".join(place) for place in secrets_of(alternative)):
                    raise ValueError(f"`space` has the secret {secrets[0]} in a branch, but must have it elsewhere")
                check_branches(alternative, of)
                twice = sorted(own & reachable(alternative).keys())
                require(not twice, of, sorted(alternative), f"without {', '.join(twice)}, which `space` has elsewhere")
            own |= reachable({key: value}).keys()
        elif isinstance(value, Mapping) and not is_grid(value):
            check_branches(value, f"{where}[{key!r}]")


def restricted(space: Space, config: Mapping[str, Any]) -> dict[str, Any]:
    """A space with the values of a configuration, or a part of one, and no branches that contradict it."""
    found: dict[str, Any] = {}
    for key, value in space.items():
        if not is_branching(value):
            found[key] = copy.deepcopy(config[key]) if key in config else value
            continue
        names = reachable({key: value}).keys() & config.keys()
        own = {name: config[name] for name in names}
        fitting = [each for each in value.categories if names <= reachable(each).keys() and _agrees(each, own)]
        require(bool(fitting), key, own, "values of one branch of `space`")
        found[key] = Categorical([restricted(each, own) for each in fitting])
    return found


def _agrees(alternative: Space, config: Mapping[str, Any]) -> bool:
    """Return whether the constants of a branch are those of a configuration."""
    for name, value in alternative.items():
        if is_branching(value):
            if not any(_agrees(each, config) for each in value.categories):
                return False
        elif name in config and not (is_a(value, "Domain") or is_grid(value)) and value != config[name]:
            return False
    return True


def with_defaults(space: Space, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A space with constants for keys that it, or one of its branches, leaves out."""
    found = {key: value for key, value in defaults.items() if key not in reachable(space)}
    for key, value in space.items():
        if is_branching(value):
            left = {name: defaults[name] for name in defaults.keys() & reachable({key: value}).keys()}
            value = Categorical([with_defaults(each, left) for each in value.categories])
        found[key] = value
    return found


def indexed(space: Space) -> dict[str, Any]:
    """A space for searchers, which know no branches: the index of a branch, and the domains of all branches.

    A searcher is told values for all branches, also for those that were not chosen (see `chosen`).
    """
    found: dict[str, Any] = {}
    for key, value in space.items():
        if is_branching(value):
            found[key] = Categorical(range(len(value.categories)))
            found |= {f"{key}@{i}": indexed(each) for i, each in enumerate(value.categories)}
        else:
            found[key] = indexed(value) if isinstance(value, Mapping) and not is_grid(value) else value
    return found


def chosen(space: Space, config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration that a point of an `indexed` space stands for."""
    found: dict[str, Any] = {}
    for key, value in space.items():
        if is_branching(value):
            found |= chosen(value.categories[config[key]], config[f"{key}@{config[key]}"])
        elif isinstance(value, Mapping) and not is_grid(value):
            found[key] = chosen(value, config[key])
        else:
            found[key] = config[key]
    return found


def merge(container: dict[str, Any], key: str) -> None:
    """Put the items of the branch that was drawn under a key in the key's place."""
    items = list(container.items())
    container.clear()
    for name, value in items:
        container.update(value if name == key else {name: value})


def leaves(space: Space) -> Iterator[tuple[str, Any]]:
    """Every value that is no mapping, of branches and lists, too, with its name."""
    for key, value in space.items():
        if is_branching(value):
            for each in value.categories:
                yield from leaves(each)
        elif isinstance(value, Mapping) and not is_grid(value):
            yield from leaves(value)
        elif isinstance(value, (list, tuple)):
            yield from leaves({f"{key}/{i}": item for i, item in enumerate(value)})
        else:
            yield key, value
