"""The one door to past runs: whose it is, is seen from what it holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hydro_rasda.checks import check_mode, check_path, check_text
from hydro_rasda.schedulers import Mode
from hydro_rasda.simulator.journal import ASKED, read_run
from hydro_rasda.simulator.learning_curves import read_columns, read_csv
from hydro_rasda.simulator.past_run import PastRun
from hydro_rasda.simulator.ray_tune import is_experiment, read_experiment

if TYPE_CHECKING:
    import pandas as pd


def read_past_run(run: str | Path | pd.DataFrame, metric: str | None = None, mode: Mode | None = None) -> PastRun:
    """Reads a past run, or learning curves that come from elsewhere.

    Args:
        run: The folder of a run of this library or of a Ray Tune experiment, a CSV file, or a pandas frame. A file or
            frame has a row for each trial and epoch. Its columns are trial (or trial_id), epoch (or
            training_iteration), a metric, and, if known, seconds and workers of that epoch.
        metric: The name of the score; None where there is but one. A run of this library knows its own.
        mode: "min" where a lower score is better, "max" where a higher is; likewise.

    Raises:
        FileNotFoundError: if there is no such file, or the folder holds no run.
        ValueError: if it cannot be read, or `metric` or `mode` is missing or wrong.
    """
    check_text("metric", metric, optional=True)
    if mode is not None:
        check_mode(mode)
    if not hasattr(run, "columns"):
        check_path("run", run)
    if not isinstance(run, (str, Path)):
        return read_columns({str(name): run[name].tolist() for name in run.columns}, metric, mode)
    path = Path(run).expanduser()
    if path.is_file():
        return read_csv(path, metric, mode)
    if path.is_dir() and not (path / ASKED).exists() and is_experiment(path):
        return read_experiment(path, metric, mode)
    if path.is_dir() and (path / ASKED).exists():
        past = read_run(path)
        for name, asked in (("metric", metric), ("mode", mode)):
            if asked is not None and asked != past.settings[name]:
                raise ValueError(f"`{name}` is {asked!r}, but must be the run's, {past.settings[name]!r}")
        return past
    inside = [child.name for child in _folders(path) if (child / ASKED).exists() or is_experiment(child)]
    raise FileNotFoundError(
        f"`run` is {str(run)!r}, but must be the folder of a run, which holds {ASKED}, that of a Ray Tune experiment, "
        "or a CSV file" + (f": in it are {', '.join(inside)}" if inside else "")
    )


def _folders(path: Path) -> list[Path]:
    return sorted(child for child in path.iterdir() if child.is_dir()) if path.is_dir() else []
