"""The differences between two runs, in words, by their `run.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hydro_rasda.renames import ARGUMENTS
from hydro_rasda.schedulers.named_rules import HALVING
from hydro_rasda.secret_masking import described_secrets, hide

_OF_CODE = "is another function than the run's"
_OF_DATA = "has other content than the run's"
_WORDS = {
    "model_fn": _OF_CODE,
    "full_size": _OF_CODE,
    "metrics": _OF_CODE,
    "objective": _OF_CODE,
    "loss_fn": _OF_CODE,
    "train_data": _OF_DATA,
    "val_data": _OF_DATA,
}
_NO_DIFFERENCE = ("digests", "environment", "python", "train_data", "val_data", "folds", "refit")
"""Keys that are compared by their digests, or that are noted without being a part of the run."""


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Say how two runs differ.

    Args:
        was: The content of `run.json`: settings, outlines, and by argument the "digests".

    Returns:
        Two lists. The first has differences that forbid resuming: settings, space, searcher, the model's parameters.
        The second has those in code and data, with which a user may go on knowingly. More samples are no difference: a
        run can grow.
    """
    deciding = {key: _told(key, was.get(key), now.get(key)) for key in {**now, **was} if key not in _NO_DIFFERENCE}
    knowing: dict[str, str | None] = {}
    before, after = was.get("digests", {}), now.get("digests", {})
    for name in {**after, **before}:
        if before.get(name) != after.get(name):
            if name in _WORDS:
                knowing[name] = f"`{_argument(name)}` {_WORDS[name]}"
            else:
                told = f"`{_argument(name)}` has other values or functions than the run's"
                deciding[name] = deciding.get(name) or told
    if knowing and was.get("python") != now.get("python"):
        knowing["python"] = (
            f"functions look different under another version of Python: {was.get('python')}, now {now.get('python')}"
        )
    return [told for told in deciding.values() if told], [told for told in knowing.values() if told]


def scored_otherwise(was: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Tell whether scores of two runs do not compare: they come from other functions, or other validation data.

    Functions look different under another version of Python. They are then not compared: a user who goes on knows that
    they are the same.
    """
    names = ["val_data"] + _OF_SCORES * (was.get("python") == now.get("python"))
    before, after = was.get("digests", {}), now.get("digests", {})
    return any(before.get(name) != after.get(name) for name in names)


_OF_SCORES = ["loss_fn", "objective", "metrics"]


def _told(key: str, was: Any, now: Any) -> str | None:
    """Say how a setting differs; None if it does not."""
    if key == "num_samples" and isinstance(was, int) and isinstance(now, int):
        return f"num_samples was {was}, now {now}, but a run can only grow" if now < was else None
    if isinstance(was, Mapping) and isinstance(now, Mapping) and key == "space":
        # Earlier versions kept secrets in clear. The digest tells whether they are the same.
        was, now = (hide(each, described_secrets(each)) for each in (was, now))
    if isinstance(was, Mapping) and isinstance(now, Mapping) and key == "rasda":
        changed = [name for name in {**was, **now} if was.get(name) != now.get(name)]
        return "; ".join(f"race.{name} was {was.get(name)!r}, now {now.get(name)!r}" for name in changed) or None
    if key == "sweep_rule":
        was, now = was or HALVING, now or HALVING
    if key == "repeats":
        was, now = was or 1, now or 1
    return f"{_argument(key)} was {was!r}, now {now!r}" if was != now else None


def _argument(name: str) -> str:
    """Return the argument that `run.json` has by this name."""
    return "sweep.repeats" if name == "repeats" else ARGUMENTS.get(name, name)
