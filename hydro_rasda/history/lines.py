"""The units of a journal, which record finished work, and the lines that they hold, as plain values."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hydro_rasda.common.argument_checks import in_order
from hydro_rasda.common.heat_names import HeatName
from hydro_rasda.common.short_values import without_address

JournalLine = dict[str, Any]
"""One line of the journal: a dict of plain values, whose key "event" names the kind of the line."""


WIDTHS_OF = "/widths-of-"
"""Part of the key of a unit that says how wide a heat fuses models: `HEAT/widths-of-KIND on MACHINE`."""


EpochTold = tuple[int, int, Mapping[str, Any]]
"""The number of a full-size trial, how many epochs it has trained, and its metrics after the last of them."""


@dataclass(frozen=True)
class Unit:
    """A finished unit of work, as the journal keeps it.

    Attributes:
        value: JSON values that later units and decisions need.
        lines: The unit's metrics and events, one journal line each.
        seconds: Wall time of the unit, in full even if other units ran at the same time.
        at: Wall time of the run when the unit was finished.
        swept: The part of `at` that the sweep took.
        left: The estimate, at that time, of the seconds that the run still takes; None if it was not known.
    """

    value: Any
    lines: list[JournalLine] = field(default_factory=list)
    seconds: float = 0.0
    at: float = 0.0
    swept: float = 0.0
    left: float | None = None


def score_in(metrics: Mapping[str, Any], name: str) -> float | None:
    """Return a metric after an epoch; None if the metric is missing or the training loss was not finite.

    In the journal, a training loss of None means that the loss was not finite. If the training loss is missing, a
    user's function has not reported it, and the metric counts.
    """
    return None if metrics.get("train_loss", 0.0) is None else metrics.get(name)


_PLAIN = frozenset({str, int, bool, type(None)})


def jsonable(value: Any) -> Any:
    """Return a value as strict JSON would give it back.

    NaN and infinities become None. An object that has no JSON form becomes a name; see `name_of`.
    """
    kind = type(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if kind in _PLAIN or isinstance(value, (bool, int, str)):
        return value
    if kind is dict:  # a faster path for most mappings, because `isinstance(value, Mapping)` is slow
        return {str(key): item if type(item) in _PLAIN else jsonable(item) for key, item in value.items()}
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    return name_of(value)


def number_of(value: float | None) -> float:
    """Return a number that went through `jsonable`; None becomes NaN."""
    return math.nan if value is None else float(value)


def name_of(value: Any) -> str:
    """Return a name for a value that has no JSON form. It is the same in every process."""
    if isinstance(value, (set, frozenset)):
        return in_order(value, name_of)
    return getattr(value, "__qualname__", None) or without_address(value)


def decision_key(key: str, candidates: Iterable[int]) -> str:
    """Return the name under which the journal keeps a decision about these trials, whatever their order.

    >>> decision_key("race/to-3/kept", [2, 0, 5])
    'race/to-3/kept/of-3-483537'
    """
    among = sorted(candidates)
    return f"{key}/of-{len(among)}-{hashlib.sha256(repr(among).encode()).hexdigest()[:6]}"


def metric_lines(heat: HeatName, number: int, history: Iterable[tuple[int, Mapping[str, Any]]]) -> list[JournalLine]:
    """Return a trial's epochs as journal lines."""
    return [
        {"event": "metrics", "heat": heat, "trial": number, "epoch": epoch, **metrics} for epoch, metrics in history
    ]


def retry_key(number: int) -> str:
    """Return the name of the unit that takes back a failed build of a trial's model, so that it is built again."""
    return f"sweep/retry-of-{number}"


ERROR_CHARS = 20_000
"""Largest number of characters that are kept of a traceback: a quarter from its beginning, the rest from its end."""


def failure_line(number: int, error: str) -> JournalLine:
    """Return the journal's line for a failed trial."""
    return {"event": "failed", "trial": number, "error": shortened(error)}


def shortened(error: str) -> str:
    """Limit the length of a traceback, because the `repr` of a big object in it may have millions of characters."""
    if len(error) <= ERROR_CHARS:
        return error
    first, last = error[: ERROR_CHARS // 4], error[-3 * ERROR_CHARS // 4 :]
    return f"{first}\n[{len(error) - len(first) - len(last)} characters are left out]\n{last}"
