"""Make the HTML page with its scripts, as one file that needs nothing else, or for the dashboard, which serves it."""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

from hydro_rasda.common.argument_checks import require
from hydro_rasda.common.optional_packages import needed_by
from hydro_rasda.common.short_values import show
from hydro_rasda.plots.curves import best_scores, winners_curves
from hydro_rasda.plots.figure_style import graph_objects, nothing
from hydro_rasda.plots.page import words
from hydro_rasda.plots.page.sections import Drawing, Section, asked_of, drawing, sections
from hydro_rasda.plots.timeline_and_cost import costs
from hydro_rasda.records.comparison_of_runs import compared, names_of, verdict
from hydro_rasda.records.record_from_journal import Unreadable, or_why, stamp
from hydro_rasda.records.records import RunRecord
from hydro_rasda.records.report import explained, sentence, state_of
from hydro_rasda.run.files import write_atomically


def sections_of(records: Sequence[RunRecord]) -> Iterator[Section]:
    """Yield the sections of the page of several runs, from top to bottom."""
    asked, names = [asked_of(record) for record in records], names_of(records)
    told = compared(records, asked)
    decided = verdict(records, asked)
    decided = f"{decided}." if decided.startswith(tuple(names)) else sentence(decided)
    yield Section("Answer", [decided], table=_table(names, told["found"]))
    used = [words.configuration(record) for record in records]
    alike = {name: value for name, value in used[0].items() if all(each.get(name) == value for each in used)}
    rows = {name: [each.get(name, "") for each in used] for each in used for name in each if name not in alike}
    same = ["The same in all: " + ", ".join(f"{name}={value}" for name, value in alike.items()) + "."] if alike else []
    yield Section("Best configurations", same, table=_table(names, rows))
    spent = [words.cost_facts(record) for record in records]
    rows = {name: [each.get(name, "") for each in spent] for each in spent for name in each}
    yield Section("Cost", table=_table(names, rows), figures=[drawing(costs, records)])
    dotted = "Solid lines are the race, dotted ones the sweep."
    figures = [drawing(_comparable(best_scores), records, name="best-scores")]
    yield Section("Best score over time", [dotted], figures=figures)
    figures = [drawing(_comparable(winners_curves), records, name="winners-curves")]
    yield Section("Learning curves of the best trials", [dotted], figures=figures)
    differing = {**told["asked"], **told["code and data"]}
    why = "The same of all." if all(asked) else "What differs is not known: a run's folder is gone."
    yield Section("What was asked", [] if differing else [why], table=_table(names, differing))


def _comparable(make: Callable[[Sequence[RunRecord]], Any]) -> Callable[[Sequence[RunRecord]], Any]:
    """Wrap a figure of several runs so that it is drawn only if all runs have the same metric."""

    def drawn(records: Sequence[RunRecord]) -> Any:
        return make(records) if len({(r.metric, r.mode) for r in records}) == 1 else nothing("the metrics differ")

    return drawn


def _table(names: Sequence[str], rows: Mapping[str, Sequence[Any]]) -> list[list[str]]:
    told = [[name, *(show(value, 6) for value in values)] for name, values in rows.items()]
    return [["", *names], *told] if told else []


def write_page(records: Sequence[RunRecord], path: Path) -> Path:
    """Write one run, or several side by side, as one page that needs neither other files nor a network."""
    path = Path(path).expanduser()
    # A device such as /dev/null must not be replaced by a file.
    regular = path.is_file() or not path.exists()
    require(regular, "path", str(path), "the page's file, which is no folder or device, such as 'page.html'")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, Page(*records).html().encode())
    return path


class Page:
    """The page of one run, or of several side by side; `drawings` has its figures and its table of trials by name."""

    def __init__(self, *records: RunRecord) -> None:
        graph_objects()  # without Plotly, this raises an error that says what to install
        self._records = [record.shown() for record in records]
        one = len(records) == 1
        self._sections = [*(sections(self._records[0]) if one else sections_of(self._records))]
        self.drawings: dict[str, Drawing] = {each.name: each for part in self._sections for each in part.drawings}

    def html(self, live: bool = False) -> str:
        """Return the HTML of the page.

        A `live` page follows the run. It loads Plotly from the dashboard, and each figure when the reader scrolls near
        it; no figure is drawn before. Any other page holds Plotly and all figures itself.
        """
        record, *others = self._records
        names, states = names_of(self._records), [*map(state_of, self._records)]
        head = {"title": names[0], "state": states[0], "counts": words.counts(record), "root": "../../"}
        if others:
            told = ", ".join(f"{name}: {explained(state)}" for name, state in zip(names, states))
            head = {"title": ", ".join(names), "state": "", "counts": told, "root": "../"}
        written = max(filter(None, map(_written, self._records)), default=None) if live else None
        own = {"style": _own("style.css"), "written": written, "live": live, **self._scripts(live)}
        return _rendered("template.html", sections=self._sections, **head, **own)

    def _scripts(self, live: bool) -> dict[str, Any]:
        """Return the scripts of the page, their data, and the content security policy that allows no other script."""
        from markupsafe import Markup

        first = 'document.documentElement.className = "draws";'
        if not live:
            first = f'if ("DecompressionStream" in window) {{ {first} }}'
        script = _own("trials.js") + _own("page.js") + _own("live.js" if live else "packed.js")
        found = {"first": Markup(first), "script": script}
        if live:
            return found | {"policy": policy([first, script], served=True)}
        figures = {name: json for name, each in self.drawings.items() if (json := each.drawn().json)}
        found |= {"figures": Markup(packed_figures(figures)), "plotly": Markup(packed_plotly())}
        return found | {"policy": policy([first, script, plotly()], served=False)}


