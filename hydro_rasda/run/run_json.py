"""`run.json`: the settings of a run that it keeps, and the request for a run, as it is read back."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hydro_rasda.argument_checks import require
from hydro_rasda.comparison_of_trials import bounds_of, split_metrics
from hydro_rasda.config import RaceConfig, TuneConfig
from hydro_rasda.run.files import Unsafe, read_json
from hydro_rasda.secret_masking import HIDDEN, described_secrets, hide

SPEC = "run.json"

FORMAT = 1
"""Format of a run's folder, in its `run.json`. It grows when an earlier version of the library would misread a run."""

_OWN = ("metric", "mode", "num_samples", "max_t", "full_trainings", "precision", "seed")
OF_SWEEP = ("surrogate", "grace_period", "reduction_factor", "fusion", "check_transfer")
OF_RACE = ("top_k", "keep", "patience", "ema")
_OF_RASDA = tuple(
    field.name for field in fields(RaceConfig) if field.name not in (*OF_RACE, "checkpoint_every", "train", "refit")
)
"""Settings on which a run's decisions depend: `run.json` has the last as a dict, "rasda", and all others by name.

Those that earlier versions did not have are there only if they are not the default.
"""


def read_asked(path: Path) -> dict[str, Any]:
    """Read the request for the run in a directory, as `Identity.asked` returns it; ValueError if there is no run."""
    spec = path / SPEC
    require(spec.is_file(), "path", str(path), "a run's folder, `storage_path/name`: it holds no run.json")
    asked = read_spec(path)
    proper = {"metric", "mode", "rasda"} <= asked.keys()
    proper = proper and all(isinstance(asked.get(name, {}), dict) for name in ("rasda", "digests"))
    require(proper, "path", str(path), _NO_RUN)
    if isinstance(space := asked.get("space"), dict):  # of an earlier version, which kept secrets in clear
        asked["space"] = hide(space, described_secrets(space), repr(HIDDEN))
    return asked


def run_id(path: Path) -> str:
    """Return the `id` of the run in a directory; empty if an earlier version, which gave none, began it."""
    with contextlib.suppress(OSError, ValueError):
        if isinstance(spec := read_json(path / SPEC), dict):
            return str(spec.get("id", ""))
    return ""


def unique_name(path: Path) -> str:
    """Name the run in a directory as no other: runs of one name in two folders are two.

    So are a run that was set aside (`resume="changed"`) and the one that began anew in its place.
    """
    return f"{path.name}-{hashlib.sha256(f'{run_id(path)} {path}'.encode()).hexdigest()[:8]}"


_NO_RUN = "a run's folder, `storage_path/name`: its run.json is not one of a run's"


def read_spec(path: Path) -> dict[str, Any]:
    """Read a folder's `run.json`, without its format and the run's id."""
    try:
        found = read_json(path / SPEC)
    except Unsafe:
        raise
    except ValueError:
        found = None
    require(isinstance(found, dict), "path", str(path), _NO_RUN)
    asked: dict[str, Any] = found
    asked.pop("id", None)
    written = asked.pop("format", FORMAT)
    rule = f"a run of this version of hydro_rasda or an earlier one (format {FORMAT}), but its format is {written!r}"
    require(isinstance(written, int) and written <= FORMAT, "path", str(path), rule)
    return asked


def determining(settings: TuneConfig) -> dict[str, Any]:
    """The settings on which a run's decisions depend, as `run.json` has them.

    Not among them: what a run may cost, or must find, how often it is saved, and how its steps are run.
    """
    bounds = bounds_of(settings.sweep.constraints)
    several = {"metric": [name for name, _ in settings.objectives], "mode": [mode for _, mode in settings.objectives]}
    return {
        **{name: getattr(settings, name) for name in _OWN},
        **(several if settings.objectives else {}),
        **({"constraints": {name: [*pair] for name, pair in bounds.items()}} if bounds else {}),
        **({"folds": settings.folds} if settings.folds else {}),
        **{name: getattr(settings.sweep, name) for name in OF_SWEEP},
        **({"repeats": settings.sweep.repeats} if settings.sweep.repeats > 1 else {}),
        **({"depth": settings.sweep.depth} if settings.sweep.depth < 1 else {}),
        **{name: getattr(settings.race, name) for name in OF_RACE},
        **({} if settings.race.refit else {"refit": False}),
        "rasda": {name: getattr(settings.race, name) for name in _OF_RASDA},
    }


def recorded(asked: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Fields of `TuneConfig`, `SweepConfig` and `RaceConfig` from a `run.json`; earlier versions kept others, too."""
    own, sweep = _among((*_OWN, "folds"), asked), _among((*OF_SWEEP, "constraints", "repeats", "depth"), asked)
    if isinstance(asked.get("metric"), list):
        own |= dict(zip(("metric", "mode", "objectives"), split_metrics(asked["metric"], asked["mode"]), strict=True))
    race = _among(OF_RACE, asked) | _among(_OF_RASDA, asked.get("rasda", {}))
    race |= _among(("refit",), asked)
    return own, sweep, race


def _among(names: Sequence[str], values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}
