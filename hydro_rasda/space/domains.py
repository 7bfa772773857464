"""Domains of a search space, with Ray Tune's names and distributions.

Importing Ray takes longer than a small search. So the functions here return domains of this module. If the process has
loaded Ray Tune, they return Ray Tune's own domains, which its `Tuner` accepts, too. Both draw the same values from the
same seed, and a space may mix them.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hydro_rasda.common.argument_checks import binds, check_function, is_number, require

__all__ = ["choice", "grid_search", "loguniform", "qloguniform", "quniform", "randint", "sample_from", "uniform"]

_RAYS = "ray.tune.search.sample"


class Domain:
    """The values that a hyperparameter can take, and their distribution."""

    def sample(self, config: Mapping[str, Any] | None = None, *, random_state: np.random.Generator) -> Any:
        """Draw a value."""
        raise NotImplementedError


class Float(Domain):
    """Floats from `lower` to below `upper`, with the distribution `law`; with `q`, multiples of `q` up to `upper`."""

    def __init__(self, lower: float, upper: float, law: str = "uniform", q: float | None = None) -> None:
        self.lower, self.upper, self.law, self.q = lower, upper, law, q

    def __repr__(self) -> str:
        law, more = (self.law, "") if self.q is None else (f"q{self.law}", f", {self.q}")
        return f"{law}({self.lower}, {self.upper}{more})"

    def sample(self, config: Mapping[str, Any] | None = None, *, random_state: np.random.Generator) -> float:
        lower, upper, q = self.lower, self.upper, self.q
        if q is not None:
            lower, upper = _multiple(lower, q, math.ceil), _multiple(upper, q, math.floor)
        # Draw an array of one value, as Ray Tune does, because NumPy may round a single value differently.
        if self.law == "loguniform":
            (value,) = np.exp(random_state.uniform(np.log(lower), np.log(upper), size=1))
        else:
            (value,) = random_state.uniform(lower, upper, size=1)
        return float(value if q is None else np.round(np.divide(value, q)) * q)


class Integer(Domain):
    """Integers from `lower` to below `upper`, all equally likely."""

    def __init__(self, lower: int, upper: int) -> None:
        self.lower, self.upper = lower, upper

    def __repr__(self) -> str:
        return f"randint({self.lower}, {self.upper})"

    def sample(self, config: Mapping[str, Any] | None = None, *, random_state: np.random.Generator) -> int:
        return int(random_state.integers(self.lower, self.upper, size=1)[0])


class Categorical(Domain):
    """A list of values, all equally likely."""

    def __init__(self, categories: Sequence[Any]) -> None:
        self.categories = list(categories)

    def __repr__(self) -> str:
        return f"choice({self.categories})"

    def sample(self, config: Mapping[str, Any] | None = None, *, random_state: np.random.Generator) -> Any:
        return self.categories[random_state.choice(np.arange(len(self.categories)), size=1)[0]]


class Function(Domain):
    """The value of a function, which is called with the configuration or without arguments."""

    def __init__(self, func: Callable[..., Any]) -> None:
        check_function("func", func, 0, 1, rule="a function of the configuration, or of nothing", or_class=True)
        self.func, self.pass_config = func, binds(inspect.signature(func), 1)

    def __repr__(self) -> str:
        return f"sample_from({self.func!r})"


def _multiple(bound: float, q: float, rounded: Callable[[float], int]) -> float:
    """Round a bound to a multiple of `q` by the function `rounded`; a bound close to a multiple becomes that one."""
    nearest = round(bound / q)
    return q * (nearest if math.isclose(bound / q, nearest) else rounded(bound / q))


def uniform(lower: float, upper: float) -> Domain:
    """Make a domain of floats from `lower` to below `upper`, all equally likely.

    Raises:
        ValueError: If a bound is not a finite number.
    """
    return _float("uniform", lower, upper)


def quniform(lower: float, upper: float, q: float) -> Domain:
    """Make a domain of floats from `lower` to `upper`, rounded to multiples of `q`.

    Raises:
        ValueError: If `q` is not a finite number above 0, or a bound is not a multiple of `q`.
    """
    check_quantum("q", q)
    return _float("uniform", lower, upper, q)


def loguniform(lower: float, upper: float) -> Domain:
    """Make a domain of floats from `lower` to below `upper`, whose logarithms are all equally likely.

    Raises:
        ValueError: If a bound is not a finite number above 0.
    """
    return _float("loguniform", lower, upper)


def qloguniform(lower: float, upper: float, q: float) -> Domain:
    """Make a domain of floats as `loguniform` does, rounded to multiples of `q`.

    Raises:
        ValueError: If `q` or a bound is not a finite number above 0, or a bound is not a multiple of `q`.
    """
    check_quantum("q", q)
    return _float("loguniform", lower, upper, q)


def randint(lower: int, upper: int) -> Domain:
    """Make a domain of integers from `lower` to below `upper`, all equally likely.

    Raises:
        ValueError: If a bound is not a whole number.
    """
    bounds = {"lower": plain(lower), "upper": plain(upper)}
    for name, bound in bounds.items():
        require(is_number(bound) and bound == int(bound), name, bound, "an integer")
    return _made(Integer(*map(int, bounds.values())))


def choice(categories: Sequence[Any]) -> Domain:
    """Make a domain of listed values, all equally likely. A value may contain domains, which are drawn, too.

    Raises:
        ValueError: If `categories` is not a list. Sets are refused because their order differs between processes.
    """
    listed = isinstance(categories, Iterable) and not isinstance(categories, str | bytes | Mapping | set | frozenset)
    require(listed, "categories", categories, "a list of values")
    return _made(Categorical(categories))


def sample_from(func: Callable[..., Any]) -> Domain:
    """Make a domain whose value is computed by a function of the configuration.

    The function reads other values as `config["lr"]` or `config.lr`. If it reads a value that is not drawn yet, it is
    called again later.

    Raises:
        ValueError: If `func` can be called neither with one argument nor without arguments.
    """
    return _made(Function(func))


def grid_search(values: Iterable[Any]) -> dict[str, Iterable[Any]]:
    """Try each of `values` with each sample of the other hyperparameters."""
    return {"grid_search": values}


def check_quantum(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a finite number above 0, of which values can be multiples."""
    quantum = plain(value)
    holds = is_number(quantum) and quantum > 0
    require(holds, name, value, "a finite number above 0, of which values are multiples")


