"""All figures of runs of all sorts, and what the figures show, against the run's own numbers."""

from __future__ import annotations

import builtins
import math
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hydro_rasda import plots
from hydro_rasda.plots.importance import importance_of
from hydro_rasda.plots.look import is_empty, score_axis, thinned
from hydro_rasda.results.records import RunRecord
from hydro_rasda.results.report import agreement_line
from hydro_rasda.results.timeline import Training, busy_share, journal_of, trainings
from tests.hydro_rasda.journals import SCRIPT

Sorts = dict[str, RunRecord]

SHOWN = {
    "over": set(plots.__all__),
    "interrupted": set(plots.__all__) - {"narrow_vs_full"},
    "swept": set(plots.__all__) - {"narrow_vs_full"},
    "single": {"best_over_time", "cost", "learning_curves", "narrow_vs_full", "timeline"},
    "failed": {"cost", "parallel_coordinates", "timeline"},
    "empty": set(),
    "large": set(plots.__all__),
}


@pytest.mark.parametrize("sort", SHOWN)
def test_every_figure_of_every_sort_of_run(sorts: Sorts, sort: str) -> None:
    made = {name: getattr(plots, name)(sorts[sort]) for name in plots.__all__}
    assert {name for name, figure in made.items() if not is_empty(figure)} == SHOWN[sort]
    for name, figure in made.items():
        assert is_empty(figure) == bool(is_empty(figure) and figure.layout.annotations[0].text)
        written = figure.to_json()
        assert len(written) < 600_000, name
        assert "<script" not in written.replace("\\u003c", "<"), name


def points(figure: Any, name: str) -> list[tuple[float, float]]:
    return [(x, y) for trace in figure.data if trace.name.startswith(name) for x, y in zip(trace.x, trace.y)]


def test_what_a_run_cost_is_drawn_above_what_it_would_have_cost(sorts: Sorts) -> None:
    figure = plots.cost(sorts["over"])
    assert figure.data[0].y[0] == "this run"
    assert figure.layout.yaxis.autorange == "reversed"  # plotly draws its first bar at the bottom


def test_curves_are_the_runs(sorts: Sorts) -> None:
    record = sorts["over"]
    figure = plots.learning_curves(record)
    best = points(figure, f"trial {record.best_trial} ")
    frame = record.curves().query(f"trial == {record.best_trial} and metric == 'val_loss'")
    assert [y for _, y in best] == pytest.approx([*frame["value"]], rel=1e-4)
    assert [x for x, _ in best] == [*frame["epoch"]]
    fallen = [trial for trial in record.trials if trial.surrogate_epochs == 1 and trial.status == "stopped"]
    drawn = [y for _, y in points(figure, "fell at epoch 1 (") if y is not None]
    assert sorted(drawn) == pytest.approx(sorted(trial.surrogate_metric for trial in fallen), rel=1e-4)
    assert not is_empty(plots.learning_curves(record, "train_loss"))


def test_the_best_over_time_only_gets_better_and_ends_with_the_result(sorts: Sorts) -> None:
    record = sorts["over"]
    full = [y for _, y in points(plots.best_over_time(record), "full size")]
    assert full == sorted(full, reverse=True)
    assert full[-1] == pytest.approx(record.best_metric, rel=1e-4)


def test_narrow_and_full_rank_the_finalists_alike(sorts: Sorts) -> None:
    record = sorts["over"]
    (drawn,) = plots.narrow_vs_full(record).data
    curves = record.curves().query("metric == 'val_loss' and epoch == 3").set_index(["trial", "stage"])["value"]
    assert drawn.text == tuple(str(trial.trial) for trial in record.trials if trial.epochs)
    for number, x, y in zip(map(int, drawn.text), drawn.x, drawn.y):
        assert [x, y] == pytest.approx([curves[number, "sweep"], curves[number, "full size"]], rel=1e-4)
    (told,) = agreement_line(record)
    assert told.endswith("on 3 finalists after epoch 3: rank correlation 1.00, too few to tell (chance alone: 17%)")
    assert "rank correlation 1.00, too few to tell" in plots.narrow_vs_full(record).to_json()


