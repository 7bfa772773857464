"""The comparison of trials: by one or several metrics, which may be costs of the full-size model, and by bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from hydro_rasda.common.argument_checks import check_function, check_mode, is_number, require
from hydro_rasda.schedulers.pareto import Bounds, Spread, front_of, places, violation
from hydro_rasda.schedulers.ranking import Mode

COSTS = ("params", "macs", "seconds_per_example", "peak_memory")
"""Costs of the full-size model, known before it trains; `hydro_rasda.problem.model_costs` measures them."""

PLACE = ("event", "heat", "trial", "epoch")
"""Keys that tell in the journal where the metrics of a line belong. No metric may have one of these names."""

Objectives = tuple[tuple[str, Mode], ...]
"""Pairs of a metric and its mode, in the order of the argument `metric`."""

Fits = Callable[[Mapping[str, Any]], bool]
"""A constraint on configurations: a function that returns whether a configuration may be trained."""

Constraints = Mapping[str, Bounds | Fits] | Fits
"""A function of a configuration; or a dict that maps metrics to bounds, and any names to such functions."""


def split_metrics(metric: object, mode: object) -> tuple[str, Mode, Objectives]:
    """Return the first metric that training measures, its mode, and all metrics with their modes.

    For a single metric, the third value is ().

    >>> split_metrics(["macs", "val_accuracy"], ["min", "max"])
    ('val_accuracy', 'max', (('macs', 'min'), ('val_accuracy', 'max')))
    """
    if not isinstance(metric, list | tuple):
        rule = f"the name of a metric that training measures, or a list with one beside it ({', '.join(COSTS)})"
        require(not isinstance(metric, str) or metric not in COSTS, "metric", metric, rule)
        return cast(str, metric), cast(Mode, mode), ()
    named = all(isinstance(name, str) and name for name in metric)
    require(
        named and len({*metric}) == len(metric) > 1, "metric", metric, "a name, or a list of two or more different ones"
    )
    modes = [mode] * len(metric) if isinstance(mode, str) else mode
    rule = f"'min', 'max', or a list of {len(metric)} of them, one for each metric"
    require(isinstance(modes, list | tuple) and len(modes) == len(metric), "mode", mode, rule)
    for each in cast(Sequence[object], modes):
        check_mode(each)
    objectives = tuple(zip(metric, cast(Sequence[Mode], modes), strict=True))
    trained = [each for each in objectives if each[0] not in COSTS]
    require(bool(trained), "metric", metric, "a list with a metric that training measures, such as 'val_loss'")
    return *trained[0], objectives


def check_constraints(constraints: object) -> None:
    """Raise ValueError unless constraints are None, a function of a configuration, or a dict of bounds or functions."""
    if constraints is None:
        return
    if not isinstance(constraints, Mapping):
        rule = "None, a dict such as {'macs': (None, 1e9)}, or a function (no class) of a configuration"
        check_function("sweep.constraints", constraints, 1, rule=rule)
        return
    for name, bounds in constraints.items():
        of = f"sweep.constraints[{name!r}]"
        require(
            isinstance(name, str) and bool(name), "sweep.constraints", [*constraints], "a dict whose keys are names"
        )
        if not isinstance(bounds, list | tuple):
            check_function(of, bounds, 1, rule="(lowest, highest), or a function (no class) of a configuration")
            continue
        known = [bound for bound in bounds if bound is not None]
        sound = len(bounds) == 2 and bool(known) and all(map(is_number, known))
        rule = "a pair (lowest, highest) of finite numbers in rising order, one of which may be None"
        require(sound and known == sorted(known), of, bounds, rule)


def bounds_of(constraints: Constraints | None) -> dict[str, Bounds]:
    """Return the constraints that bound a metric."""
    if not isinstance(constraints, Mapping):
        return {}
    pairs = {name: of for name, of in constraints.items() if isinstance(of, list | tuple)}
    return {name: (low, high) for name, (low, high) in pairs.items()}


def functions_of(constraints: Constraints | None) -> dict[str, Fits]:
    """Return the constraints that are functions; the keys are paths such as "sweep.constraints['small']"."""
    if constraints is None:
        return {}
    if not isinstance(constraints, Mapping):
        return {"sweep.constraints": constraints}
    return {f"sweep.constraints[{name!r}]": of for name, of in constraints.items() if callable(of)}


@dataclass(frozen=True)
class Comparison:
    """The comparison of a run's trials by one or more objectives, within bounds that trials should keep."""

    objectives: Objectives
    bounds: Mapping[str, Bounds] = field(default_factory=dict)
    spread: Spread = "crowding"

    @property
    def costs(self) -> tuple[str, ...]:
        """Costs of the full-size model that compare trials, or that have a bound."""
        return tuple(name for name in COSTS if name in self._names)

    @property
    def trained(self) -> tuple[str, ...]:
        """Metrics that training must measure: all objectives and bounded metrics other than costs."""
        return tuple(name for name in self._names if name not in COSTS)

    @property
    def _names(self) -> dict[str, None]:
        return dict.fromkeys([*(name for name, _ in self.objectives), *self.bounds])

    @property
    def of_training(self) -> dict[str, Bounds]:
        """Bounds of metrics that training measures; bounds of costs are left out."""
        return {name: bounds for name, bounds in self.bounds.items() if name not in COSTS}

    @property
    def several(self) -> bool:
        """True if several metrics compare trials, so that the result is a Pareto front."""
        return len(self.objectives) > 1

    @property
    def by_place(self) -> bool:
        """True with several metrics, or with bounds of metrics. Then `places` orders trials, not a single score."""
        return self.several or bool(self.of_training)

    def places(self, values: Mapping[int, Mapping[str, float]]) -> dict[int, float]:
        """Return each trial's place in the ranking of all trials, 0 for the best; NaN if one of its values is missing.

        >>> Comparison((("val_loss", "min"),), {"val_gap": (None, 0.1)}).places(
        ...     {0: {"val_loss": 0.1, "val_gap": 0.3}, 1: {"val_loss": 0.9, "val_gap": 0.0}})
        {0: 1.0, 1: 0.0}
        """
        points = {n: [of.get(name, math.nan) for name, _ in self.objectives] for n, of in values.items()}
        return places(points, [mode for _, mode in self.objectives], self.violations(values), self.spread)

    def violations(self, values: Mapping[int, Mapping[str, float]]) -> dict[int, float]:
        """Return by how much each trial breaks the bounds; 0 if it keeps them."""
        return {n: violation(of, self.bounds) for n, of in values.items()}

    def best(self, values: Mapping[int, Mapping[str, float]]) -> list[int]:
        """Return the trials that keep the bounds; if none does, those that break them least."""
        broken = self.violations(values)
        least = min(broken.values(), default=0.0)
        return [n for n in values if broken[n] == least]

    def front(self, values: Mapping[int, Mapping[str, float]]) -> list[int]:
        """Return the Pareto front of the trials that keep the bounds, or that break them least if none does.

        Trials with a value that is not finite are left out first, even if only they keep the bounds.
        """
        points = {n: [of.get(name, math.nan) for name, _ in self.objectives] for n, of in values.items()}
        able = {n: values[n] for n, point in points.items() if all(map(math.isfinite, point))}
        return front_of({n: points[n] for n in self.best(able)}, [mode for _, mode in self.objectives])


def few_fit(found: int, wanted: int) -> str:
    """Return the message that fewer configurations than wanted meet the constraints, and what to change."""
    told = f"{found} of {wanted} configurations are tried: no more of those drawn meet `sweep.constraints`"
    return f"{told}. Loosen these, or narrow `space` to what they allow"


def few_in_time(found: int, wanted: int) -> str:
    """Return the message that time was up before all wanted configurations were drawn."""
    told = f"{found} of {wanted} configurations are tried: the sweep's time was up before more were drawn"
    return f"{told}. The same call with a larger `time_budget_s` draws the others"


def refuse_if_none(any_fits: bool, drawn: int) -> None:
    """Raise ValueError if none of `drawn` configurations meets the constraints."""
    if drawn and not any_fits:
        raise ValueError(f"`sweep.constraints` leaves nothing to try: none of {drawn} configurations of `space` fits")
