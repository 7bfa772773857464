"""The call of `tune` that a run was made by, as far as its `run.json` tells."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hydro_rasda.config import RaceConfig, SweepConfig, TuneConfig
from hydro_rasda.identity_settings import recorded
from hydro_rasda.schedulers.named_rules import RULES
from hydro_rasda.sweep_config import SEARCHERS

_RANGE = re.compile(r"(?P<kind>float|integer) (?P<law>uniform|loguniform)\((?P<bounds>[^=]+?)(?:, q=(?P<q>.+))?\)")
_NAMES = {
    ("float", "uniform", False): "uniform",
    ("float", "loguniform", False): "loguniform",
    ("float", "uniform", True): "quniform",
    ("float", "loguniform", True): "qloguniform",
    ("integer", "uniform", False): "randint",
    ("integer", "loguniform", False): "ray.tune.lograndint",
    ("integer", "uniform", True): "ray.tune.qrandint",
    ("integer", "loguniform", True): "ray.tune.qlograndint",
}


def call_of(asked: Mapping[str, Any]) -> str:
    """The call as Python; what JSON has no form for is there by its name."""
    digests = asked.get("digests", {})
    own, sweep, race = recorded(asked)
    if "objectives" in own:
        own = {**own, "metric": asked["metric"], "mode": asked["mode"], "objectives": ()}
    made = {"rule": asked.get("sweep_rule"), "searcher": asked.get("searcher")}
    of_sweep = _changed(sweep, SweepConfig())
    named = (*RULES, *SEARCHERS)
    of_sweep += [f"{name}={kind!r}" if kind in named else f"{name}={kind}(...)" for name, kind in made.items() if kind]
    of_sweep += ["first=first"] if "first" in digests else []
    if "constraints" in digests:
        of_sweep = [told for told in of_sweep if not told.startswith("constraints=")] + ["constraints=constraints"]
    of_race = _changed(race, RaceConfig()) + (["train=train"] if "full_size" in digests else [])
    val_data = asked.get("val_data") if own.pop("folds", 0) else "val_data"
    arguments = _changed(own, TuneConfig())
    arguments += [f"sweep=SweepConfig({', '.join(of_sweep)})"] if of_sweep else []
    arguments += [f"race=RaceConfig({', '.join(of_race)})"] if of_race else []
    arguments += ["metrics=metrics"] if "metrics" in digests else []
    function = "objective" if "objective" in digests else "loss_fn"
    space = _space(asked["space"], 1)
    lines = ["model_fn", space, "train_data=train_data", f"val_data={val_data}", f"{function}={function}", *arguments]
    return "tune(\n" + "".join(f"    {line},\n" for line in lines) + ")"


def _changed(given: Mapping[str, Any], defaults: object) -> list[str]:
    """Arguments that are not the default; the first arguments of any run are always said."""
    said = ("metric", "mode", "num_samples", "max_t", "seed")
    changed = {name: value for name, value in given.items() if name in said or value != getattr(defaults, name)}
    return [f"{name}={value!r}" for name, value in changed.items()]


def _space(space: Mapping[str, Any], depth: int) -> str:
    indent = "    " * depth
    lines = []
    for name, words in space.items():
        value = _space(words, depth + 1) if isinstance(words, Mapping) else domain_of(str(words))
        lines.append(f"{indent}    {name!r}: {value},\n")
    return "{\n" + "".join(lines) + indent + "}"


def domain_of(words: str) -> str:
    """A domain as it is written in a call.

    >>> domain_of("float loguniform(0.0001, 1)"), domain_of("integer uniform(1, 5)"), domain_of("choice([32, 64])")
    ('loguniform(0.0001, 1)', 'randint(1, 5)', 'choice([32, 64])')
    """
    found = _RANGE.fullmatch(words)
    if found is None:
        return words
    name = _NAMES[found["kind"], found["law"], found["q"] is not None]
    return f"{name}({found['bounds']}{', ' + found['q'] if found['q'] else ''})"
