"""The progress display of a run: its folder, its messages, and one bar on a terminal or in a notebook.

Elsewhere, it prints a line a minute.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import rich.progress
from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from hydro_rasda.common.console import LINE_SECONDS, PrintableConsole, duration, make_console
from hydro_rasda.common.heat_names import HEAT_NAMES
from hydro_rasda.common.short_values import show
from hydro_rasda.history.lines import score_in
from hydro_rasda.records.records import RunRecord
from hydro_rasda.records.report import closing_lines
from hydro_rasda.run.events import (
    EpochEnded,
    EpochsTrained,
    Event,
    HeatBegan,
    HeatEnded,
    MessageSaid,
    RunBegan,
    RungDecided,
)
from hydro_rasda.run.time_left import LEAST_TOLD, roughly


class _SilentConsole(PrintableConsole):
    """A console that prints nothing more once writing fails, as in a pipe to `head` or on a full disk."""

    def __exit__(self, *raised: Any) -> None:
        try:
            super().__exit__(*raised)
        except OSError:
            self.quiet = True

    def on_broken_pipe(self) -> None:
        self.quiet = True
        # Let stdout lead nowhere. Otherwise, Python would try to flush it at exit, and fail again.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class _TimeLeftColumn(ProgressColumn):
    """The time left, counted down between two estimates; empty before the first estimate."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        left, at = task.fields["left"]
        if left is None:
            return Text("")
        seconds = max(0, math.ceil(left - (task.get_time() - at)))
        return Text(f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} left", style="progress.remaining")


