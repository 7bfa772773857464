"""Configurations as recorded in a run's journal: JSON values, and names in place of classes and functions."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fusion.warn import warn
from hydro_rasda.common.secret_masking import restore
from hydro_rasda.common.trial import Trial
from hydro_rasda.history.lines import jsonable
from hydro_rasda.problem.read_keys import is_plain
from hydro_rasda.run.state import Run
from hydro_rasda.space.branches import is_nested, reachable
from hydro_rasda.space.domains import is_a


def with_objects(recorded: Mapping[str, Any], space: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded configuration with the space's classes and functions in place of their names."""
    found: dict[str, Any] = {}
    values = reachable(space)
    for key, value in recorded.items():
        listed = values.get(key, [])
        drawn = [each for of in listed for each in (of.categories if is_a(of, "Categorical") else [of])]
        alike = [each for each in drawn if jsonable(each) == value]
        # Functions may share a name: then it is unclear which one was meant.
        if alike and (all(each is alike[0] for each in alike) or all(map(is_plain, alike))):
            found[key] = copy.deepcopy(alike[0])
        else:
            inner = listed[0] if listed and is_nested(listed[0]) and isinstance(value, Mapping) else None
            found[key] = value if inner is None else with_objects(value, inner)
    return found


def as_recorded(trials: Sequence[Trial], run: Run) -> list[Trial]:
    """Return newly sampled trials with the values that the journal has recorded; warn if these differ.

    They can differ: a function of `sample_from` may draw other values in another process.
    """
    recorded = {
        line["trial"]: with_objects(restore(line["config"], run.hidden, run.space), run.space)
        for key, unit in run.store.units().items()
        if key.startswith("sweep/kinds-from-")
        for line in unit.lines
        if line["event"] == "trial"
    }
    found = [replace(t, config=_with_values(t.config, recorded.get(t.number, t.config))) for t in trials]
    other = [was.number for was, now in zip(trials, found) if jsonable(was.config) != jsonable(now.config)]
    if other:
        warn(
            f"`space` gives trial {other[0]} other values than when the run began, which count. Have functions of "
            "`sample_from` draw from the global generators of Python, NumPy or torch, which `tune` seeds"
        )
    return found


def _with_values(config: Mapping[str, Any], recorded: Mapping[str, Any]) -> Mapping[str, Any]:
    found = {}
    for key, value in recorded.items():
        own = config.get(key, value)
        # An object may have a different name in each process.
        if jsonable(own) == jsonable(value) or (is_plain(value) and not is_plain(own) and not isinstance(own, Mapping)):
            found[key] = own
        elif isinstance(own, Mapping) and isinstance(value, Mapping):
            found[key] = _with_values(own, value)
        else:
            found[key] = value
    return found