def test_what_the_score_depends_on_most_is_the_most_important(sorts: Sorts) -> None:
    found = importance_of(sorts["large"])
    assert [*found][:2] == ["lr", "optimizer"]
    assert sum(found.values()) == pytest.approx(1)
    axes = plots.score_map(sorts["large"]).layout
    assert (axes.xaxis.title.text, axes.yaxis.title.text) == ("lr", "optimizer")
    assert axes.xaxis.type == "log"
    assert axes.xaxis.dtick == 1  # with more labels to a decade, they lie on each other


def test_each_training_is_in_the_timeline_once(sorts: Sorts) -> None:
    record = sorts["over"]
    found = trainings(journal_of(record))
    epochs = {n: sum(t.stop - t.start for t in found if n in t.trials) for n in range(len(record.trials))}
    trained = {t.trial: t.surrogate_epochs + t.epochs for t in record.trials}
    trained[5] = 1  # it raised in its first
    assert epochs == trained
    bars = plots.timeline(record).data
    assert sum(len(bar.x) for bar in bars) == len(found)
    by_lane: dict[int, list[Training]] = {}
    for each in found:
        by_lane.setdefault(each.lane, []).append(each)
    for lane in by_lane.values():
        assert all(a.ended <= b.began + 1e-6 for a, b in pairwise(lane))


def test_a_row_is_idle_where_nothing_trains() -> None:
    def at(began: float, ended: float) -> Training:
        return Training("target", (0,), 0, 1, began, ended)

    assert busy_share([at(0, 1), at(3, 4)]) == 0.5
    assert busy_share([at(0, 2), at(1, 4)]) == 1
    assert math.isnan(busy_share([]))


@pytest.mark.parametrize(
    ("values", "mode", "expected"),
    [
        ([0.0, 1.0], "min", [-0.05, 1.05]),
        ([*[i / 100 for i in range(100)], 1e6], "min", [-0.06, 1.25]),  # a twentieth may lie outside
        ([1.0, 100.0], "min", [-0.1, 2.1]),  # powers of ten
        ([math.nan, 3.0], "max", None),
    ],
)
def test_an_axis_shows_where_the_good_ones_differ(values: list[float], mode: Any, expected: list[float] | None) -> None:
    found = score_axis(values, mode, "x").get("range")
    assert found == (None if expected is None else pytest.approx(expected, abs=0.02))


def test_thinning_keeps_the_first_and_the_last() -> None:
    assert thinned(range(101), 5) == [0, 25, 50, 75, 100]
    assert thinned(range(3), 5) == [0, 1, 2]


def test_without_its_folder_a_result_still_has_its_curves(sorts: Sorts, tmp_path: Path) -> None:
    from hydro_rasda.results.reading import read_record

    folder = tmp_path / "moved"
    shutil.copytree(sorts["over"].path, folder)
    record = read_record(folder)
    shutil.rmtree(folder)
    assert not is_empty(plots.learning_curves(record))
    assert is_empty(plots.timeline(record))
    assert is_empty(plots.importances(record))


def test_without_plotly_it_says_what_to_install(sorts: Sorts, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "plotly":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'hydro-rasda\[report\]'"):
        plots.learning_curves(sorts["over"])


def test_importing_it_needs_neither_plotly_nor_torch() -> None:
    code = "import sys, hydro_rasda.plots; assert not {'plotly', 'torch', 'ray', 'optuna'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_names_of_the_users_are_text(sorts: Sorts) -> None:
    written = plots.slices(sorts["over"], ["activation"]).to_json()
    assert SCRIPT not in written
    assert "&lt;script&gt;" in written.replace("\\u0026", "&")
