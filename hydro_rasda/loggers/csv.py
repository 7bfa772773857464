"""A run's metrics as one CSV file, which grows with each epoch."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from hydro_rasda.loggers.trials import Logged, TrialLogger
from hydro_rasda.run.events import RunBegan
from hydro_rasda.run.files import append_to, open_to_read

COLUMNS = ("trial", "stage", "epoch", "seconds", "metric", "value")


class CSVLogger(TrialLogger):
    """Appends a row for each trial, stage, epoch and metric, as `TuneResult.curves` has them.

    Columns: `trial`, `stage` ("sweep" or "full size"), `epoch`, `seconds` (wall time of the run), `metric`, and
    `value`, empty where it was not finite.

    Args:
        path: The file; None for `metrics.csv` in the run's folder.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        super().__init__()
        self._asked = path
        self._path = Path()
        self._logged: dict[tuple[int, str], int] = {}

    def begin(self, event: RunBegan) -> None:
        self._path = event.path / "metrics.csv" if self._asked is None else Path(self._asked).expanduser()
        if self._asked is not None:  # whoever names a file may name a link
            self._path = self._path.resolve()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._logged = {}
        if not self._path.exists():
            self._append([COLUMNS])
            return
        with io.TextIOWrapper(open_to_read(self._path), newline="") as file:
            for row in csv.DictReader(file):
                place = int(row["trial"]), row["stage"]
                self._logged[place] = max(int(row["epoch"]), self._logged.get(place, 0))

    def logged(self, trial: int, stage: str) -> float:
        return self._logged.get((trial, stage), 0)

    def log(self, trial: Logged, stage: str, epoch: int, metrics: Mapping[str, float], seconds: float) -> None:
        told = {name: value if math.isfinite(value) else "" for name, value in metrics.items()}
        self._append([(trial.number, stage, epoch, round(seconds, 3), name, value) for name, value in told.items()])

    def _append(self, rows: Sequence[Sequence[object]]) -> None:
        with io.TextIOWrapper(append_to(self._path), newline="") as file:
            csv.writer(file).writerows(rows)
