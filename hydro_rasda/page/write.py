"""The page itself: its HTML and scripts, as a file that needs nothing else, or as a dashboard serves it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from hydro_rasda.page import words
from hydro_rasda.page.drawing import Drawing
from hydro_rasda.page.embed import packed_figures, packed_plotly, plotly, policy
from hydro_rasda.page.sections import sections
from hydro_rasda.plots.look import EXTRA, graph_objects
from hydro_rasda.results.reading import Unreadable, or_why, stamp
from hydro_rasda.results.records import RunRecord
from hydro_rasda.results.report import explained, state_of
from hydro_rasda.run.files import write_atomically


def write_page(record: RunRecord, path: Path) -> Path:
    """Write a run as one page, which needs nothing else, neither files nor a network.

    Raises:
        ImportError: if the packages that draw it are not there; it says what to install.
    """
    path = Path(path).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, Page(record).html().encode())
    return path


class Page:
    """A run as a page.

    Attributes:
        drawings: Its figures and its table of trials, by name.
    """

    def __init__(self, record: RunRecord) -> None:
        graph_objects()  # says what to install
        self._record = record.shown()
        self._sections = [*sections(self._record)]
        self.drawings: dict[str, Drawing] = {each.name: each for part in self._sections for each in part.drawings}

    def html(self, live: bool = False) -> str:
        """The page's HTML.

        Args:
            live: True if the dashboard serves it: the page then loads Plotly and its figures from there, each when the
                reader comes near it, and follows the run. No figure is drawn for that now.
        """
        record, template = self._record, _template("template.html")
        written = _written(record) if live else None
        own = {"style": _own("style.css"), "written": written, **self._scripts(live)}
        title, state, counts = record.path.name, state_of(record), words.counts(record)
        html: str = template.render(title=title, state=state, counts=counts, sections=self._sections, live=live, **own)
        return html

    def _scripts(self, live: bool) -> dict[str, Any]:
        """The scripts of the page, what they read, and the policy that allows no others."""
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
