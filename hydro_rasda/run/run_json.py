"""`run.json`: the arguments of `tune` that are recorded for a run, and how they are read back."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from hydro_rasda.common.argument_checks import require
from hydro_rasda.run.files import Unsafe, read_json
from hydro_rasda.settings.config import RaceConfig, TuneConfig
from hydro_rasda.settings.objectives import bounds_of, split_metrics

SPEC = "run.json"

FORMAT = 2
"""Format of a run's folder, recorded in `run.json`. Only runs of this format are read. Each change raises it by 1."""

_OWN = ("metric", "mode", "num_samples", "max_t", "full_trainings", "precision", "seed", "folds")
OF_SWEEP = ("surrogate", "grace_period", "reduction_factor", "fusion", "check_transfer", "repeats", "depth")
OF_RACE = ("top_k", "keep", "patience", "ema", "refit")
_ELSE = ("checkpoint_every", *OF_RACE)
_OF_RASDA = tuple(field.name for field in fields(RaceConfig) if field.name not in _ELSE)
"""Settings that determine a run's decisions. `run.json` has `_OF_RASDA` as a dict, "rasda", and all others by name."""
_OF_PROBLEM = ("space", "searcher", "sweep_rule", "train_data", "val_data", "model", "python", "digests", "rasda")


def read_asked(path: Path) -> dict[str, Any]:
    """Read from a folder's `run.json` the arguments of the call of `tune`, as `Identity.asked` returned them.

    Raise ValueError if the folder holds no run.
    """
    spec = path / SPEC
    require(spec.is_file(), "path", str(path), _NOTHING)
    asked = read_spec(path)
    proper = {*_OWN, *OF_SWEEP, "constraints", *OF_RACE, *_OF_PROBLEM} <= asked.keys()
    proper = proper and all(isinstance(asked[name], dict) for name in ("rasda", "digests", "space"))
    require(proper and {*_OF_RASDA} <= asked["rasda"].keys(), "path", str(path), _NO_RUN)
    return asked


def run_id(path: Path) -> str:
    """Return the `id` of the run in a folder."""
    return str(_read(path)["id"])


def unique_name(path: Path) -> str:
    """Return a name for the run in a folder that no other run has, not even a run of the same name elsewhere.

    A run that was set aside (`resume="changed"`) and the one that began in its place have different names, too.
    """
    try:
        own = run_id(path)
    except FileNotFoundError:  # a logger may be given a folder that is not a run's
        own = ""
    name = os.fsencode(path.name)[:_NAME_BYTES].decode(errors="ignore")
    return f"{name}-{hashlib.sha256(os.fsencode(f'{own} {path}')).hexdigest()[:8]}"


_NAME_BYTES = 96
"""Largest number of bytes of a run's name in its unique name, which loggers use in file names and in W&B's ids."""

_NOTHING = "a run's folder, `storage_path/name`: it holds no run.json. `hydro-rasda runs` lists the runs of a folder"
_NO_RUN = "a run's folder, `storage_path/name`: its run.json is damaged, or not that of a run"


def read_spec(path: Path) -> dict[str, Any]:
    """Read a folder's `run.json` without its format and the run's id; ValueError if the format is another one."""
    return {name: value for name, value in _read(path).items() if name not in ("format", "id")}


def _read(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path / SPEC)
    except Unsafe:
        raise
    except ValueError:
        found = None
    require(isinstance(found, dict) and "format" in found, "path", str(path), _NO_RUN)
    spec: dict[str, Any] = found
    rule = (
        f"a run's folder of format {FORMAT}, but its format is {spec['format']!r}: begin a new run under another "
        "`name`, or open it with the version of hydro_rasda that made it"
    )
    require(spec["format"] == FORMAT, "path", str(path), rule)
    require(isinstance(spec.get("id"), str), "path", str(path), _NO_RUN)
    return spec


def determining(settings: TuneConfig) -> dict[str, Any]:
    """Return the settings that determine a run's decisions, in the form of `run.json`.

    The time budget, `stop_at`, the frequency of checkpoints and the way in which steps run do not determine them.
    """
    bounds = bounds_of(settings.sweep.constraints)
    several = {"metric": [name for name, _ in settings.objectives], "mode": [mode for _, mode in settings.objectives]}
    return {
        **{name: getattr(settings, name) for name in _OWN},
        **(several if settings.objectives else {}),
        "constraints": {name: [*pair] for name, pair in bounds.items()} or None,
        **{name: getattr(settings.sweep, name) for name in OF_SWEEP},
        **{name: getattr(settings.race, name) for name in OF_RACE},
        "rasda": {name: getattr(settings.race, name) for name in _OF_RASDA},
    }


def recorded(asked: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the fields of `TuneConfig`, `SweepConfig` and `RaceConfig` in `asked`, the content of a `run.json`."""
    own = {name: asked[name] for name in _OWN}
    if isinstance(asked["metric"], list):
        own |= dict(zip(("metric", "mode", "objectives"), split_metrics(asked["metric"], asked["mode"]), strict=True))
    sweep = {name: asked[name] for name in (*OF_SWEEP, "constraints")}
    return own, sweep, {**{name: asked[name] for name in OF_RACE}, **{name: asked["rasda"][name] for name in _OF_RASDA}}
