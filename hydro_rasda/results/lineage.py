"""The lineage of a trial of population based training: the trials that trained its weights, and its changes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydro_rasda.checks import require
from hydro_rasda.run.store import Store
from hydro_rasda.schedulers.sweep_rule import Continue, move_of

SWEEP_DECISION = re.compile(r"surrogate/(?:begin|to-(?P<epoch>\d+)/kept)/of-.*")
"""Pattern of the journal's names of the sweep's decisions."""


@dataclass(frozen=True)
class Ancestor:
    """Epochs of the sweep in which one trial trained the weights that another has now.

    Attributes:
        trial: The trial that trained them.
        start: Epochs trained before.
        stop: Epochs trained after.
        config: Its configuration in these epochs.
    """

    trial: int
    start: int
    stop: int
    config: Mapping[str, Any]


def lineages(path: Path, epochs: Mapping[int, int]) -> dict[int, list[Ancestor]]:
    """Follow each trial's weights back to their initial values.

    Args:
        path: The run's folder.
        epochs: By trial, the number of epochs that the sweep trained.

    Returns:
        By trial, its ancestors, the first one first and the trial itself last.

    Raises:
        ValueError: if the folder is gone.
    """
    require(path.is_dir(), "path", str(path), "a run's folder: it is gone")
    found: dict[int, list[Ancestor]] = {}
    for key, unit in Store.read(path).units().items():
        for line in unit.lines:
            if line["event"] == "trial":
                found[line["trial"]] = [Ancestor(line["trial"], 0, 0, line["config"])]
        if (decision := SWEEP_DECISION.fullmatch(key)) is not None:
            before, at = dict(found), int(decision["epoch"] or 0)
            for number, *plain in unit.value:
                move = move_of(plain)
                if isinstance(move, Continue) and move.copy_of is not None:
                    config = {**before[move.copy_of][-1].config, **move.changes}
                    found[number] = [*_ended(before[move.copy_of], at), Ancestor(number, at, at, config)]
    return {number: _ended(of, epochs.get(number, 0)) for number, of in found.items()}


def _ended(ancestors: Sequence[Ancestor], at: int) -> list[Ancestor]:
    *earlier, last = ancestors
    return [*earlier, replace(last, stop=max(at, last.start))]


def schedule_of(ancestors: Sequence[Ancestor]) -> dict[str, list[tuple[float, Any]]]:
    """Write down how hyperparameters changed along a lineage.

    Returns:
        By key that changed, pairs: the share of the sweep's epochs at which a value began to hold, and the value.

    >>> schedule_of([Ancestor(2, 0, 3, {"lr": 0.1, "momentum": 0.9}), Ancestor(0, 3, 9, {"lr": 0.08, "momentum": 0.9})])
    {'lr': [(0.0, 0.1), (0.333..., 0.08)]}
    """
    end, last = max(1, ancestors[-1].stop), ancestors[-1].config
    keys = [key for key in last if any(ancestor.config.get(key) != last[key] for ancestor in ancestors)]
    return {key: [(a.start / end, a.config.get(key)) for a in ancestors] for key in keys}
