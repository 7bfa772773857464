"""`run.json`: the request for a run, and a check of whether the run may go on with a new request."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydro_rasda.checks import require
from hydro_rasda.run.differences import differences
from hydro_rasda.run.files import Unsafe, read_json
from hydro_rasda.secret_masking import HIDDEN, described_secrets, hide

SPEC = "run.json"

FORMAT = 1
"""Format of a run's folder, in its `run.json`. It grows when an earlier version of the library would misread a run."""


class RunExists(ValueError):
    """A run of this name is there already, and is another one."""


def refuse_other(path: Path, found: Mapping[str, Any], asked: Mapping[str, Any], resume: str) -> list[str]:
    """Refuse a run that may not go on; else say how its code and data differ."""
    if resume == "never":
        raise RunExists(f"`resume` is 'never', but {path} holds a run; choose another `name`")
    another = f"`name` is {path.name!r}, but the run of that name in {path.parent}"
    if "digests" in asked and "digests" not in found:
        raise RunExists(f"{another} is of an earlier version, which kept no digest of its code and data")
    deciding, changes = differences(found, asked)
    if deciding or (changes and resume != "changed"):
        told = "; ".join(deciding + changes)
        hint = "" if deciding else "; `resume='changed'` goes on with it all the same"
        raise RunExists(f"{another} is another: {told}{hint}")
    return changes


def read_asked(path: Path) -> dict[str, Any]:
    """Read the request for the run in a directory, as `Identity.asked` returns it.

    Raises:
        ValueError: if the directory holds no run.
    """
    spec = path / SPEC
    require(spec.is_file(), "path", str(path), "a run's folder, `storage_path/name`: it holds no run.json")
    asked = read_spec(path)
    require({"metric", "mode", "rasda"} <= asked.keys(), "path", str(path), _NO_RUN)
    if isinstance(space := asked.get("space"), dict):  # of an earlier version, which kept secrets in clear
        asked["space"] = hide(space, described_secrets(space), repr(HIDDEN))
    return asked


def run_id(path: Path) -> str:
    """Return the `id` of the run in a directory; empty if an earlier version, which gave none, began it."""
    with contextlib.suppress(OSError, ValueError):
        if isinstance(spec := read_json(path / SPEC), dict):
            return str(spec.get("id", ""))
    return ""


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
