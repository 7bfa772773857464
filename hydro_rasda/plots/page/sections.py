"""The sections of the page of one run, in the order of the questions that people ask."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeVar

from hydro_rasda import plots
from hydro_rasda.common.heat_names import HeatName
from hydro_rasda.common.short_values import show
from hydro_rasda.history.lineage import decided_copies
from hydro_rasda.plots.figure_style import HEIGHT, begun, is_empty, nothing
from hydro_rasda.plots.hyperparameters import LINES, importance_bars, importance_of, too_few
from hydro_rasda.plots.page import words
from hydro_rasda.plots.page.words import call_of
from hydro_rasda.records.records import RunRecord, in_heat
from hydro_rasda.records.report import best_first, status_of, varied
from hydro_rasda.records.timeline import journal_of
from hydro_rasda.run.run_json import read_asked

T = TypeVar("T")


class Once(Generic[T]):
    """Calls a function when its result is first asked for, and keeps the result. Threads wait for the first call."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make, self._lock, self._made = make, Lock(), list[T]()

    def __call__(self) -> T:
        with self._lock:
            if not self._made:
                self._made.append(self._make())
            return self._made[0]


@dataclass(frozen=True)
class Drawn:
    """A figure as a page holds it: JSON that is safe inside a script, or a note why there is nothing to show."""

    json: str
    height: int = HEIGHT
    note: str = ""

    @property
    def served(self) -> str:
        """The JSON that the dashboard sends: the figure, or the note."""
        return self.json or safe({"note": self.note})


class Drawing(NamedTuple):
    """A figure, or the table of trials, with the id of its HTML element; `drawn` draws it."""

    name: str
    drawn: Callable[[], Drawn]


@dataclass(frozen=True)
class Section:
    """A part of the page.

    The first row of `table` has the headings of its columns. Each item of `failures` has a summary line, a
    configuration, and a traceback. If `grid` is True, the figures are small and side by side.
    """

    title: str
    sentences: list[str] = field(default_factory=list)
    facts: Mapping[str, str] = field(default_factory=dict)
    table: Sequence[Sequence[str]] = ()
    figures: list[Drawing] = field(default_factory=list)
    trials: Drawing | None = None
    failures: list[tuple[str, str, str]] = field(default_factory=list)
    code: str = ""
    grid: bool = False

    @property
    def drawings(self) -> list[Drawing]:
        """The figures and the table of trials, which the page's scripts draw."""
        return [*self.figures, *([self.trials] if self.trials else [])]


def drawing(make: Callable[..., Any], *arguments: Any, name: str = "") -> Drawing:
    """Make a drawing of the Plotly figure that `make(*arguments)` returns. `make` is called once, when first needed."""
    return Drawing(name or make.__name__.replace("_", "-"), Once(lambda: _held(make(*arguments))))


def _held(figure: Any) -> Drawn:
    if is_empty(figure):
        return Drawn("", note=html.unescape(figure.layout.annotations[0].text))
    written = json.loads(figure.to_json())
    written["layout"].pop("template", None)  # the page has its own templates, a light and a dark one
    return Drawn(safe(written), figure.layout.height)


