"""What a user sees while a run goes on: a line for each decision and, on a terminal, a live bar."""

from __future__ import annotations

from types import TracebackType

import rich.progress
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from hydro_rasda.run.events import EpochsTrained, Event, MessageSaid, StageBegan, StageEnded


class Progress:
    """The callback that shows a run on a console; a silent one prints nothing."""

    def __init__(self, console: Console | None = None, silent: bool = False) -> None:
        self.console = console or Console(quiet=silent, highlight=False)
        self._bars = rich.progress.Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("epochs"),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[note]}"),
            console=self.console,
            transient=True,
            disable=silent or not self.console.is_terminal,
        )
        self._task: TaskID | None = None

    def on_event(self, event: Event) -> None:
        """Show what is for a person to follow: stages, epochs and messages."""
        if isinstance(event, MessageSaid):
            # A line that stays, as it is: paths are not broken, brackets no markup.
            self.console.print(event.text, markup=False, soft_wrap=True)
        elif isinstance(event, EpochsTrained):
            if self._task is not None:
                self._bars.update(self._task, advance=event.epochs, note=event.note)
        elif isinstance(event, StageBegan):
            self._end()
            self._task = self._bars.add_task(event.title, total=event.epochs, note="")
        elif isinstance(event, StageEnded):
            self._end()

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
