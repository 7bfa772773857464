"""`run.json`: what a run was asked to be, and whether it may go on as what is asked now."""

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
"""Of a run's folder, as its `run.json` says; it grows where an earlier version of the library would misread a run."""


class RunExists(ValueError):
    """A run of this name is there already, and is another one."""


def refuse_other(path: Path, found: Mapping[str, Any], asked: Mapping[str, Any], resume: str) -> list[str]:
    """Where the run that is there may go on, how its code and data differ."""
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
    """What the run in a directory was asked to be, as `Identity.asked` has it.

    Raises:
        ValueError: where the directory holds no run.
    """
    spec = path / SPEC
    require(spec.is_file(), "path", str(path), "a run's folder, `storage_path/name`: it holds no run.json")
    asked = read_spec(path)
    require({"metric", "mode", "rasda"} <= asked.keys(), "path", str(path), _NO_RUN)
    if isinstance(space := asked.get("space"), dict):  # of an earlier version, which kept secrets in clear
        asked["space"] = hide(space, described_secrets(space), repr(HIDDEN))
    return asked


def run_id(path: Path) -> str:
    """The `id` of the run in a directory; empty where there is none, as an earlier version began it."""
    with contextlib.suppress(OSError, ValueError):
        if isinstance(spec := read_json(path / SPEC), dict):
            return str(spec.get("id", ""))
    return ""


_NO_RUN = "a run's folder, `storage_path/name`: its run.json is not one of a run's"


def read_spec(path: Path) -> dict[str, Any]:
    """What a folder's `run.json` says, but for its format and the run's id."""
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