def safe(value: Any) -> str:
    """Return a value as JSON without "<" for an HTML script, so that no text can end the script or begin a comment."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


SLICES = 12
"""The most hyperparameters that have a slice on the page. If there are more, the most important have one."""


def sections(record: RunRecord) -> Iterator[Section]:
    """Yield the sections of the page, from top to bottom."""
    asked, units = asked_of(record), journal_of(record)
    best = words.configuration(record)
    yield Section("Answer", words.answer(record), best)
    if record.comparison.several:
        joined = "Full-size models. No other one is better in each metric than those on the line."
        yield Section("Front", [joined], figures=[drawing(plots.front, record)])
    yield Section("Cost", facts=words.cost_facts(record), figures=[drawing(plots.cost, record)])
    yield Section("Best score over time", figures=[drawing(plots.best_over_time, record)])
    fates = (
        "Surrogates have the color of the epoch at which the sweep stopped them. More than 60 are shown as bands, "
        "within which the middle 50 and 80 % of the scores lie. Finalists are drawn again below."
    )
    rungs = "Dotted lines are rungs, and tell how many went on."
    yield Section("Learning curves", [f"{fates} {rungs}"], figures=[drawing(plots.learning_curves, record)])
    if any(decided_copies(units)):
        lines = "A grey line is a trial, a blue one a copy; orange is the lineage of the best trial."
        yield Section("Population", [lines], figures=[drawing(plots.population, record)])
    close = "Finalists are the best of all surrogates, and lie closer together than all do: agreement is harder."
    yield Section("Narrow against full size", [close], figures=[drawing(plots.narrow_vs_full, record)])
    yield from _of_hyperparameters(record)
    beside = "Numbers are the trials of a fused group. Bars above each other trained at the same time."
    yield Section("Timeline", [beside], figures=[drawing(plots.timeline, record)])
    click = "Click the head of a column to sort. Click a point of a figure above to see its trial here."
    table = Drawing("trials", Once(lambda: Drawn(_table(record)))) if record.trials else None
    yield Section("Trials", [click if table else "No trial has begun."], trials=table)
    failed = words.failures(record)
    yield Section("Failures", [] if failed else ["No trial raised."], failures=failed)
    yield Section("Environment", facts=words.environment(asked, units), code=call_of(asked) if asked else "")


def _of_hyperparameters(record: RunRecord) -> Iterator[Section]:
    important, names = Once(lambda: importance_of(record)), varied(record)
    ranked = Once(lambda: sorted(names, key=lambda name: -important().get(name, -1.0)))

    def importances() -> Any:
        return importance_bars(important()) if important() else nothing(too_few(record))

    def sliced(place: int) -> Any:
        return plots.slices(record, ranked()[place : place + 1])

    # Trials stop at different epochs, so they are ranked as successive halving ranks them.
    told = "Optuna's fANOVA of a trial's place among all: who got furthest, then who scored best."
    yield Section("Importance of hyperparameters", [told], figures=[drawing(importances)])
    slices = [drawing(sliced, i, name=f"slice-{i}") for i in range(min(SLICES, len(names)))]
    diamonds = "Diamonds are scores at full size, dots on surrogates; orange ones trained longest."
    yield Section("Slices", [diamonds], figures=slices or [drawing(plots.slices, record)], grid=bool(slices))
    figures = [drawing(lambda: plots.score_map(record, *ranked()[:2]), name="score-map")]
    yield Section("The two most important", figures=figures)
    drag = "Drag along an axis to choose trials; drag its name to move it."
    told = f"Axes stand by importance; a narrow screen has the first three. {drag}"
    if (number := len(begun(record))) > LINES:
        told += f" Of {number} trials, the best {LINES // 2} and an even sample of the others are drawn."
    figures = [drawing(lambda: plots.parallel_coordinates(record, ranked()), name="parallel-coordinates")]
    yield Section("Parallel coordinates", [told], figures=figures)


def _table(record: RunRecord) -> str:
    """Return the table of all trials as JSON for `trials.js`, the best trial first.

    It has scores, and the hyperparameters that differ. It is stored by column, which compresses better than rows.
    """
    trials, metric = best_first(record), record.metric
    columns: dict[str, list[Any]] = {
        "trial": [trial.trial for trial in trials],
        "state": [status_of(trial) for trial in trials],
    }
    heats: tuple[HeatName, ...] = ("race", "sweep", "middle")
    for heat in heats:
        prefix = "" if heat == "race" else f"{heat} "
        reached = [in_heat(trial, heat) for trial in trials]
        if heat != "middle" or any(epochs for _, epochs in reached):
            columns[f"{prefix}{metric}"] = [score if epochs else None for score, epochs in reached]
            columns[f"{prefix}epochs"] = [epochs or None for _, epochs in reached]
    for name in record.others:
        columns[name] = [trial.metrics.get(name) for trial in trials]
    used = [trial.used for trial in trials]
    # The page sorts by the name of a column, so a hyperparameter with the name of another column gets a prefix.
    own = {name: f"config/{name}" if name in columns else name for name in varied(record)}
    columns |= {head: [values.get(name) for values in used] for name, head in own.items()}
    return safe({"heads": [*columns], "columns": [[*map(_cell, values)] for values in columns.values()]})


def _cell(value: Any) -> float | str:
    """Return a number for the page to sort by (floats have four digits); other values as text, "" for None."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < _EXACT:
        return value
    return float(f"{value:.4g}") if isinstance(value, float) and math.isfinite(value) else show(value, 4)


_EXACT = 2**53
"""Browsers represent all integers below this exactly."""


def asked_of(record: RunRecord) -> dict[str, Any]:
    """Return the contents of the run's `run.json`; an empty dict if the folder is gone."""
    try:
        return read_asked(record.path)
    except ValueError:
        return {}
