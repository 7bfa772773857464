"""Lineages in population based training: which trials trained a trial's weights, and by which hyperparameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from hydro_rasda.history.history import SCHEDULES, SWEEP_DECISION
from hydro_rasda.history.lines import Unit


@dataclass(frozen=True)
class Ancestor:
    """Epochs of the sweep in which one trial trained weights that another trial now has.

    Attributes:
        start: Number of epochs for which the weights had been trained before this trial trained them.
        stop: Number of epochs for which they had been trained afterwards.
    """

    trial: int
    start: int
    stop: int
    config: Mapping[str, Any]


def lineages(units: Mapping[str, Unit], epochs: Mapping[int, int]) -> dict[int, list[Ancestor]]:
    """Map each trial to its ancestors, the trials that trained its weights, in order. The trial itself comes last.

    A finalist that trains by the schedule of another trial has that trial's ancestors.

    Args:
        epochs: Number of epochs that each trial has trained in the sweep.
    """
    found = {
        line["trial"]: [Ancestor(line["trial"], 0, 0, line["config"])]
        for unit in units.values()
        for line in unit.lines
        if line["event"] == "trial"
    }
    for together in decided_copies(units):
        own = {copy.trial: Ancestor(copy.trial, copy.epoch, copy.epoch, copy.after) for copy in together}
        found |= {copy.trial: [*_ended(found[copy.source], copy.epoch), own[copy.trial]] for copy in together}
    sources = {
        number: source for key, unit in units.items() if key.startswith(SCHEDULES) for number, source, _ in unit.value
    }
    ended = {number: _ended(of, epochs.get(number, 0)) for number, of in found.items()}
    return {number: ended[sources.get(number, number)] for number in ended}


@dataclass(frozen=True)
class Copy:
    """A trial that continued after `epoch` epochs as a copy of trial `source`.

    `replaced` is the trial's configuration before it became a copy. `before` is the source's configuration, and `after`
    is the copy's, which includes the changes.
    """

    epoch: int
    trial: int
    source: int
    replaced: Mapping[str, Any]
    before: Mapping[str, Any]
    after: Mapping[str, Any]


def decided_copies(units: Mapping[str, Unit]) -> Iterator[list[Copy]]:
    """Yield the copies that each decision of population based training made, in the order of the decisions."""
    configs: dict[int, Mapping[str, Any]] = {}
    for key, unit in units.items():
        configs |= {line["trial"]: line["config"] for line in unit.lines if line["event"] == "trial"}
        if (decision := SWEEP_DECISION.fullmatch(key)) is not None:
            at, copies = int(decision["epoch"] or 0), [(number, *copy) for number, _, *copy in unit.value if copy]
            found = [
                Copy(at, number, source, configs[number], configs[source], {**configs[source], **changes})
                for number, source, changes in copies
            ]
            configs |= {copy.trial: copy.after for copy in found}
            yield found


def _ended(ancestors: Sequence[Ancestor], at: int) -> list[Ancestor]:
    *earlier, last = ancestors
    return [*earlier, replace(last, stop=max(at, last.start))]


def schedule_of(ancestors: Sequence[Ancestor]) -> dict[str, list[tuple[float, Any]]]:
    """Return how hyperparameters changed along a lineage.

    Map each changed key to pairs: the share of the sweep's epochs at which a value began to hold, and the value.

    >>> schedule_of([Ancestor(2, 0, 3, {"lr": 0.1, "momentum": 0.9}), Ancestor(0, 3, 9, {"lr": 0.08, "momentum": 0.9})])
    {'lr': [(0.0, 0.1), (0.333..., 0.08)]}
    """
    end, last = max(1, ancestors[-1].stop), ancestors[-1].config
    keys = [key for key in last if any(ancestor.config.get(key) != last[key] for ancestor in ancestors)]
    return {key: [(a.start / end, a.config.get(key)) for a in ancestors] for key in keys}


_STARTS = [step / 20 for step in range(20)]
_FLOORS = [10 ** (-step / 10) for step in range(21)]
_POINTS = 200


def smoothed(ancestors: Sequence[Ancestor]) -> dict[str, Any]:
    """Reduce the changes of a lineage to a few values, with which a new training of any length can start.

    Population based training is greedy, so single steps of its schedules are noise. If `schedule` is constant, the
    learning rate becomes a plateau and a linear decay, as `lr`, `decay_start` and `floor`. They are fitted to the
    logarithm of the learning rate by least squares. Learning rates of parts (`lr.PART`) keep their mean ratio to `lr`.
    Each other key gets its geometric mean over the epochs, or its arithmetic mean if a value is 0 or less.

    Returns:
        The keys of the configuration that change, with their values; empty if nothing changed.

    >>> smoothed([Ancestor(2, 0, 6, {"lr": 0.1, "p": 0.1}), Ancestor(0, 6, 9, {"lr": 0.1, "p": 0.4})])
    {'p': 0.159...}
    """
    raw = schedule_of(ancestors)
    # If an ancestor lacks a key, because a rule added the key later, the key keeps its last value.
    values = {key: _at_points(steps) for key, steps in raw.items() if all(value is not None for _, value in steps)}
    changes: dict[str, Any] = {key: _mean(of) for key, of in values.items()}
    if "lr" in values and may_decay(ancestors[-1].config):
        changes["lr"], start, floor = _trapezoid(values["lr"])
        if floor < 1:
            changes |= {"schedule": "linear", "decay_start": start, "floor": floor}
    for key in changes.keys() & {key for key in values if key.startswith("lr.")} if "lr" in values else ():
        changes[key] = changes["lr"] * _mean([part / whole for part, whole in zip(values[key], values["lr"])])
    return changes


def may_decay(config: Mapping[str, Any]) -> bool:
    """Tell whether a configuration has a constant learning rate that may decay instead.

    Schedule-Free optimizers do not allow a decay.
    """
    optimizers = [str(of) for key, of in config.items() if key.partition(".")[0] == "optimizer"]
    constant = config.get("schedule", "constant") == "constant"
    return constant and not any(name.startswith("schedule_free") for name in optimizers)


def _at_points(steps: Sequence[tuple[float, float]]) -> list[float]:
    """Return the values of a schedule from `schedule_of` at points that are evenly spread over the training."""
    shares = [(at + 0.5) / _POINTS for at in range(_POINTS)]
    return [next(value for start, value in reversed(steps) if start <= share) for share in shares]


def _mean(values: Sequence[float]) -> float:
    if min(values) <= 0:
        return math.fsum(values) / len(values)
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def _trapezoid(rates: Sequence[float]) -> tuple[float, float, float]:
    """Fit a plateau and a linear decay to learning rates at points that are evenly spread over the training.

    Return the plateau's rate, the share of the training at its end, and the last rate relative to the plateau's.
    """
    logs = [math.log(rate) for rate in rates]
    found = []
    for start, floor in product(_STARTS, _FLOORS):
        shares = (max(0.0, ((at + 0.5) / _POINTS - start) / (1 - start)) for at in range(_POINTS))
        left = [of - math.log(1 - (1 - floor) * share) for of, share in zip(logs, shares)]
        mean = math.fsum(left) / len(left)
        found.append((math.fsum((of - mean) ** 2 for of in left), -floor, start, mean))
    _, floor, start, mean = min(found)
    return math.exp(mean), start, -floor
