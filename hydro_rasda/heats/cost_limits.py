"""The costs of each configuration's full-size model, and the constraints that are checked before training."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fusion.keys import read
from fusion.warn import warn
from hydro_rasda.common.argument_checks import require
from hydro_rasda.common.trial import Trial
from hydro_rasda.history.lines import Unit
from hydro_rasda.problem.model_costs import model_costs
from hydro_rasda.problem.read_keys import Notes, Reads, all_of
from hydro_rasda.run.fingerprint import content, digest
from hydro_rasda.run.state import Run
from hydro_rasda.schedulers.pareto import violation
from hydro_rasda.settings.objectives import COSTS, Constraints, Fits, bounds_of, functions_of
from hydro_rasda.space.domains import plain


class Costs:
    """Measure the costs that the settings name, such as "params", at most once for each configuration."""

    def __init__(self, run: Run) -> None:
        self._run, self._names = run, run.settings.comparison.costs
        self._known: list[tuple[tuple[int, int], Reads, dict[str, float]]] = []

    def of(self, config: Mapping[str, Any]) -> dict[str, float]:
        """Return the costs of a configuration; NaN if its model cannot be built or run."""
        if not self._names:
            return {}
        key = f"search/costs-{digest(content(dict(config)))}"  # different functions may have the same name
        found = self._run.unit(key, lambda: Unit(self._measured(config))).value
        return {name: math.nan if value is None else value for name, value in found.items()}

    def _measured(self, config: Mapping[str, Any]) -> dict[str, float]:
        """Measure the costs, or reuse those of a model that was built from the same values and has the same batches.

        Batches are the same if `batch_size` and `accumulate` are the same.
        """
        trial, own = Trial(0, config), all_of(config)
        batches = trial.batch_size, read(config, "accumulate")
        for known, values, costs in self._known:
            if known == batches and values <= own:
                return costs
        notes = Notes(may_be_kept=False)
        problem = self._run.problem
        try:
            costs = model_costs(replace(problem, model_fn=notes.taken_by(problem.model_fn)), trial, self._names)
        except (Exception, SystemExit):  # the model fails, or keeps its configuration: its reads are unknown
            return self._alone(trial)
        if (reads := notes.of(config)) is not None:
            self._known.append((batches, reads, costs))
        return costs

    def _alone(self, trial: Trial) -> dict[str, float]:
        try:
            return model_costs(self._run.problem, trial, self._names)
        except (Exception, SystemExit) as error:  # the user's model, loss or data may raise anything
            told = f"cannot be measured, and so breaks the bounds on {', '.join(self._names)}"
            warn(f"a configuration {told}: {type(error).__name__}: {error}")
            return dict.fromkeys(self._names, math.nan)


def all_fit(constraints: Constraints | None, costs: Costs | None = None) -> Fits | None:
    """Return a function that tells whether a configuration meets all constraints that are known before training.

    A cost that cannot be measured breaks its bounds. If `costs` is None, the function ignores bounds on costs. If no
    constraint is left to check, return None. The function raises ValueError if a user's constraint raises or does not
    return a bool.
    """
    functions = functions_of(constraints)
    of_costs = {name: pair for name, pair in bounds_of(constraints).items() if name in COSTS and costs is not None}
    if not functions and not of_costs:
        return None

    def fits(config: Mapping[str, Any]) -> bool:
        for path, function in functions.items():
            try:
                holds = plain(function(copy.deepcopy(dict(config))))
            except Exception as error:
                raise ValueError(f"`{path}` fails for {dict(config)!r} with {type(error).__name__}: {error}") from error
            require(isinstance(holds, bool), f"{path}(config)", holds, "True or False")
            if not holds:
                return False
        return costs is None or violation(costs.of(config), of_costs) == 0

    return fits
