"""Rules for resuming an earlier run: which differences a call of `tune` may have, and which are refused."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from hydro_rasda.run.files import read_file, refuse_links, sync_folder, write_atomically
from hydro_rasda.run.journal import JOURNAL, MESSAGES, read_units
from hydro_rasda.run.run_json import OF_RACE, OF_SWEEP, SPEC


class RunExists(ValueError):
    """A run of this name exists that this call may not continue, or its folder holds something else."""


def refuse_other(path: Path, found: Mapping[str, Any], asked: Mapping[str, Any], resume: str) -> list[str]:
    """Raise RunExists if a call may not continue a run. Otherwise, return how code and data differ, in words.

    `found` is the content of the run's `run.json`. `asked` is the content that it would have for the call, as returned
    by `Identity.asked` or `Identity.known`.
    """
    another = f"`name` is {path.name!r}, but the run of that name in {path.parent}"
    deciding, changes = differences(found, asked)
    if deciding or (changes and resume != "changed"):
        told = "; ".join(deciding + changes)
        hint = "choose another `name`" if deciding else "`resume='changed'` goes on with it all the same"
        if not deciding and scored_otherwise(found, asked):
            kept = f"{path.name}/{ASIDE}N"
            hint = f"scores do not compare, so that `resume='changed'` keeps it as {kept!r}, and begins anew"
        hint += "" if deciding else "; another `name` begins a new run"
        raise RunExists(f"{another} is another: {told}; {hint}")
    return changes


def refuse_growth(path: Path, found: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Raise RunExists if a call asks for more samples of a run whose rule has copied weights.

    With more trials, the rule would have made other copies.
    """
    was, now = (spec.get("num_samples") for spec in (found, asked))
    if not (isinstance(was, int) and isinstance(now, int) and now > was):
        return
    if any("/group-" in key and "copies" in unit.value for key, unit in read_units(path / JOURNAL).units.items()):
        told = f"`num_samples` was {was}, now {now}, but a run whose `sweep.rule` has copied weights cannot grow"
        raise RunExists(f"{told}: begin another run, under a new `name`")


_DATA = ("train_data", "val_data")
_CODE = ("model_fn", "train", "metrics", "objective", "loss_fn")
_NO_DIFFERENCE = ("digests", "code", "environment", "python", "train_data", "val_data", "folds", "refit", "parts")
"""Keys that are compared by their digests instead, or that are recorded without being part of the identity."""


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Describe how a call of `tune` differs from the run that it would continue.

    Args:
        was: The content of the run's `run.json`: settings, descriptions, and "digests" by argument.
        now: The same for the call.

    Returns:
        Two lists of differences. The first forbids resuming: settings, space, searcher, the model's parameters. The
        second has code and data, whose differences a user may accept. More samples are no difference, because a run
        may grow.
    """
    deciding = {key: _told(key, was.get(key), now.get(key)) for key in {**now, **was} if key not in _NO_DIFFERENCE}
    knowing: dict[str, str | None] = {}
    before, after = was.get("digests", {}), now.get("digests", {})
    for name in {**after, **before}:
        if before.get(name) != after.get(name):
            if name in _DATA:
                knowing[name] = f"`{name}` has other content than the run's"
            elif name in _CODE:
                codes = (spec.get("code", {}).get(name, {}) for spec in (was, now))
                knowing[name] = f"`{name}` is another function than the run's{_changed_globals(name, *codes)}"
            else:
                told = f"`{_argument(name)}` has other values or functions than the run's"
                deciding[name] = deciding.get(name) or told
    if knowing and was.get("python") != now.get("python"):
        knowing["python"] = (
            f"functions look different under another version of Python: {was.get('python')}, now {now.get('python')}"
        )
    return [told for told in deciding.values() if told], [told for told in knowing.values() if told]


def _changed_globals(function: str, was: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Name the global values in which a function differs; return "" if it differs in its own code, or nothing is known.

    Args:
        was: Digests of the function's pieces by path, as in the "code" of `run.json`.
    """
    paths = [path for path in was if path and was[path] != now.get(path)]
    if not paths or any("/global " not in path for path in paths) or was.get("") != now.get(""):
        return ""
    names = dict.fromkeys(path.rpartition("/global ")[2].partition("/")[0] for path in paths)
    told = " and ".join(f"`{name}`" for name in [*names][:_FEW])
    return f": the value of {told}, which it uses, has changed, perhaps by calls of `{function}` itself"


