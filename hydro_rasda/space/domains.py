"""Domains of a search space, by Ray Tune's names and with Ray Tune's laws.

Ray takes longer to import than a small search takes. So the functions here make domains of this module, unless the
process has loaded Ray Tune: then they make Ray Tune's own, which its `Tuner` takes, too. Both give the same values for
the same seed, and a space may mix them.
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
    """The values that a hyperparameter can take, and the law by which they are drawn."""

    def sample(self, config: Mapping[str, Any] | None = None, *, random_state: np.random.Generator) -> Any:
        """Draw a value."""
        raise NotImplementedError


class Float(Domain):
    """Floats from `lower` to below `upper`; with a quantum `q`, multiples of it up to `upper`."""

    def __init__(self, lower: float, upper: float, law: str = "uniform", q: float | None = None) -> None:
        self.lower, self.upper, self.law, self.q = lower, upper, law, q

    def __repr__(self) -> str:
        law, more = (self.law, "") if self.q is None else (f"q{self.law}", f", {self.q}")
        return f"{law}({self.lower}, {self.upper}{more})"

    def sample(self, config: Mapping[str, Any] | None = None, *, random_state: np.random.Generator) -> float:
        lower, upper, q = self.lower, self.upper, self.q
        if q is not None:
            lower, upper = _multiple(lower, q, math.ceil), _multiple(upper, q, math.floor)
        # Ray Tune draws arrays of one value. NumPy may round those otherwise than single values.
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
    """Draw the value of a function of the configuration, or of nothing."""

    def __init__(self, func: Callable[..., Any]) -> None:
        check_function("func", func, 0, 1, rule="a function of the configuration, or of nothing", or_class=True)
        self.func, self.pass_config = func, binds(inspect.signature(func), 1)

    def __repr__(self) -> str:
        return f"sample_from({self.func!r})"


def _multiple(bound: float, q: float, rounded: Callable[[float], int]) -> float:
    """The last multiple of `q` within a bound."""
    nearest = round(bound / q)
    return q * (nearest if math.isclose(bound / q, nearest) else rounded(bound / q))


def uniform(lower: float, upper: float) -> Domain:
    """Floats from `lower` to below `upper`, all equally likely.

    Raises:
        ValueError: if a bound is no finite number.
    """
    return _float("uniform", lower, upper)


def quniform(lower: float, upper: float, q: float) -> Domain:
    """Floats from `lower` to `upper`, rounded to multiples of `q`.

    Raises:
        ValueError: if `q` is no finite number above 0, or a bound is no multiple of it.
    """
    check_quantum("q", q)
    return _float("uniform", lower, upper, q)


def loguniform(lower: float, upper: float) -> Domain:
    """Floats from `lower` to below `upper`, whose logarithms are all equally likely.

    Raises:
        ValueError: if a bound is no finite number above 0.
    """
    return _float("loguniform", lower, upper)


def qloguniform(lower: float, upper: float, q: float) -> Domain:
    """As `loguniform`, rounded to multiples of `q`.

    Raises:
        ValueError: if `q` or a bound is no finite number above 0, or a bound is no multiple of `q`.
    """
    check_quantum("q", q)
    return _float("loguniform", lower, upper, q)


def randint(lower: int, upper: int) -> Domain:
    """Integers from `lower` to below `upper`, all equally likely.

    Raises:
        ValueError: if a bound is no whole number.
    """
    bounds = {"lower": plain(lower), "upper": plain(upper)}
    for name, bound in bounds.items():
        require(is_number(bound) and bound == int(bound), name, bound, "an integer")
    return _made(Integer(*map(int, bounds.values())))


def choice(categories: Sequence[Any]) -> Domain:
    """One of some values, all equally likely. A value may hold domains, which are drawn, too.

    Raises:
        ValueError: if it is no list, or a text, a mapping or a set, whose order is another in each process.
    """
    listed = isinstance(categories, Iterable) and not isinstance(categories, str | bytes | Mapping | set | frozenset)
    require(listed, "categories", categories, "a list of values")
    return _made(Categorical(categories))


def sample_from(func: Callable[..., Any]) -> Domain:
    """Value of a function. It is given the configuration so far, as `config["lr"]` or `config.lr`.

    A value that is drawn later is waited for where the function asks for it.

    Raises:
        ValueError: if `func` cannot be called with one argument, nor without any.
    """
    return _made(Function(func))


def grid_search(values: Iterable[Any]) -> dict[str, Iterable[Any]]:
    """Each of some values in turn, with each sample of the other hyperparameters."""
    return {"grid_search": values}


def check_quantum(name: str, value: object) -> None:
    """Refuse what values cannot be multiples of."""
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
    """A domain, or where Ray Tune is loaded its own in the domain's place."""
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
    """A space, or a value of one, with all domains Ray Tune's own, as its searchers and schedulers want them."""
    return _each(space, lambda value: _rays_own(value, importlib.import_module(_RAYS)))


def to_own(space: Any) -> Any:
    """A space, or a value of one, with this module's domains in place of Ray Tune's, except for laws that it lacks.

    The result does not tell whether Ray Tune was loaded when the space was made.
    """
    return _each(space, _own)


def _each(space: Any, convert: Callable[[Any], Any]) -> Any:
    """A space, or a value of one, with all values in it converted, those of a choice before the choice."""
    if is_a(space, "Categorical"):
        space = copy.copy(space)
        space.categories = [_each(category, convert) for category in space.categories]
    if isinstance(space, Mapping):
        return {key: _each(value, convert) for key, value in space.items()}
    if type(space) in (list, tuple):
        return type(space)(_each(value, convert) for value in space)
    return convert(space)


def _own(value: Any) -> Any:
    if type(value).__module__ != _RAYS:  # such as a class that is derived of a domain's
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

    A user with a domain of Ray Tune's has loaded Ray Tune, so that it need not be loaded to find out.
    """
    homes = [sys.modules[name] for name in (__name__, _RAYS) if name in sys.modules]
    return isinstance(value, tuple(getattr(home, kind) for home in homes for kind in kinds))


def is_grid(value: object) -> bool:
    """Return whether a value is what `grid_search` returns."""
    return isinstance(value, Mapping) and set(value) == {"grid_search"}


def rounded(domain: Any, value: Any) -> Any:
    """A value of a domain as its law rounds it; without rounding, one below its upper bound."""
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
    """How a domain of numbers draws them.

    Attributes:
        name: "uniform", "loguniform" or "normal".
        q: Values are rounded to multiples of it; None if they are not rounded.
        spread: Mean and standard deviation of a normal law; None of others.
    """

    name: str
    q: float | None = None
    spread: tuple[float, float] | None = None


def law_of(domain: Any) -> Law:
    """The law of a "Float" or an "Integer"."""
    if isinstance(domain, Domain):
        return Law(domain.law, domain.q) if isinstance(domain, Float) else Law("uniform")
    sampler, q = domain.get_sampler(), None
    if hasattr(sampler, "q"):
        sampler, q = sampler.get_sampler(), sampler.q
    return Law(str(sampler).lower(), q, (sampler.mean, sampler.sd) if hasattr(sampler, "sd") else None)


def plain(value: Any) -> Any:
    """A value with Python's own numbers and strings in place of NumPy's."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    return value
