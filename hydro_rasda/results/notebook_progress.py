"""The progress display of a run in a notebook: as on a terminal, with a bar that is redrawn in its place."""

from __future__ import annotations

import math
import time
from typing import Any

from hydro_rasda.records.records import RunRecord
from hydro_rasda.results.progress import Progress
from hydro_rasda.run.events import Event

DRAW_SECONDS = 0.5
"""The fewest seconds between two drawings of the bar."""


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
        left = 0.0, time.monotonic()
        self._bars.update(self._task, description="done", total=1.0, completed=1.0, left=left, note="")
        self._draw()
        super().conclude(result)

    def _draw(self) -> None:
        from IPython.display import display  # a notebook has it

        self._drawn = time.monotonic()
        if self._handle is None:
            self._handle = display(self._bars, display_id=True)
        else:
            self._handle.update(self._bars)