class _NoteColumn(ProgressColumn):
    """A note, which is cut short if the line is too narrow for all columns."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["note"], style="dim", no_wrap=True, overflow="ellipsis")


class Progress:
    """The callback that shows a run on a console.

    On a terminal there is one bar for the whole run. Elsewhere, as in the logs of batch systems or with TERM=dumb, a
    line reports progress once no line has been printed for a minute. The bar and the lines tell the share of the run's
    time that has passed. While the time left is unknown, they count epochs. They also name the leader of the heat: the
    trial with the best latest score among those that may still train. At full size, the leader is the trial that ranked
    first at the last decision.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or make_console(cls=_SilentConsole)
        # On a terminal of 80 columns, show a shorter bar and fewer times, so that the best score is not cut short.
        self._narrow = self.console.width < 110
        self._bars = rich.progress.Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=8 if self._narrow else 30),
            TaskProgressColumn(),
            *([] if self._narrow else [TimeElapsedColumn()]),
            _TimeLeftColumn(table_column=Column(no_wrap=True)),
            _NoteColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_interactive,
        )
        self._task = self._bars.add_task("", total=None, note="", left=(None, 0.0), visible=False)
        self._said: float | None = None
        self._asked: RunBegan | None = None
        self._began: HeatBegan | None = None
        self._trained = 0
        self._left: float | None = None
        self._scores = {heat: dict[int, tuple[float, int]]() for heat in HEAT_NAMES}
        self._first: int | None = None

    @property
    def _has_bar(self) -> bool:
        return self.console.is_interactive

    def on_event(self, event: Event) -> None:
        if isinstance(event, MessageSaid):
            self._say(event.text, event.seconds)
        elif isinstance(event, EpochsTrained):
            self._advance(event)
        elif isinstance(event, EpochEnded):
            self._compare(event)
        elif isinstance(event, RungDecided):
            for number in {*event.candidates} - {*event.kept}:
                self._scores[event.heat].pop(number, None)
            if event.heat == "race":
                self._first = next(iter(event.kept), None)
            self._show()
        elif isinstance(event, RunBegan):
            self._asked = event
            path = typed(event.path)
            self._say(f"Run folder: {event.path}", event.seconds)
            self._say(f"Follow it from another terminal: hydro-rasda watch {path}", event.seconds)
        elif isinstance(event, HeatBegan):
            self._began, self._trained = event, 0
            self._show()
        elif isinstance(event, HeatEnded):
            self._began = None

    def conclude(self, result: RunRecord) -> None:
        """Show the result, its cost, and the next command to type."""
        self._bars.stop()
        for line in closing_lines(result, typed(result.path)):
            self._say(line, math.inf)

    def _advance(self, event: EpochsTrained) -> None:
        if self._began is None:
            return
        self._trained += event.epochs
        self._left = event.seconds_left
        if self._left is not None:
            whole = event.seconds + self._left
            share = max(event.seconds / whole if whole > 0 else 0.0, self._bars.tasks[self._task].completed)
            self._bars.update(self._task, total=1.0, completed=share, left=(self._left, time.monotonic()))
        self._show(event.note)
        if self._said is None:
            self._said = event.seconds
        if not self._has_bar and event.seconds - self._said >= LINE_SECONDS:
            share = self._bars.tasks[self._task].completed
            done, seconds = f"{self._trained} of {self._began.epochs} epochs", self._left or 0.0
            if self._left is not None:
                done = f"{share:.0%} of the run"
            left = f", about {roughly(seconds)} left" if seconds >= LEAST_TOLD else ""
            best = self._leader() or event.note
            note = f", {best}" if best else ""
            self._say(f"{self._began.heat}: {done} after {duration(event.seconds)}{left}{note}", event.seconds)

    def _compare(self, event: EpochEnded) -> None:
        """Keep a trial's score after an epoch, to find the leader; drop the trial's score if it is not finite."""
        if self._asked is None:
            return
        value, scores = score_in(event.metrics, self._asked.metric), self._scores[event.heat]
        if value is None:
            scores.pop(event.trial, None)
        else:
            scores[event.trial] = value, event.epoch
        self._show()

    def _show(self, note: str = "") -> None:
        if self._began is None:
            return
        epochs = f" {self._trained}/{self._began.epochs} epochs" if self._left is None else ""
        self._bars.update(
            self._task, description=f"{self._began.heat}{epochs}", note=self._leader() or note, visible=True
        )

    def _leader(self) -> str:
        """Name the trial that leads, with its latest score and epoch in the heat; empty before the first score."""
        if self._asked is None or self._began is None:
            return ""
        part = self._began.heat
        if not (scores := self._scores["sweep" if part == "transfer check" else part]):
            return ""
        sign = 1 if self._asked.mode == "min" else -1
        best = self._first if self._first in scores else min(scores, key=lambda number: sign * scores[number][0])
        # Beside the bar of a narrow terminal, there is no room for the metric's name.
        what = ": " if self._narrow and self._has_bar else f" with {self._asked.metric} "
        score, epoch = scores[best]
        return f"trial {best} leads{what}{show(score, 4)} (epoch {epoch})"

    def _say(self, text: str, seconds: float) -> None:
        """Print a line above the bar, unchanged: long paths are not wrapped, and brackets are not read as markup."""
        self.console.print(text, markup=False, soft_wrap=True)
        self._said = seconds

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()


DRAW_SECONDS = 0.5
"""The minimum time in seconds between two drawings of the bar."""


class NotebookProgress(Progress):
    """The callback that shows a run in a notebook.

    Its bar is HTML, which needs no widgets and is saved with the notebook.
    """

    _handle: Any = None
    _drawn = -math.inf

    @property
    def _has_bar(self) -> bool:
        return True

    def on_event(self, event: Event) -> None:
        super().on_event(event)
        if time.monotonic() - self._drawn >= DRAW_SECONDS:
            self._draw()

    def conclude(self, result: RunRecord) -> None:
        """Show a full bar, the result, its cost, and the next command to type."""
        self._bars.update(self._task, description="done", total=1.0, completed=1.0, left=(None, 0.0), note="")
        self._draw()
        super().conclude(result)

    def _draw(self) -> None:
        from IPython.display import display  # imported here, because IPython may be missing outside notebooks

        self._drawn = time.monotonic()
        if self._handle is None:
            self._handle = display(self._bars, display_id=True)
        else:
            self._handle.update(self._bars)


def typed(path: Path) -> str:
    """Write a run's folder as a user would type it: relative to the working directory if it lies below."""
    with contextlib.suppress(FileNotFoundError):  # the working directory may have been removed meanwhile
        if path.is_relative_to(here := Path.cwd()):
            path = path.relative_to(here)
    return shlex.quote(str(path))
