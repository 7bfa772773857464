"""The page itself: sections in the order in which people ask, each with words and figures."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from hydro_rasda import plots
from hydro_rasda.console import show
from hydro_rasda.page import words
from hydro_rasda.page.call import call_of
from hydro_rasda.page.embed import packed_figures, packed_plotly, plotly, policy
from hydro_rasda.plots.importance import importance_bars, importance_of
from hydro_rasda.plots.look import EXTRA, graph_objects, is_empty, nothing
from hydro_rasda.results.reading import Unreadable, or_why, stamp
from hydro_rasda.results.records import RunRecord
from hydro_rasda.results.report import best_first, explained, state_of, varied
from hydro_rasda.results.timeline import journal_of
from hydro_rasda.run.files import write_atomically
from hydro_rasda.run.spec import read_asked

SLICES = 12
"""Hyperparameters that have a slice of their own on the page, the most important."""


@dataclass(frozen=True)
class Figure:
    """A figure as a page holds it.

    Attributes:
        name: Its element's.
        json: Data for Plotly, safe within a script.
        height: Pixels.
        wide: True if it is read only on a wide screen; a narrow one scrolls it.
        note: Why there is nothing to show; then nothing is drawn.
    """

    name: str
    json: str
    height: int
    wide: bool = False
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A part of the page."""

    title: str
    sentences: list[str] = field(default_factory=list)
    facts: Mapping[str, str] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    failures: list[tuple[str, str, str]] = field(default_factory=list)
    code: str = ""
    table: str = ""
    grid: bool = False


def write_page(record: RunRecord, path: Path) -> Path:
    """Write a run as one page, which needs nothing else, neither files nor a network.

    Raises:
        ImportError: if the packages that draw it are not there; it says what to install.
    """
    path = Path(path).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page(record).encode())
    return path


def page(record: RunRecord, live: bool = False) -> str:
    """The page's HTML.

    Args:
        live: True if the dashboard serves it: it then loads Plotly from there, and follows the run.
    """
    template, record = _template("template.html"), record.shown()
    graph_objects()  # says what to install
    written, made = _written(record) if live else None, [*sections(record)]
    own = {"style": _own("style.css"), "written": written, **_scripts(made, live)}
    title, state, counts = record.path.name, state_of(record), words.counts(record)
    html: str = template.render(title=title, state=state, counts=counts, sections=made, live=live, **own)
    return html


def _scripts(made: Sequence[Section], live: bool) -> dict[str, Any]:
    """The scripts of a page, what they read, and the policy that allows no others."""
    from markupsafe import Markup

    first = 'document.documentElement.className = "draws";'
    if not live:
        first = f'if ("DecompressionStream" in window) {{ {first} }}'
    script = _own("trials.js") + _own("page.js") + _own("live.js" if live else "packed.js")
    found = {"first": Markup(first), "script": script}
    if live:
        return found | {"policy": policy([first, script], served=True)}
    figures = {figure.name: figure.json for section in made for figure in section.figures if figure.json}
    tables = [("trials", section.table) for section in made if section.table]
    found |= {"figures": Markup(packed_figures(figures | dict(tables))), "plotly": Markup(packed_plotly())}
    return found | {"policy": policy([first, script, plotly()], served=False)}


def _written(record: RunRecord) -> float | None:
    """When a run's journal was last written, in seconds since 1970; None if its folder is gone."""
    with contextlib.suppress(OSError):
        return stamp(record.path)[1] / 1e9
    return None


def prepare() -> None:
    """Import the packages that a page needs: without this, a dashboard's first page waits for more than a second."""
    with contextlib.suppress(ImportError):  # the page says what to install
        import optuna.importance
        import sklearn.ensemble  # noqa: F401

        graph_objects().Scatter()
        optuna.importance.FanovaImportanceEvaluator()


def list_page(runs: Sequence[tuple[str, RunRecord | Unreadable, float]], folder: Path) -> str:
    """The HTML of the dashboard's list of a folder's runs.

    Args:
        runs: Of each, its name; its record, or why it cannot be read; when it was written, in seconds since 1970.
    """
    rows = []
    for name, record, when in runs:
        found = record if isinstance(record, Unreadable) else or_why(partial(words.row, record))
        state, *cells = ["not readable", *[""] * 4, found] if isinstance(found, Unreadable) else found
        rows.append((name, state, cells, datetime.fromtimestamp(when).isoformat(timespec="minutes")))
    notes = [explained("interrupted")] if any(state == "interrupted" for _, state, *_ in rows) else []
    template, script = _template("runs.html"), _own("runs.js")
    own = {"style": _own("style.css"), "script": script, "policy": policy([script], served=True)}
    html: str = template.render(runs=rows, folder=folder, notes=notes, **own)
    return html


def _own(name: str) -> Any:
    """A file of the library's own, which goes in as it is."""
    import markupsafe

    return markupsafe.Markup((Path(__file__).parent / name).read_text())


def _template(name: str) -> Any:
    """A template in which all that comes from a run is escaped."""
    try:
        import jinja2
    except ImportError as error:
        raise ImportError(f"a page needs {error.name}, which is not there: {EXTRA}") from error
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string((Path(__file__).parent / name).read_text())