def scored_otherwise(was: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Tell whether scores of two runs do not compare, because they come from other functions or validation data.

    Functions look different under another version of Python. Then this compares neither functions nor data that the
    user's functions or classes make. A user who continues the run knows that they are the same.
    """
    same = was.get("python") == now.get("python")
    of_values = bool(now.get("folds")) or str(now.get("val_data")).startswith("tensors ")
    names = ["val_data"] * (same or of_values) + _OF_SCORES * same
    before, after = was.get("digests", {}), now.get("digests", {})
    return any(before.get(name) != after.get(name) for name in names)


_OF_SCORES = ["loss_fn", "objective", "metrics"]

_FEW = 5
"""Largest number of entries of a space, a model or the race's settings whose differences are listed one by one."""


def _told(key: str, was: Any, now: Any) -> str | None:
    """Describe in words how the setting `key` of `run.json` differs between run and call; None if it does not."""
    if key == "num_samples" and isinstance(was, int) and isinstance(now, int):
        return f"num_samples was {was}, now {now}, but a run can only grow" if now < was else None
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        changed = [name for name in {**now, **was} if was.get(name) != now.get(name)]
        named = {name: f"race.{name}" if key == "rasda" else f"{_argument(key)}[{name!r}]" for name in changed}
        told = [f"{named[name]} was {was.get(name)!r}, now {now.get(name)!r}" for name in changed[:_FEW]]
        more = [f"{len(changed) - _FEW} more of `{_argument(key)}` differ"] if len(changed) > _FEW else []
        return "; ".join(told + more) or None
    return f"{_argument(key)} was {was!r}, now {now!r}" if was != now else None


def _argument(name: str) -> str:
    """Return the argument of `tune` for a name in `run.json`."""
    return _ARGUMENTS.get(name, name)


_ARGUMENTS = {
    **{name: f"sweep.{name}" for name in (*OF_SWEEP, "searcher", "first", "constraints")},
    **{name: f"race.{name}" for name in OF_RACE},
    "sweep_rule": "sweep.rule",
    "rasda": "race",
    "lr_rule": "race.lr_rule",
}
"""Maps names in `run.json` to arguments of `tune`, where these differ."""


ASIDE = "before-"
"""Prefix of the name of a folder with results that are set aside; a number from 1 follows."""

# The journal moves last: if a folder has none, a process was killed while it moved the files there.
RESULTS = ("checkpoints", MESSAGES, "metrics.csv", "tensorboard", JOURNAL)
"""Files and folders of a run's results: all but `run.json`, the lock and notes."""


def set_aside(path: Path) -> str:
    """Move the results of a run into a folder inside the run's folder. The new folder is then a separate run.

    If the process is killed during the move, the next process moves the rest to the same folder.

    Args:
        path: The run's folder, locked by this process. Its `run.json` is copied, and stays until a new one is written.

    Returns:
        A message about the move; empty if there was nothing to move.
    """
    if not (path / JOURNAL).exists():
        return ""
    aside = next(to for to in (path / f"{ASIDE}{number}" for number in count(1)) if not (to / JOURNAL).exists())
    refuse_links(aside)
    aside.mkdir(exist_ok=True)
    write_atomically(aside / SPEC, read_file(path / SPEC))
    with contextlib.suppress(OSError):  # empty, because an earlier process moved the checkpoints and was then killed
        (path / "checkpoints").rmdir()
    for name in RESULTS:
        with contextlib.suppress(FileNotFoundError):
            (path / name).rename(aside / name)
        sync_folder(aside)
    sync_folder(path)
    (path / "checkpoints").mkdir(exist_ok=True)
    return (
        f"scores by other code or data do not compare with those to come: what was trained so far is the run "
        f"{str(aside)!r} from now on, and this one begins anew"
    )