def _float(law: str, lower: float, upper: float, q: float | None = None) -> Domain:
    least, rule = (0.0, "a finite number above 0") if law == "loguniform" else (-math.inf, "a finite number")
    for name, bound in (("lower", lower), ("upper", upper)):
        number = plain(bound)
        require(is_number(number) and number > least, name, bound, rule)
        require(q is None or math.isclose(bound / q, round(bound / q)), name, bound, f"a multiple of `q`, {q}")
    return _made(Float(lower, upper, law, q))


def _made(domain: Domain) -> Domain:
    """Return a domain; if Ray Tune is loaded, return Ray Tune's equal domain."""
    rays: Any = sys.modules.get(_RAYS)
    return domain if rays is None else _rays_own(domain, rays)


def _rays_own(domain: Any, rays: Any) -> Any:
    if isinstance(domain, Float):
        made = getattr(rays.Float(domain.lower, domain.upper), domain.law)()
        return made if domain.q is None else made.quantized(domain.q)
    if isinstance(domain, Integer):
        return rays.Integer(domain.lower, domain.upper).uniform()
    if isinstance(domain, Categorical):
        return rays.Categorical(domain.categories).uniform()
    return rays.Function(domain.func) if isinstance(domain, Function) else domain


def to_ray(space: Any) -> Any:
    """Convert all domains in a space, or in a value of it, to Ray Tune's, for its searchers and schedulers."""
    return _each(space, lambda value: _rays_own(value, importlib.import_module(_RAYS)))


def to_own(space: Any) -> Any:
    """Convert Ray Tune's domains in a space, or in a value of it, to this module's.

    A domain stays as it is if this module lacks its distribution. The result does not depend on whether Ray Tune was
    loaded when the space was made.
    """
    return _each(space, _own)


def _each(space: Any, convert: Callable[[Any], Any]) -> Any:
    """Apply `convert` to each value in a space; the values of a choice are converted before the choice."""
    if is_a(space, "Categorical"):
        space = copy.copy(space)
        space.categories = [_each(category, convert) for category in space.categories]
    if isinstance(space, Mapping):
        return {key: _each(value, convert) for key, value in space.items()}
    if type(space) in (list, tuple):
        return type(space)(_each(value, convert) for value in space)
    return convert(space)


def _own(value: Any) -> Any:
    if type(value).__module__ != _RAYS:  # no domain of Ray Tune's own classes
        return value
    if is_a(value, "Categorical"):
        return Categorical(value.categories)
    if is_a(value, "Function"):
        return Function(value.func)
    if is_a(value, "Float", "Integer"):
        law = law_of(value)
        if is_a(value, "Float") and law.name in ("uniform", "loguniform"):
            return Float(value.lower, value.upper, law.name, law.q)
        if is_a(value, "Integer") and law == Law("uniform"):
            return Integer(value.lower, value.upper)
    return value


def is_a(value: object, *kinds: str) -> bool:
    """Return whether a value is a domain of a kind: "Float", "Integer", "Categorical", "Function", or any "Domain".

    It does not import Ray Tune, because a value can be a Ray Tune domain only if Ray Tune is already loaded.
    """
    homes = [sys.modules[name] for name in (__name__, _RAYS) if name in sys.modules]
    return isinstance(value, tuple(getattr(home, kind) for home in homes for kind in kinds))


def is_grid(value: object) -> bool:
    """Return whether a value is a grid, as `grid_search` returns it."""
    return isinstance(value, Mapping) and set(value) == {"grid_search"}


def rounded(domain: Any, value: Any) -> Any:
    """Round a value as its domain does; if the domain does not round, keep the value below its upper bound."""
    if not is_a(domain, "Float", "Integer"):
        return value
    if (q := law_of(domain).q) is None:
        above = is_a(domain, "Float") and domain.upper is not None and is_number(value) and value >= domain.upper
        return math.nextafter(domain.upper, -math.inf) if above else value
    nearest = np.round(value / q) * q
    if None not in (domain.lower, domain.upper):
        nearest = min(max(nearest, _multiple(domain.lower, q, math.ceil)), _multiple(domain.upper, q, math.floor))
    return type(value)(nearest)


class Law(NamedTuple):
    """The distribution of a domain of numbers.

    Attributes:
        name: "uniform", "loguniform" or "normal".
        q: Values are rounded to multiples of `q`; None if they are not rounded.
        spread: Mean and standard deviation of a normal distribution; None for other distributions.
    """

    name: str
    q: float | None = None
    spread: tuple[float, float] | None = None


def law_of(domain: Any) -> Law:
    """Return the distribution of a "Float" or "Integer" domain."""
    if isinstance(domain, Domain):
        return Law(domain.law, domain.q) if isinstance(domain, Float) else Law("uniform")
    sampler, q = domain.get_sampler(), None
    if hasattr(sampler, "q"):
        sampler, q = sampler.get_sampler(), sampler.q
    return Law(str(sampler).lower(), q, (sampler.mean, sampler.sd) if hasattr(sampler, "sd") else None)


def plain(value: Any) -> Any:
    """Return a value with Python numbers and strings in place of NumPy's."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    return value
