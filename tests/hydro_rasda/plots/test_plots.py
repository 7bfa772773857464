"""All figures of runs of all sorts, and what the figures show, against the run's own numbers."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hydro_rasda import plots, secret
from hydro_rasda.common.secret_masking import HIDDEN
from hydro_rasda.history.lines import failure_line, metric_lines
from hydro_rasda.plots import hyperparameters
from hydro_rasda.plots.figure_style import begun, is_empty, score_axis, thinned
from hydro_rasda.plots.hyperparameters import LINES, importance_of
from hydro_rasda.plots.page.words import answer, cost_facts
from hydro_rasda.records.records import RunRecord, TrialRecord
from hydro_rasda.records.report import agreement_line, both_units, closing_lines
from hydro_rasda.records.timeline import Training, best_over_time, busy_share, journal_of, trainings
from hydro_rasda.settings.config import TuneConfig
from tests.hydro_rasda.journals import SCRIPT, Writer

Sorts = dict[str, RunRecord]

COMMON = set(plots.__all__) - {"front", "population"}
SHOWN = {
    "over": COMMON,
    "interrupted": COMMON - {"narrow_vs_full"},
    "swept": COMMON - {"narrow_vs_full"},
    "single": {"best_over_time", "cost", "learning_curves", "narrow_vs_full", "timeline"},
    "failed": {"cost", "parallel_coordinates", "timeline"},
    "empty": set(),
    "large": COMMON,
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


def test_bars_card_and_closing_lines_give_a_cost_in_the_same_units(sorts: Sorts) -> None:
    record = sorts["over"]
    spent = record.cost
    swept, full = [both_units(record, each) for each in (spent.sweep_seconds, spent.race_seconds)]
    # Three finalists of 3 epochs and one of 24 more are 33 of 27.
    assert (spent.race_epochs, full) == (33, "12 s (1.2 full trainings)")
    pace = spent.race_seconds / spent.race_epochs
    assert swept.endswith(f" ({spent.sweep_seconds / pace / 27:.2g} full trainings)")
    facts = cost_facts(record)
    bars = {trace.name for trace in plots.cost(record).data}
    for name, told in (("sweep", swept), ("race", full)):
        epochs = facts[name].partition(":")[0]
        assert facts[name] == f"{epochs}: {told}"
        assert f"{name}, {epochs}:<br>{told}" in bars
    assert f"Cost: {facts['wall time']}; " in "\n".join(closing_lines(record, "run"))
    assert "full trainings" not in both_units(sorts["swept"], 3.0)


def test_curves_are_the_runs(sorts: Sorts) -> None:
    record = sorts["over"]
    figure = plots.learning_curves(record)
    best = points(figure, f"trial {record.best_trial} ")
    frame = record.curves().query(f"trial == {record.best_trial} and metric == 'val_loss'")
    assert [y for _, y in best] == pytest.approx([*frame["value"]], rel=1e-4)
    assert [x for x, _ in best] == [*frame["epoch"]]
    fallen = [trial for trial in record.trials if trial.sweep_epochs == 1 and trial.status == "stopped"]
    drawn = [y for _, y in points(figure, "fell at epoch 1 (") if y is not None]
    assert sorted(drawn) == pytest.approx(sorted(trial.sweep_metric for trial in fallen), rel=1e-4)
    assert not is_empty(plots.learning_curves(record, "train_loss"))


def test_an_axis_shows_the_good_values_of_another_metric_than_the_runs(sorts: Sorts) -> None:
    """A loss is better low, also if the run's own metric is better high."""
    record = sorts["over"]
    ranges = {
        (metric, mode): [axis.range for axis in plots.learning_curves(of, metric).select_yaxes()]
        for mode in ("min", "max")
        for of in [replace(record, mode=mode, _comparison=None)]
        for metric in ("val_loss", "train_loss")
    }
    assert ranges["train_loss", "max"] == ranges["train_loss", "min"]
    assert ranges["val_loss", "max"] != ranges["val_loss", "min"]


def values_after(record: RunRecord, heat: str) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for line in (line for trial in record.trials for line in trial.history):
        if line["heat"] == heat and line["val_loss"] is not None:
            found.setdefault(line["epoch"], []).append(line["val_loss"])
    return dict(sorted(found.items()))