def sections(record: RunRecord) -> Iterator[Section]:
    """Yield the sections of the page, from top to bottom."""
    asked, units = _asked(record), journal_of(record)
    best = words.configuration(record)
    yield Section("Answer", words.answer(record), best)
    if len(record.comparison.objectives) > 1:
        joined = "Full-size models. No other one is better in each metric than those on the line."
        yield Section("Front", [joined], figures=[_draw(plots.front, record)])
    yield Section("Cost", facts=words.cost_facts(record, asked.get("max_t")), figures=[_draw(plots.cost, record)])
    yield Section("Best score over time", figures=[_draw(plots.best_over_time, record)])
    fates = "Surrogates by the epoch at which they fell (of more than 60, quantiles); finalists again below."
    rungs = "Dotted lines are rungs, and tell how many went on."
    yield Section("Learning curves", [f"{fates} {rungs}"], figures=[_draw(plots.learning_curves, record)])
    close = "Finalists are the best of all surrogates, and lie closer together than all do: agreement is harder."
    yield Section("Narrow against full size", [close], figures=[_draw(plots.narrow_vs_full, record)])
    yield from _of_hyperparameters(record)
    beside = "Numbers are the trials of a fused group. Bars above each other trained at the same time."
    yield Section("Timeline", [beside], figures=[_draw(plots.timeline, record, wide=True)])
    click = "Click the head of a column to sort. Click a point of a figure above to see its trial here."
    table = _table(record)
    yield Section("Trials", [click if table else "No trial has begun."], table=table)
    failed = words.failures(record)
    yield Section("Failures", [] if failed else ["No trial raised."], failures=failed)
    yield Section("Environment", facts=words.environment(asked, units), code=call_of(asked) if asked else "")


def _of_hyperparameters(record: RunRecord) -> Iterator[Section]:
    important = importance_of(record)
    bars = importance_bars(important) if important else nothing(f"{len(record.trials)} trials are too few to tell")
    # As successive halving orders trials, for they stop at different epochs.
    told = "Optuna's fANOVA of a trial's place among all: who got furthest, then who scored best."
    yield Section("Importance of hyperparameters", [told], figures=[_hold(bars, "importances")])
    names = [*dict.fromkeys([*important, *varied(record)])][:SLICES]
    drawn = [_draw(plots.slices, record, [name], name=f"slice-{i}") for i, name in enumerate(names)]
    diamonds = "Diamonds are scores at full size, dots on surrogates; orange ones trained longest."
    yield Section("Slices", [diamonds], figures=drawn or [_draw(plots.slices, record)], grid=bool(drawn))
    yield Section("The two most important", figures=[_draw(plots.score_map, record, *names[:2])])
    drag = "Drag along an axis to choose trials; drag its name to move it."
    yield Section("Parallel coordinates", [drag], figures=[_draw(plots.parallel_coordinates, record, wide=True)])


def _table(record: RunRecord) -> str:
    """All trials, the best first, as `trials.js` takes them; "" where there is none.

    They are columns, which compress better than rows: what differs between trials, and their scores.
    """
    if not record.trials:
        return ""
    trials, metric = best_first(record), record.metric
    columns: dict[str, list[Any]] = {
        "trial": [trial.trial for trial in trials],
        "state": [trial.status for trial in trials],
        metric: [trial.metric if trial.epochs else None for trial in trials],
        "epochs": [trial.epochs or None for trial in trials],
        f"surrogate {metric}": [trial.surrogate_metric if trial.surrogate_epochs else None for trial in trials],
        "surrogate epochs": [trial.surrogate_epochs or None for trial in trials],
    }
    for name in record.others:
        columns[name] = [trial.metrics.get(name) for trial in trials]
    used = [trial.used for trial in trials]
    own = {name: [values.get(name) for values in used] for name in varied(record)}
    named = [*columns.items(), *own.items()]  # a hyperparameter may have the name of another column
    return _safe({"heads": [name for name, _ in named], "columns": [[*map(_cell, values)] for _, values in named]})


def _cell(value: Any) -> float | str:
    """A number to four digits, which the page sorts by; any other value as text, "" for none."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < _EXACT:
        return value
    return float(f"{value:.4g}") if isinstance(value, float) and math.isfinite(value) else show(value, 4)


_EXACT = 2**53
"""Below it, a browser's numbers hold all whole ones."""


def _asked(record: RunRecord) -> dict[str, Any]:
    """The run's `run.json`; nothing where its folder is gone."""
    try:
        return read_asked(record.path)
    except ValueError:
        return {}


def _draw(make: Callable[..., Any], record: RunRecord, *more: Any, name: str = "", wide: bool = False) -> Figure:
    return _hold(make(record, *more), name or make.__name__.replace("_", "-"), wide)


def _hold(figure: Any, name: str, wide: bool = False) -> Figure:
    """A figure of Plotly's as the page holds it."""
    if is_empty(figure):
        return Figure(name, "", 0, note=figure.layout.annotations[0].text)
    written = json.loads(figure.to_json())
    written["layout"].pop("template", None)  # the page has its own, light and dark
    return Figure(name, _safe(written), figure.layout.height, wide)


def _safe(value: Any) -> str:
    """A value as JSON within a script: nothing in it may end the script, or begin a comment."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
