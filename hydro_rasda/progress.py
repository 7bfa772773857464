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


class Progress:
    """Live progress on a console; a silent one prints nothing."""

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

    def begin(self, title: str, epochs: int) -> None:
        """Start a part of the run that trains this many epochs, over all of its trials."""
        self.end()
        self._task = self._bars.add_task(title, total=epochs, note="")

    def advance(self, epochs: int, note: str = "") -> None:
        """Tell of epochs trained."""
        if self._task is not None:
            self._bars.update(self._task, advance=epochs, note=note)

    def end(self) -> None:
        """End the part."""
        if self._task is not None:
            self._bars.remove_task(self._task)
            self._task = None

    def say(self, text: str) -> None:
        """Print a line that stays, as it is: paths are not broken, brackets no markup."""
        self.console.print(text, markup=False, soft_wrap=True)

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()
