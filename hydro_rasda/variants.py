"""The configurations of a space, drawn one after another, as Ray Tune's `generate_variants` draws them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hydro_rasda.branches import is_branching, merge
from hydro_rasda.domains import is_a, is_grid

Path = tuple[str | int, ...]
"""Keys that lead to a value of a space, indices of lists among them."""

_PASSES = 20
"""Times that functions which wait for other values are tried again."""


class Unresolved(Exception):
    """A function asks for a value that is not drawn yet."""


def variants(space: dict[str, Any], rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    """Yield a configuration for each point of the grid, one where there is no grid.

    A value that is drawn may hold domains: they are drawn next. Branches are drawn first (see `hydro_rasda.branches`).
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
    # The first in the order of names varies fastest.
    for point in itertools.product(*(values for _, values in reversed(grids))):
        config = copy.deepcopy(space)
        for (path, _), value in zip(grids, reversed(point), strict=True):
            _put(config, path, value)
        _draw(config, domains, rng)
        yield from variants(config, rng)


def _open(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The domains that are still to be drawn, with their places."""
    if is_a(value, "Domain") or (isinstance(value, dict) and is_grid(value)):
        yield path, value
    elif isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _open(item, (*path, key))


def _points(value: Any) -> Sequence[Any] | None:
    """The points of a grid; None of what is none."""
    if is_grid(value):
        return list(value["grid_search"])
    # Ray Tune's `Categorical(...).grid()`.
    points: Sequence[Any] | None = value.categories if getattr(value, "is_grid", bool)() else None
    return points


def _put(container: Any, path: Path, value: Any) -> Any:
    """Put a value where a path leads, and return what holds it: anew where it is a tuple."""
    if not path:
        return value
    key: Any = path[0]
    inner = _put(container[key], path[1:], value)
    if isinstance(container, tuple):
        return (*container[:key], inner, *container[key + 1 :])
    container[key] = inner
    return container


def _draw(config: dict[str, Any], domains: Sequence[tuple[Path, Any]], rng: np.random.Generator) -> None:
    """Draw from domains and put the values in their places; functions may wait for values of others."""
    error: Unresolved | None = None
    for _ in range(_PASSES):
        waiting, error = list[tuple[Path, Any]](), None
        for path, domain in domains:
            try:
                value = _value(domain, config, rng)
            except Unresolved as unresolved:
                waiting.append((path, domain))
                error = unresolved
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
        try:  # as functions were written for Ray Tune before: `spec.config.lr`
            return domain.func(_Config(config=config))
        except Unresolved:
            raise
        except Exception:
            raise error from None


class _Config(dict[str, Any]):
    """A configuration whose values are attributes, too: of one that is still to be drawn, an error."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        value = self[name]
        if is_a(value, "Domain") or is_grid(value):
            raise Unresolved(f"{name!r} depends on itself")
        return _Config(value) if isinstance(value, dict) else value
