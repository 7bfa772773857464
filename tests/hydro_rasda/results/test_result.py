from __future__ import annotations

import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusion.keys import OPTIMIZERS, SCHEDULE_FREE
from hydro_rasda import (
    AllTrialsFailed,
    RaceConfig,
    SweepConfig,
    TuneResult,
    choice,
    grid_search,
    loguniform,
    tune,
)
from hydro_rasda.common.trial import Trial
from hydro_rasda.heats.race import train_finalists
from hydro_rasda.history.lines import metric_lines
from hydro_rasda.problem.problem import Problem
from hydro_rasda.records import summary
from hydro_rasda.records.report import best_first, doubt_line
from hydro_rasda.results.result import make_result
from hydro_rasda.run.record_full_size import record_epochs, record_failure
from hydro_rasda.run.state import Run
from tests.hydro_rasda.models import mlp
from tests.hydro_rasda.scripted import Scores, Scripted, open_run
from tests.malformed import Right, either, faults, integer, one_of

Pair = tuple[Tensor, Tensor]


@pytest.fixture(scope="module")
def result(digits: tuple[Pair, Pair], tmp_path_factory: pytest.TempPathFactory) -> TuneResult:
    """Trials of every status: finished, stopped and diverged."""
    return tune(
        mlp,
        {
            "lr": choice([0.003, 0.03, 1e30]),
            "optimizer": "sgd",
            "extra": {"depth": choice([1, 2])},
            "batch_size": 64,
            "momentum": 0.9,
        },
        train_data=digits[0],
        val_data=digits[1],
        num_samples=8,
        max_t=4,
        sweep=SweepConfig(reduction_factor=2, surrogate=1 / 2, fusion=8),
        race=RaceConfig(top_k=2),
        storage_path=tmp_path_factory.mktemp("runs"),
        progress=False,
    )


