"""`run.json`: the request for a run, as it is read back."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from hydro_rasda.checks import require
from hydro_rasda.run.files import Unsafe, read_json
from hydro_rasda.secret_masking import HIDDEN, described_secrets, hide

SPEC = "run.json"

FORMAT = 1
"""Format of a run's folder, in its `run.json`. It grows when an earlier version of the library would misread a run."""


def read_asked(path: Path) -> dict[str, Any]:
    """Read the request for the run in a directory, as `Identity.asked` returns it; ValueError if there is no run."""
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
