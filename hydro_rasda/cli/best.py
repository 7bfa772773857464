"""`best`: the best configuration in a form that other programs read, and the trained model."""

from __future__ import annotations

import json
import math
from typing import Any

from hydro_rasda.checks import require
from hydro_rasda.cli.output import say
from hydro_rasda.console import one_line, show
from hydro_rasda.results.export import save_model
from hydro_rasda.results.reading import read_record
from hydro_rasda.results.records import RunRecord, TrialRecord
from hydro_rasda.run.journal import jsonable


def print_best(path: str, style: str, trial: int | None, export: str | None) -> bool:
    """Print the configuration of a trial (by default the best), or its recipe; return whether there is one."""
    record = read_record(path)
    if trial is None and not _scored(record):
        return False
    number = record.best_trial if trial is None else trial
    known = len(record.trials)
    require(0 <= number < known, "--trial", number, f">= 0 and < {known}, the number of the run's trials")
    found = record.trials[number]
    if export is not None:
        # First, so that a pipe gets nothing if this fails.
        say(f"wrote {save_model(record, export, number)}", error=True)
    if style == "recipe":
        from hydro_rasda.results.load import load  # waits for torch

        say(load(path).recipe(number), end="")
    else:
        say(written(jsonable(found.config), style, one_line(comment(record, found))), end="")
    return True


def _scored(record: RunRecord) -> bool:
    best = record.trials[record.best_trial] if record.trials else None
    return best is not None and any(map(math.isfinite, (best.metric, best.surrogate_metric)))


def comment(record: RunRecord, trial: TrialRecord) -> str:
    """Describe a trial's score in a line."""
    if trial.epochs:
        told = f"{show(trial.metric, 6)} ({record.mode}) at full size, epoch {trial.kept_epoch} of {trial.epochs}"
    elif trial.surrogate_epochs:
        told = f"{show(trial.surrogate_metric, 6)} ({record.mode}) on its surrogate, epoch {trial.surrogate_epochs}"
    else:
        told = "not known yet"
    unread = f"; nothing reads {', '.join(trial.unread)}" if trial.unread else ""
    return f"trial {trial.trial} of {record.path.name}: {record.metric} {told}{unread}"


def written(config: dict[str, Any], style: str, comment: str) -> str:
    """Write a configuration as text, in the style "json", "yaml" or "python". All but JSON have a comment above."""
    if style == "json":
        return json.dumps(config, indent=2) + "\n"
    if style == "python":
        entries = "".join(f"    {name!r}: {value!r},\n" for name, value in config.items())
        return f"# {comment}\nconfig = {{\n{entries}}}\n"
    import yaml

    return f"# {comment}\n{yaml.safe_dump(config, sort_keys=False)}"