def _written(record: RunRecord) -> float | None:
    """Return when a run's journal was last written, in seconds since 1970; None if its folder is gone."""
    with contextlib.suppress(OSError):
        return stamp(record.path)[1] / 1e9
    return None


def prepare() -> None:
    """Import the packages that a page needs, so that the first page of a dashboard does not take a second longer."""
    with contextlib.suppress(ImportError):  # if a package is missing, the page itself says what to install
        import optuna.importance
        import sklearn.ensemble  # noqa: F401

        graph_objects().Scatter()
        optuna.importance.FanovaImportanceEvaluator()


def list_page(runs: Sequence[tuple[str, RunRecord | Unreadable, float]], folder: Path) -> str:
    """Return the HTML of the dashboard's list of runs.

    `runs` has for each run its name, its record or why it cannot be read, and when it was last written.
    """
    rows = []
    for name, record, when in runs:
        idle = time.time() - when
        found = record if isinstance(record, Unreadable) else or_why(partial(words.row, record, idle))
        state, *cells = ["not readable", *[""] * 5, found] if isinstance(found, Unreadable) else found
        rows.append((name, state, cells, datetime.fromtimestamp(when).astimezone()))
    notes = [explained("interrupted")] if any(state == "interrupted" for _, state, *_ in rows) else []
    script = _own("runs.js")
    own = {"style": _own("style.css"), "script": script, "policy": policy([script], served=True, forms=True)}
    return _rendered("runs.html", runs=rows, folder=folder, notes=notes, **own)


def _own(name: str) -> Any:
    import markupsafe

    return markupsafe.Markup((Path(__file__).parent / name).read_text(encoding="utf-8"))


def _rendered(name: str, **values: Any) -> str:
    """Render a template. All values of a run are escaped, as are characters that UTF-8 lacks (bytes of a file name)."""
    with needed_by("a page", "report"):
        import jinja2
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string((Path(__file__).parent / name).read_text(encoding="utf-8"))
    html: str = template.render(**values)
    return html.encode(errors="backslashreplace").decode()


def packed(text: str) -> str:
    """Compress a text into characters that cannot end a script, for `packed.js` to unpack.

    It is gzip in the base 85 of `base64.b85encode`, with a comma for "<". In base 64, a page would exceed 2 MB.
    """
    return base64.b85encode(gzip.compress(text.encode(), 9, mtime=0)).decode().replace("<", ",")


def packed_figures(figures: Mapping[str, str]) -> str:
    """Compress the JSON of figures, by name; a list of values that several figures share is stored once."""
    lists: dict[str, int] = {}

    def held(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: held(each) for name, each in value.items()}
        if not isinstance(value, list):
            return value
        if len(value) < _LONG or isinstance(value[0], (dict, list)):
            return [held(each) for each in value]
        return {"$list": lists.setdefault(_json(value), len(lists))}

    text = _json({name: held(json.loads(figure)) for name, figure in figures.items()})
    return packed(f"[[{','.join(lists)}],{_json(text)}]")


_LONG = 20


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


@cache
def packed_plotly() -> str:
    """Return Plotly's script, compressed; each process compresses it once."""
    return packed(plotly())


@cache
def plotly() -> str:
    """Return Plotly's script."""
    from plotly.offline import get_plotlyjs

    script: str = get_plotlyjs()
    return script


@cache
def digest(script: str) -> str:
    """Return the hash by which a content security policy names a script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def policy(scripts: Iterable[str], served: bool, forms: bool = False) -> str:
    """Return the content security policy of a page that runs only `scripts`, and makes no requests.

    A `served` page may ask its server for scripts and data; with `forms`, it may also send that server a form.
    """
    own = "'self' " if served else ""
    rules = {
        "default-src": "'none'",
        # Plotly's parallel coordinates need 'unsafe-eval': regl, which draws them, makes JavaScript functions of text.
        "script-src": f"{own}'unsafe-eval' {' '.join(map(digest, scripts))}",
        "style-src": "'unsafe-inline'",  # for Plotly, which sets inline styles
        "img-src": "data: blob:",  # for Plotly's button that saves a figure
        "base-uri": "'none'",
        "form-action": "'self'" if forms else "'none'",
    }
    rules |= {"connect-src": own} if served else {}
    return "; ".join(f"{name} {value.strip()}" for name, value in rules.items())
