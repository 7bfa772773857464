"""What a user sees while a run goes on: a line for each decision, and a bar on a terminal, else a line a minute."""

from __future__ import annotations

import os
import sys
from types import TracebackType

import rich.progress
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from hydro_rasda.console import LINE_SECONDS, PrintableConsole, duration, make_console, show
from hydro_rasda.run.events import EpochEnded, EpochsTrained, Event, MessageSaid, RunBegan, StageBegan, StageEnded


class _Unread(PrintableConsole):
    """Goes on in silence where nobody reads any more what a run says, as in a pipe to `head`."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        # What Python would write there when it ends would fail, too.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class Progress:
    """The callback that shows a run on a console.

    On a terminal there is a bar. Elsewhere, as in the logs of batch systems, a line says how far the run is where none
    has been printed for a minute.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or make_console(cls=_Unread)
        # In 80 columns, times and the best score would be cut short.
        self._narrow = self.console.width < 110
        self._bars = rich.progress.Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=8 if self._narrow else 30),
            MofNCompleteColumn(),
            *([] if self._narrow else [TextColumn("epochs")]),
            TimeElapsedColumn(),
            TextColumn("[dim]left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", style="dim", markup=False),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._task: TaskID | None = None
        self._said: float | None = None
        self._asked: RunBegan | None = None
        self._best: dict[str, tuple[float, int]] = {}

    def on_event(self, event: Event) -> None:
        """Show what is for a person to follow: stages, epochs and messages."""
        if isinstance(event, MessageSaid):
            self._say(event.text, event.seconds)
        elif isinstance(event, EpochsTrained):
            self._advance(event)
        elif isinstance(event, EpochEnded):
            self._compare(event)
        elif isinstance(event, RunBegan):
            self._asked = event
        elif isinstance(event, StageBegan):
            self._end()
            self._task = self._bars.add_task(event.title, total=event.epochs, note=self._note())
        elif isinstance(event, StageEnded):
            self._end()

    def _advance(self, event: EpochsTrained) -> None:
        if self._task is None:
            return
        best = self._best_so_far() or event.note
        self._bars.update(self._task, advance=event.epochs, note=self._note() or event.note)
        if self._said is None:
            self._said = event.seconds
        if not self.console.is_terminal and event.seconds - self._said >= LINE_SECONDS:
            (task,) = (task for task in self._bars.tasks if task.id == self._task)
            note = f", {best}" if best else ""
            done = f"{task.completed:.0f} of {task.total:.0f} epochs after {duration(event.seconds)}"
            self._say(f"{task.description}: {done}{note}", event.seconds)

    def _compare(self, event: EpochEnded) -> None:
        """Take in a trial's score after an epoch; where its training loss is not finite, it has none."""
        if self._asked is None or event.metrics.get("train_loss") is None:
            return
        value = event.metrics.get(self._asked.metric)
        before = self._best.get(event.stage)
        sign = 1 if self._asked.mode == "min" else -1
        if value is not None and (before is None or sign * value < sign * before[0]):
            self._best[event.stage] = value, event.trial
            if self._task is not None:
                self._bars.update(self._task, note=self._note())

    def _note(self) -> str:
        """The best so far, as short as a bar's line has room for."""
        best = self._best_so_far()
        return best.partition(" (")[0] if self._narrow else best

    def _best_so_far(self) -> str:
        """At full size, or on surrogates where nothing has trained there."""
        best = self._best.get("target") or self._best.get("surrogate")
        if self._asked is None or best is None:
            return ""
        return f"best {self._asked.metric} {show(best[0], 4)} (trial {best[1]})"

    def _say(self, text: str, seconds: float) -> None:
        """A line that stays, as it is: paths are not broken, brackets no markup."""
        self.console.print(text, markup=False, soft_wrap=True)
        self._said = seconds

    def _end(self) -> None:
        if self._task is not None:
            self._bars.remove_task(self._task)
            self._task = None

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()
