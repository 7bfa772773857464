"""Names of earlier versions: each is refused with the name to write in its place. Needs neither torch nor Ray."""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Callable, Mapping
from typing import NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

NO_SCHEDULER = (
    "full-size trials are raced by one rule on each backend; a script of Ray Tune's takes any scheduler, such as "
    "`hydro_rasda.RASDAScheduler`"
)

ARGUMENTS: Mapping[str, str] = {
    **{name: f"sweep.{name}" for name in ("surrogate", "grace_period", "reduction_factor", "fusion")},
    **{name: f"sweep.{name}" for name in ("check_transfer", "searcher", "first")},
    "sweep_rule": "sweep.rule",
    **{name: f"race.{name}" for name in ("top_k", "keep", "patience", "ema", "checkpoint_every")},
    "full_size": "race.train",
    "rasda": "race",
    **{name: f"backend.{name}" for name in ("device", "loader_workers", "graph")},
    **{name: f"backend.{name}" for name in ("address", "resources_per_worker")},
    "scheduler": "",
}
"""The new place of each argument that `tune` had: a field of the argument before the dot; "" for none."""

_RAY_ALONE = ("address", "resources_per_worker")
_PARTS = {"sweep": "SweepConfig", "race": "RaceConfig"}


def new_spelling(old: Mapping[str, object], backend: object = None) -> str:
    """Write old arguments of `tune` in their new form.

    >>> new_spelling({"surrogate": 0.5, "top_k": 2, "full_size": None, "device": "cpu"})
    "sweep=SweepConfig(surrogate=0.5), race=RaceConfig(top_k=2, train=None), backend=LocalBackend(device='cpu')"
    """
    on_ray = backend == "ray" or any(name in _RAY_ALONE for name in old)
    parts = {**_PARTS, "backend": "RayBackend" if on_ray else "LocalBackend"}
    fields: dict[str, list[str]] = {}
    for name, value in old.items():
        part, _, field = ARGUMENTS[name].partition(".")
        fields.setdefault(part, []).extend([f"{field}={reprlib.repr(value)}"] if field else ["..."])
    return ", ".join(f"{part}={parts[part]}({', '.join(given)})" for part, given in fields.items())


def refuse_renamed(called: str, given: Mapping[str, object]) -> None:
    """Refuse arguments of earlier versions: TypeError for all of them at once, with the new spelling."""
    old = {name: value for name, value in given.items() if name in ARGUMENTS}
    if not old:
        return
    moved = {name: value for name, value in old.items() if ARGUMENTS[name]}
    told = [f"Write {new_spelling(moved, given.get('backend'))}."] if moved else []
    told += ["Leave `scheduler` out: " + NO_SCHEDULER + "."] if "scheduler" in old else []
    raise TypeError(f"{called}() has no {' and no '.join(f'`{name}`' for name in old)} any more. {' '.join(told)}")


def refuses_renamed(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that had the arguments of `ARGUMENTS`, so that it refuses them; see `refuse_renamed`."""
    return _checked_by(refuse_renamed, function)


def refuses(**gone: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a class's `__init__` that had these arguments, so that it refuses them with what to do instead."""

    def refuse(called: str, given: Mapping[str, object]) -> None:
        for name in gone.keys() & given.keys():
            raise TypeError(f"{called}() has no `{name}` any more: {gone[name]}")

    return functools.partial(_checked_by, refuse)


def _checked_by(refuse: Callable[[str, Mapping[str, object]], None], function: Callable[P, T]) -> Callable[P, T]:
    called = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        refuse(called, kwargs)
        return function(*args, **kwargs)

    return call


_EVENTS = (
    *("CheckpointSaved", "EpochEnded", "EpochsTrained", "FinalistsChosen", "MessageSaid", "RunBegan", "RunEnded"),
    *("RungDecided", "StageBegan", "StageEnded", "TrialConfigured", "TrialEnded", "TrialFailed"),
)

NAMES: Mapping[str, str] = {
    **{name: f"contracts.{name}" for name in ("Backend", "Callback", "Event")},
    **{name: f"run.events.{name}" for name in _EVENTS},
    **{name: f"schedulers.{name}" for name in ("Continue", "Stop", "SweepRule", "SweepState")},
    "GoOn": "schedulers.Continue",
    "Drop": "schedulers.Stop",
    **{name: f"backends.ray.{name}" for name in ("JournalEntry", "RescaledLR", "lr_factor", "read_journal")},
    **{name: f"results.{name}" for name in ("Cost", "TrialRecord")},
    "BubbleBackend": "bubbles.BubbleBackend",
    "RASDAConfig": "RaceConfig",
}
"""The new place of each name that `hydro_rasda` exported, relative to it."""


def refuse_name(package: str, name: str, new: str) -> NoReturn:
    """Raise ImportError for a name of earlier versions: `from package import name` passes its text on."""
    home, _, renamed = f"{package}.{new}".rpartition(".")
    raise ImportError(f"`{package}.{name}` has moved. Write: from {home} import {renamed}", name=package)