def check_bands(traces: dict[str, Any], after: dict[int, list[float]]) -> None:
    epochs = [*after]
    assert [*traces["median"].x] == epochs
    assert [*traces["median"].y] == pytest.approx([np.quantile(each, 0.5) for each in after.values()], rel=1e-4)
    for low, high in ((10, 90), (25, 75)):
        band = traces[f"{low}-{high} % of trials"]
        expected = [np.quantile(each, high / 100) for each in after.values()]
        expected += [np.quantile(each, low / 100) for each in after.values()][::-1]
        assert [*band.x] == epochs + epochs[::-1]
        assert [*band.y] == pytest.approx(expected, rel=1e-4)
        assert band.fill == "toself"


def test_curves_of_many_trials_are_quantiles_with_the_finalists_on_top(sorts: Sorts) -> None:
    record = sorts["large"]
    figure = plots.learning_curves(record)
    finalists = [trial.trial for trial in record.trials if trial.epochs]
    swept = [trace for trace in figure.data if trace.xaxis == "x"]
    assert [trace.name for trace in swept[:3]] == ["10-90 % of trials", "25-75 % of trials", "median"]
    assert sorted(int(trace.name.split()[1]) for trace in swept[3:]) == finalists
    check_bands({trace.name: trace for trace in swept}, values_after(record, "sweep"))
    assert swept[2].text[0].endswith(f"<br>{len(values_after(record, 'sweep')[1])} trials")
    assert len(figure.data) - len(swept) == len(finalists)  # few at full size have a curve each


@pytest.mark.parametrize("count", [60, 61])
def test_many_curves_at_full_size_are_quantiles_with_the_best_on_top(sorts: Sorts, count: int) -> None:
    def trained(trial: TrialRecord, i: int) -> TrialRecord:
        lines = [
            {"heat": heat, "epoch": epoch, "val_loss": 1 + i / 10 + 1 / epoch}
            for heat in ("sweep", "race")
            for epoch in (1, 2)
        ]
        return replace(trial, history=tuple(lines), epochs=2, sweep_epochs=2, status="finished", metric=1.5 + i / 10)

    record = sorts["large"]
    trials = tuple(trained(trial, i) for i, trial in enumerate(record.trials[:count]))
    figure = plots.learning_curves(replace(record, trials=trials, best_trial=0))
    full = {trace.name: trace for trace in figure.data if trace.xaxis == "x2"}
    if count == 60:
        assert len(full) == 60
        return
    check_bands(full, values_after(replace(record, trials=trials), "race"))
    assert [name for name in full if name.startswith("trial")] == [f"trial {n}{' (best)' * (n == 0)}" for n in range(8)]
    shown = [trace.name for trace in figure.data if trace.showlegend is not False]
    assert len(shown) == len(set(shown)) == 3 + 8  # the legend names bands once