def test_no_method_takes_an_argument_for_what_it_is_not(
    result: TuneResult, digits: tuple[Pair, Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    none_only: Right = one_of(None)
    finalist: Right = lambda v: type(v) is int and v in result._checkpoints  # noqa: E731
    path: Right = lambda v: (  # noqa: E731
        isinstance(v, str | Path) and 0 < len(str(v)) < 4096 and "\0" not in str(v) and "://" not in str(v)
    )
    found = [
        *faults(lambda v: result.evaluate(digits[1], batch_size=v), "batch_size", either(none_only, integer(1))),
        *faults(result.best_model, "trial", either(none_only, finalist)),
        *faults(result.recipe, "trial", either(none_only, finalist)),
        *faults(lambda v: result.best_model(model_fn=v), "model_fn", none_only),
        *faults(result.save_model, "path", path),
    ]
    assert "\n".join(found) == ""
    with pytest.raises(ValueError, match="`path` is None, but must be a path"):
        result.report(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`path` is .*, but must be the page's file, which is no folder"):
        result.report(tmp_path)
    os.mkfifo(tmp_path / "device")
    with pytest.raises(ValueError, match=r"`path` is .*, but must be the page's file, which is no folder or device"):
        result.report(tmp_path / "device")


def test_best_model_gives_best_metric_again(result: TuneResult, digits: tuple[Pair, Pair]) -> None:
    assert result.evaluate(digits[1])["loss"] == result.best_metric
    model = result.best_model()
    assert not model.training
    x, y = digits[1]
    with torch.no_grad():
        assert F.cross_entropy(model(x), y).item() == pytest.approx(result.best_metric, rel=1e-5)
    assert result.evaluate(digits[1], batch_size=7)["loss"] == pytest.approx(result.best_metric, rel=1e-5)


@pytest.mark.usefixtures("one_process")
def test_it_is_evaluated_in_parts_as_it_was_validated(
    quick: Callable[..., TuneResult], digits: tuple[Pair, Pair]
) -> None:
    """For which alone there may be memory."""
    sizes: list[int] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        sizes.append(len(output))
        return F.cross_entropy(output, target)

    space = {"lr": choice([0.01, 0.02]), "batch_size": 32, "accumulate": 4}
    result = quick(space=space, num_samples=2, max_t=2, loss_fn=loss_fn)
    sizes.clear()
    assert result.evaluate(digits[1])["loss"] == result.best_metric
    assert sizes == [32] * 4 + [8] * 4
    assert result.evaluate(digits[1], batch_size=80)["loss"] == pytest.approx(result.best_metric, rel=1e-5)
    assert sizes[8:] == [80, 80]


def test_models_of_other_finalists(result: TuneResult) -> None:
    finalists = [record.trial for record in result.trials if record.epochs]
    assert len(finalists) == 2
    for number in finalists:
        assert isinstance(result.best_model(number), nn.Module)
    (loser,) = [number for number in finalists if result.trials[number].metric != result.best_metric]
    assert not torch.equal(next(result.best_model(loser).parameters()), next(result.best_model().parameters()))
    other = next(record.trial for record in result.trials if not record.epochs)
    with pytest.raises(ValueError, match=rf"`trial` is {other}, but must be one of the finalists \["):
        result.best_model(other)


def test_records_tell_each_trials_story(result: TuneResult) -> None:
    assert [record.trial for record in result.trials] == list(range(8))
    assert {record.status for record in result.trials} == {"finished", "stopped", "diverged"}
    for record in result.trials:
        heats = [line["heat"] for line in record.history]
        assert heats == ["sweep"] * record.sweep_epochs + ["race"] * record.epochs
        epochs = [line["epoch"] for line in record.history]
        assert epochs == [*range(1, record.sweep_epochs + 1), *range(1, record.epochs + 1)]
        if record.status == "diverged":
            assert record.config["lr"] == 1e30
            assert math.isnan(record.sweep_metric)


def test_its_repr_is_a_few_lines(result: TuneResult) -> None:
    lines = repr(result).splitlines()
    assert len(lines) == 4
    used = {name: value for name, value in result.best_config.items() if name != "extra"}
    assert lines[0].endswith(f"(best_config={used!r} (nothing reads extra.depth),")
    read = tuple(replace(trial, unread=()) for trial in result.trials)
    assert f"(best_config={result.best_config!r},\n" in repr(replace(result, trials=read))
    assert f"val_loss={result.best_metric:.6g} (min), 8 trials: " in lines[1]
    assert "2 finished" in lines[1]
    kept = result.trials[result.best_trial].kept_epoch
    assert f"kept='the weights after epoch {kept} of 4, averaged'" in lines[2]
    assert str(result.path) in lines[3]
    assert all("history" not in repr(record) and len(repr(record)) < 400 for record in result.trials)


ELSEWHERE = """
import pickle, sys, torch
with open(sys.argv[1], "rb") as file:
    result, record = pickle.load(file)
print(repr(record) == repr(result.trials[0]), result.best_metric)
print(result.best_model()(torch.full((1, 64), 0.5)).tolist())
"""


def test_it_can_be_unpickled_in_another_process(result: TuneResult, tmp_path: Path) -> None:
    file = tmp_path / "result.pickle"
    file.write_bytes(pickle.dumps((result, result.trials[0])))
    assert file.stat().st_size < 50_000  # the data would take more
    command = [sys.executable, "-c", ELSEWHERE, str(file)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3]).stdout
    with torch.no_grad():
        output = result.best_model()(torch.full((1, 64), 0.5)).tolist()
    assert said.splitlines() == [f"True {result.best_metric}", str(output)]


def test_what_was_unpickled_can_make_surrogates(result: TuneResult) -> None:
    copied = pickle.loads(pickle.dumps(result))._problem
    trial = Trial(result.best_trial, result.best_config)
    expected, found = (problem.surrogate(trial).state_dict() for problem in (result._problem, copied))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_functions_that_pickle_cannot_take_come_along_or_are_asked_for(
    quick: Callable[..., TuneResult], tmp_path: Path, digits: tuple[Pair, Pair]
) -> None:
    small = {"num_samples": 1, "max_t": 1, "space": {"lr": loguniform(1e-3, 0.3), "act": choice([lambda x: x])}}
    hidden = 1.0
    local = quick(model_fn=lambda config, width_ratio=1.0: mlp(config, hidden * width_ratio), **small, name="local")
    again = pickle.loads(pickle.dumps(local))
    assert again.evaluate(digits[1]) == local.evaluate(digits[1])
    with open(tmp_path / "notes", "wb") as file:
        holds = {"race": RaceConfig(lr_rule=lambda growth: (file, growth)[1]), "name": "held"}
        held = quick(model_fn=lambda config, width_ratio=1.0: (file, mlp(config, width_ratio))[1], **small, **holds)
        again = pickle.loads(pickle.dumps(held))
    with pytest.raises(ValueError, match="`model_fn` did not come along when this result was loaded or pickled"):
        again.best_model()
    assert torch.equal(next(again.best_model(model_fn=mlp).parameters()), next(held.best_model().parameters()))


def test_its_path_does_not_depend_on_where_one_is(
    quick: Callable[..., TuneResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = quick(storage_path="runs", num_samples=1, max_t=1)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert isinstance(result.best_model(), nn.Module)
    assert result.path == tmp_path / "runs" / "run"


def test_dataframe(result: TuneResult) -> None:
    frame = result.dataframe()
    assert len(frame) == 8
    assert list(frame.columns) == [
        "trial",
        "status",
        "sweep_metric",
        "sweep_epochs",
        "metric",
        "epochs",
        "chance",
        "kept_epoch",
        "config/lr",
        "config/optimizer",
        "config/extra/depth",
        "config/batch_size",
        "config/momentum",
    ]
    assert frame["metric"].min() == result.best_metric
    assert frame["config/lr"].tolist() == [record.config["lr"] for record in result.trials]


def test_curves_have_a_row_for_each_value(result: TuneResult) -> None:
    frame = result.curves()
    assert list(frame.columns) == ["trial", "heat", "epoch", "metric", "value"]
    assert set(frame["metric"]) == {"train_loss", "train_accuracy", "val_loss", "val_accuracy", "val_loss_unaveraged"}
    assert not frame.duplicated(["trial", "heat", "epoch", "metric"]).any()
    for record in result.trials:
        own = frame[(frame["trial"] == record.trial) & (frame["metric"] == "val_loss")]
        for heat, epochs in (("sweep", record.sweep_epochs), ("race", record.epochs)):
            assert own[own["heat"] == heat]["epoch"].tolist() == list(range(1, epochs + 1))
        if record.status == "diverged":
            assert own["value"].isna().all()
    best = frame[(frame["trial"] == result.best_trial) & (frame["heat"] == "race")]
    assert best[best["metric"] == "val_loss"]["value"].min() == result.best_metric


def test_curves_are_of_metrics_alone_and_may_be_empty(result: TuneResult) -> None:
    """On Ray, an epoch also says how many workers trained it."""
    history = ({"heat": "race", "epoch": 3, "train_loss": None, "val_top": 1, "workers": 2},)
    frame = replace(result, trials=(replace(result.trials[5], history=history),)).curves()
    assert frame[["trial", "heat", "epoch", "metric"]].values.tolist() == [
        [5, "race", 3, "train_loss"],
        [5, "race", 3, "val_top"],
    ]
    assert frame["value"].dtype == float
    assert (math.isnan(frame["value"][0]), frame["value"][1]) == (True, 1.0)
    assert {"trial", "status", "metric"} <= {*replace(result, trials=()).dataframe().columns}
    empty = replace(result, trials=()).curves()
    assert (len(empty), list(empty.columns)) == (0, list(frame.columns))


@pytest.fixture
def race(problem: Problem, tmp_path: Path) -> Iterator[Callable[..., TuneResult]]:
    """A result of full-size trials by script, in milestones of 1, 2 and 4 epochs of which half goes on."""
    opened: list[Run] = []

    def call(scores: Scores, epochs: float = math.inf, finalists: Sequence[int] | None = None) -> TuneResult:
        race = RaceConfig(grace_period=1)
        run = open_run(tmp_path / f"run-{len(opened)}", problem, len(scores), max_t=4, race=replace(race, keep="last"))
        opened.append(run)
        return make_result(run, train_finalists(run, finalists or sorted(scores), Scripted(scores, epochs)))

    yield call
    for run in opened:
        run.store.close()


def outcome(result: TuneResult) -> list[tuple[str, int, float]]:
    return [(record.status, record.epochs, record.metric) for record in result.trials]


def test_the_winner_trained_to_the_end(race: Callable[..., TuneResult]) -> None:
    """It overfits, and ends with a worse score than that with which the other was stopped."""
    result = race({0: [0.3], 1: [0.2, 0.4, 0.8, 0.9]})
    assert outcome(result) == [("stopped", 1, 0.3), ("finished", 4, 0.9)]
    assert (result.best_config, result.best_metric) == (result.trials[1].config, 0.9)
    assert [record.trial for record in best_first(result)] == [1, 0]


@pytest.mark.parametrize("after", [[math.nan], []])
def test_the_best_epoch_counts_whatever_came_after_it(after: list[float], problem: Problem, tmp_path: Path) -> None:
    """It diverges, or raises, as the other trial does: none comes to its end. A second process finds the same."""
    settings = {"max_t": 4, "race": RaceConfig(grace_period=1, keep="best")}
    script = Scripted({0: [0.34, 0.3, *after], 1: [0.35]}, keep="best")
    run = open_run(tmp_path / "run", problem, 2, **settings)
    result = make_result(run, train_finalists(run, [0, 1], script))
    run.store.close()
    assert (result.best_trial, result.best_metric) == (0, 0.3)
    status, epochs = ("diverged", 3) if after else ("failed", 2)
    assert outcome(result) == [(status, epochs, 0.3), ("failed", 1, 0.35)]
    assert result.trials[0].kept_epoch == 2
    assert result.trials[0].chance > 0.5
    again = open_run(tmp_path / "run", problem, 2, **settings)
    recalled = make_result(again, train_finalists(again, [0, 1], Scripted({}, keep="best")))
    assert (recalled.best_trial, recalled.best_metric) == (0, 0.3)
    again.store.close()


def test_of_those_that_trained_to_the_end_the_best_wins(problem: Problem, tmp_path: Path) -> None:
    run = open_run(tmp_path / "run", problem, 3, max_t=2, race=RaceConfig(grace_period=2))
    result = make_result(run, train_finalists(run, [0, 1, 2], Scripted({0: [0.1, 0.5], 1: [0.9, 0.3], 2: [0.3, 0.4]})))
    assert outcome(result) == [("finished", 2, 0.5), ("finished", 2, 0.3), ("finished", 2, 0.4)]
    assert result.best_metric == 0.3
    run.store.close()


def test_a_trial_that_breaks_a_bound_has_no_chance(problem: Problem, tmp_path: Path) -> None:
    """It has the better loss, also in the end: neither the winner's confidence nor a line on the choice counts it."""
    sweep = SweepConfig(surrogate=0.5, constraints={"val_gap": (None, 1.0)})
    run = open_run(tmp_path / "run", problem, 2, max_t=2, sweep=sweep)
    for number, loss, gap in ((0, 0.3, 0.5), (1, 0.2, 2.0)):
        metrics = {"train_loss": loss, "val_loss": loss, "val_gap": gap}
        state = {"model": {}, "best": {"epoch": 2, "score": loss, "model": {}}}
        record_epochs(run, number, metric_lines("race", number, [(1, metrics), (2, metrics)]), state)
    result = make_result(run, [0, 1])
    run.store.close()
    assert result.best_trial == 0
    assert [trial.chance for trial in result.trials] == [1.0, 0.0]
    assert doubt_line(result) == ["trial 0 won among 2 at full size (confidence over 99%)"]


def test_where_who_went_on_diverges_or_fails_one_that_was_stopped_goes_on(race: Callable[..., TuneResult]) -> None:
    rest = {0: [0.3], 1: [0.4], 3: [0.25, 0.5, 0.5, 0.5]}
    diverged, failed = race({**rest, 2: [0.2, 0.2, math.inf]}), race({**rest, 2: [0.2, 0.2]})
    assert [status for status, _, _ in outcome(diverged)] == ["stopped", "stopped", "diverged", "finished"]
    assert [status for status, _, _ in outcome(failed)] == ["stopped", "stopped", "failed", "finished"]
    assert diverged.best_metric == failed.best_metric == 0.5
    with pytest.raises(AllTrialsFailed, match=r"all 2 finalists diverged or failed at full size(?s:.*)trial 1 raised"):
        race({0: [math.inf], 1: []})


def test_where_time_is_up_the_best_of_those_that_came_furthest_wins(race: Callable[..., TuneResult]) -> None:
    result = race({0: [0.4, 0.1], 1: [0.3, 0.9], 2: [0.2, 0.8], 3: [0.1, 0.7]}, epochs=3)
    assert outcome(result)[:3] == [("finished", 1, 0.4), ("finished", 1, 0.3), ("finished", 1, 0.2)]
    assert result.best_metric == 0.2


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore:.*`mode` is 'max'")
def test_the_best_epoch_is_kept_where_asked(
    quick: Callable[..., TuneResult], digits: tuple[Pair, Pair], capsys: pytest.CaptureFixture[str]
) -> None:
    """Here the largest loss is the best: the first epoch's."""
    asked: dict[str, Any] = {
        "space": {"lr": grid_search([0.05, 0.1])},
        "num_samples": 1,
        "mode": "max",
    }
    race = RaceConfig(checkpoint_every=1, grace_period=4)
    last = quick(**asked, race=replace(race, keep="last"), name="last")
    result = quick(**asked, race=race, progress=True)
    curves = [[line["val_loss"] for line in r.history if line["heat"] == "race"] for r in result.trials]
    assert curves == [[line["val_loss"] for line in r.history if line["heat"] == "race"] for r in last.trials]
    assert [record.metric for record in last.trials] == [curve[-1] for curve in curves]
    assert [(r.epochs, r.kept_epoch, r.metric) for r in result.trials] == [(4, 1, curve[0]) for curve in curves]
    assert [r.kept_epoch for r in last.trials] == [4, 4]
    assert result.best_metric == curves[result.best_trial][0]
    assert result.evaluate(digits[1])["loss"] == result.best_metric
    assert last.evaluate(digits[1])["loss"] == last.best_metric < result.best_metric
    assert ", at full size after epoch 1 of 4." in capsys.readouterr().out
    again = quick(**asked, race=race)
    assert (again.trials, again.best_metric) == (result.trials, result.best_metric)


def test_an_epoch_at_full_size_takes_what_most_of_them_take(problem: Problem, tmp_path: Path) -> None:
    """Each counts alike, and so do not the failures, nor one unit that waited."""
    run = open_run(tmp_path / "run", problem, 2, max_t=4)
    for trial, first, epochs, seconds in ((0, 1, 3, 6.0), (1, 1, 1, 100.0), (1, 2, 1, 2.0)):
        history = [(first + i, {"train_loss": 1.0, "val_loss": 1.0}) for i in range(epochs)]
        record_epochs(run, trial, metric_lines("race", trial, history), {"model": {}}, seconds)
    record_failure(run, 1, "raised", seconds=50.0)
    cost = make_result(run, [0, 1]).cost
    run.store.close()
    assert (cost.race_epochs, cost.race_seconds, cost.race_epoch_seconds) == (5, 158.0, 2.0)


def test_its_report_is_a_page(result: TuneResult, tmp_path: Path) -> None:
    path = result.report(tmp_path / "pages" / "report.html")
    assert path == tmp_path / "pages" / "report.html"
    page = path.read_text()
    assert page.startswith("<!doctype html>")
    assert f"{result.best_metric:.4g}" in page
    for status in ("finished", "stopped", "diverged"):
        assert status in page
    assert f"best configuration (trial {result.best_trial})" in result._repr_html_()


def test_optimizers_that_average_nothing_are_those_of_fusion() -> None:
    assert set(OPTIMIZERS) - set(SCHEDULE_FREE) == summary.AVERAGED
