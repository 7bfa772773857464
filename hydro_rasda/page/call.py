"""The call of `tune` that a run was made by, as far as its `run.json` tells."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from hydro_rasda.config import RASDAConfig, TuneConfig

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
_FUNCTIONS = ("searcher", "sweep_rule")


def call_of(asked: Mapping[str, Any]) -> str:
    """The call as Python; what JSON has no form for is there by its name.

    Args:
        asked: A run's `run.json`.
    """
    arguments = [
        f"{name}={value!r}" for name, value in _changed(asked, asdict(TuneConfig())).items() if name != "rasda"
    ]
    if rasda := _changed(asked.get("rasda", {}), asdict(RASDAConfig())):
        arguments.append(f"rasda=RASDAConfig({', '.join(f'{name}={value!r}' for name, value in rasda.items())})")
    arguments += [f"{name}={asked[name]}(...)" for name in _FUNCTIONS if asked.get(name)]
    arguments += [f"{name}={name}" for name in ("first", "metrics", "full_size") if name in asked.get("digests", {})]
    function = "objective" if "objective" in asked.get("digests", {}) else "loss_fn"
    space = _space(asked["space"], 1)
    lines = ["model_fn", space, "train_data=train_data", "val_data=val_data", f"{function}={function}", *arguments]
    return "tune(\n" + "".join(f"    {line},\n" for line in lines) + ")"


def _changed(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What is not the default; the first arguments of any run are always said."""
    said = ("metric", "mode", "num_samples", "max_t", "seed")
    return {name: given[name] for name in defaults if name in given and (name in said or given[name] != defaults[name])}


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