def test_the_surrogates_best_ends_with_the_sweep(sorts: Sorts) -> None:
    record = sorts["over"]
    found = trainings(journal_of(record))
    for heat in ("sweep", "race"):
        last = points(plots.best_over_time(record), heat)[-1]
        assert last[0] == pytest.approx(max(each.ended for each in found if each.heat == heat), rel=1e-4)


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize(("told", "kind"), [("float uniform(0, 0.9)", None), ("float loguniform(0.001, 0.3)", "log")])
def test_axes_follow_the_domain(
    sorts: Sorts, told: str, kind: str | None, branches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = {"branch": [{"depth": "1"}, {"lr": told}]} if branches else {"lr": told}
    monkeypatch.setattr(hyperparameters, "read_asked", lambda path: {"space": space})
    assert plots.slices(sorts["large"], ["lr"]).layout.xaxis.type == kind


def test_lines_of_a_category_lie_apart_by_place(sorts: Sorts) -> None:
    (drawn,) = plots.parallel_coordinates(sorts["large"]).data
    axes = {axis.label: axis for axis in drawn.dimensions}
    places = np.asarray(axes["place"].values)
    assert [*drawn.line.color] == [*places]
    axis = axes["optimizer"]
    assert ([*axis.ticktext], [*axis.tickvals], [*axis.range]) == (["adamw", "sgd"], [0, 1], [-0.5, 1.5])
    at = np.asarray(axis.values)
    assert set(np.round(at)) == {0, 1}
    for tick in (0, 1):
        here = np.round(at) == tick
        order = at[here][np.argsort(places[here])]
        assert (order[0], order[-1]) == pytest.approx((tick + 0.35, tick - 0.35), abs=1e-3)
        assert (np.diff(order) < 0).all()
    ranking = begun(sorts["large"])
    rates = [math.log10(ranking[place - 1].config["lr"]) for place in places]
    assert [*axes["lr"].values] == pytest.approx(rates, rel=1e-3)  # numbers stay where they are
    assert len(ranking) > LINES
    assert len(places) == LINES
    assert {*range(1, LINES // 2 + 1), len(ranking)} <= {*places}  # the best, and a sample to the last


def test_the_best_over_time_only_gets_better_and_ends_with_the_result(sorts: Sorts) -> None:
    record = sorts["over"]
    full = [y for _, y in points(plots.best_over_time(record), "race")]
    assert full == sorted(full, reverse=True)
    assert full[-1] == pytest.approx(record.best_metric, rel=1e-4)


def test_a_training_of_the_users_that_reports_no_training_loss_has_a_best_score(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run", TuneConfig(num_samples=1, max_t=3))
    lines = metric_lines("race", 0, [(epoch, {"val_loss": 1 / epoch}) for epoch in (1, 2, 3)])
    lines += metric_lines("race", 0, [(4, {"train_loss": None, "val_loss": 0.0})])
    writer.unit("race/trial-0/to-3", {"checkpoint": "race/trial-0/to-3"}, lines, 3.0)
    best = best_over_time(journal_of(writer.record), writer.record)
    assert [(each.epoch, each.score) for each in best["race"]] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]


def test_epochs_at_full_size_are_drawn_while_they_train(tmp_path: Path) -> None:
    """In the learning curves, and in the best over time, unless their trial fails."""
    writer = Writer(tmp_path / "run", TuneConfig(num_samples=2, max_t=3))
    writer.unit("sweep/kinds-from-0", {}, [{"event": "trial", "trial": n, "config": {}} for n in (0, 1)])
    writer.unit("sweep/finalists", [0, 1])
    for number, epoch in ((0, 1), (1, 1), (0, 2)):
        lines = metric_lines("race", number, [(epoch, {"train_loss": 1.0, "val_loss": 1 / (epoch + number)})])
        writer.unit(f"race/trial-{number}/at-{epoch}", None, lines, 1.0)
    record = writer.record
    assert answer(record)[1] == (
        "Under way at full size: trial 0 at epoch 2 of 3 (val_loss 0.5), trial 1 at epoch 1 of 3 (val_loss 0.5)."
    )
    drawn = [trace for trace in plots.learning_curves(record).data if trace.x]
    assert [[*trace.x] for trace in drawn] == [[1, 2], [1]]
    best = best_over_time(journal_of(record), record)
    assert [(each.trial, each.epoch) for each in best["race"]] == [(0, 1), (1, 1)]
    writer.unit("race/trial-1/failed-after-0", None, [failure_line(1, "ValueError: no")])
    best = best_over_time(journal_of(writer.record), writer.record)
    assert [(each.trial, each.epoch) for each in best["race"]] == [(0, 1), (0, 2)]


def test_narrow_and_full_rank_the_finalists_alike(sorts: Sorts) -> None:
    record = sorts["over"]
    (drawn,) = plots.narrow_vs_full(record).data
    curves = record.curves().query("metric == 'val_loss' and epoch == 3").set_index(["trial", "heat"])["value"]
    assert drawn.text == tuple(str(trial.trial) for trial in record.trials if trial.epochs)
    for number, x, y in zip(map(int, drawn.text), drawn.x, drawn.y):
        assert [x, y] == pytest.approx([curves[number, "sweep"], curves[number, "race"]], rel=1e-4)
    (told,) = agreement_line(record)
    assert told == "3 finalists are too few to tell whether surrogates rank them as full size does"
    assert told in plots.narrow_vs_full(record).to_json()


def test_what_the_score_depends_on_most_is_the_most_important(sorts: Sorts) -> None:
    found = importance_of(sorts["large"])
    assert [*found][:2] == ["lr", "optimizer"]
    assert sum(found.values()) == pytest.approx(1)
    axes = plots.score_map(sorts["large"]).layout
    assert (axes.xaxis.title.text, axes.yaxis.title.text) == ("lr", "optimizer")
    assert axes.xaxis.type == "log"
    assert axes.xaxis.dtick == 1  # with more labels to a decade, they lie on each other
    for given in ({"y": "lr"}, {"x": "dropout"}):
        turned = plots.score_map(sorts["over"], **given).layout
        assert (turned.xaxis.title.text, turned.yaxis.title.text) == ("dropout", "lr")


def test_the_estimate_of_the_cost_without_surrogates_is_drawn(sorts: Sorts) -> None:
    spent = replace(sorts["over"].cost, race_epoch_seconds=1.0)
    drawn = plots.cost(replace(sorts["over"], cost=spent)).data
    bars = {bar.name.partition(":")[0]: bar.x[0] for bar in drawn if bar.y[0].startswith("without")}
    assert bars.keys() == {"sweep at full size (estimate)", "race"}
    assert bars["race"] == pytest.approx(spent.race_seconds, rel=1e-2)
    assert bars["sweep at full size (estimate)"] == pytest.approx(spent.spared_seconds + spent.sweep_seconds, rel=1e-2)


def test_each_training_is_in_the_timeline_once(sorts: Sorts) -> None:
    record = sorts["over"]
    found = trainings(journal_of(record))
    epochs = {n: sum(t.stop - t.start for t in found if n in t.trials) for n in range(len(record.trials))}
    trained = {t.trial: t.sweep_epochs + t.epochs for t in record.trials}
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
        return Training("race", (0,), 0, 1, began, ended)

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
    from hydro_rasda.records.record_from_journal import read_record

    folder = tmp_path / "moved"
    shutil.copytree(sorts["over"].path, folder)
    record = read_record(folder)
    shutil.rmtree(folder)
    assert not is_empty(plots.learning_curves(record))
    assert is_empty(plots.timeline(record))
    assert is_empty(plots.importances(record))


def test_without_plotly_it_says_what_to_install(sorts: Sorts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(ImportError, match=r"needs plotly, which is not there: pip install 'hydro-rasda\[report\]'"):
        plots.learning_curves(sorts["over"])


def test_importing_it_needs_neither_plotly_nor_torch() -> None:
    code = "import sys, hydro_rasda.plots; assert not {'plotly', 'torch', 'ray', 'optuna'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_each_slice_has_a_place_in_the_grid(sorts: Sorts) -> None:
    figure = plots.slices(sorts["over"])
    places = ["", *map(str, range(2, len(figure.data) + 1))]
    assert [(trace.xaxis, trace.yaxis) for trace in figure.data] == [(f"x{i}", f"y{i}") for i in places]
    assert (figure.layout.grid.rows - 1) * figure.layout.grid.columns < len(places)
    assert [figure.layout[f"xaxis{i}"].title.text for i in places]


def test_names_of_the_users_are_text(sorts: Sorts) -> None:
    written = plots.slices(sorts["over"], ["activation"]).to_json()
    assert SCRIPT not in written
    assert "&lt;script&gt;" in written.replace("\\u0026", "&")


def test_figures_show_no_secret(sorts: Sorts) -> None:
    """The result that `tune` returns has them."""
    record = sorts["over"]
    own = {"token": secret("hf_JgK2"), "hub": {"key": secret("hf_JgK2")}}
    shown = replace(record, trials=tuple(replace(trial, config={**trial.config, **own}) for trial in record.trials))
    written = {name: getattr(plots, name)(shown).to_json() for name in plots.__all__}
    assert not [name for name, figure in written.items() if "hf_JgK2" in figure]
    assert HIDDEN in written["learning_curves"]


@pytest.mark.parametrize("make", [lambda n: 2**70 + n, lambda n: 10**50 * n, lambda n: 10**400 + n, lambda n: 1e38 * n])
def test_numbers_of_any_size_are_drawn(sorts: Sorts, make: Callable[[int], float]) -> None:
    record = sorts["over"]
    trials = tuple(replace(trial, config={**trial.config, "size": make(trial.trial)}) for trial in record.trials)
    for name in SHOWN["over"]:
        assert not is_empty(getattr(plots, name)(replace(record, trials=trials)))
    assert not is_empty(plots.slices(replace(record, trials=trials), ["size"]))
    assert not is_empty(plots.score_map(replace(record, trials=trials), "size", "lr"))


@pytest.mark.parametrize(
    ("draw", "told"),
    [
        (lambda run: plots.slices(run, ["learning_rate"]), r"`names` is 'learning_rate', but must be a hyperparameter"),
        (lambda run: plots.parallel_coordinates(run, "lr"), r"`names` is 'lr', but must be a list of hyperparameters"),
        (lambda run: plots.score_map(run, "lr", "drop"), r"`y` is 'drop', but must be .*: one of \['lr', 'optimizer'"),
    ],
)
def test_a_hyperparameter_that_no_trial_has_is_refused(
    sorts: Sorts, draw: Callable[[RunRecord], Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        draw(sorts["over"])
    assert is_empty(plots.slices(sorts["empty"], ["lr"]))
