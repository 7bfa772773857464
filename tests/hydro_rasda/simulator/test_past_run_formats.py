"""Learning curves from a CSV file, from a pandas frame, and from a Ray Tune experiment's files."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from hydro_rasda.schedulers import Mode
from hydro_rasda.simulator import PastRun, read_past_run

NAN = math.nan

FRAME = pd.DataFrame(
    {
        "trial_id": ["b", "b", "a", "a", "c"],
        "training_iteration": [1, 3, 1, 2, 2],
        "loss": [4.0, 2.0, 5.0, np.nan, 1.5],
        "seconds": [10.0, 10.0, 30.0, 30.0, np.nan],
        "workers": [2, 2, 1, 1, 1],
    }
)
"""Trial b reported no second epoch, a diverged in it, c began to report there. b's epochs take 20 s on one worker."""


def same(one: PastRun, other: PastRun) -> None:
    assert np.array_equal(one.workload.scores, other.workload.scores, equal_nan=True)
    assert one.workload.work.tolist() == other.workload.work.tolist()
    assert one.epoch_seconds == other.epoch_seconds


def test_a_frame_and_the_csv_file_of_it(tmp_path: Path) -> None:
    run = read_past_run(FRAME, mode="min")
    # Nobody trained two epochs in a row with finite scores: what is missing stays as it was.
    assert run.workload.scores[0].tolist() == [4, 4, 2]
    assert np.isnan(run.workload.scores[1]).tolist() == [False, True, True]
    assert run.workload.scores[2].tolist() == [1.5, 1.5, 1.5]
    assert run.workload.work.tolist() == [1, 1, 1]
    assert run.epoch_seconds == 30.0
    FRAME.to_csv(tmp_path / "curves.csv", index=False)
    same(read_past_run(tmp_path / "curves.csv", mode="min"), run)


@pytest.mark.parametrize(
    ("epochs", "losses", "read"),
    [
        ([1, 2, 3, 4, 5], [NAN, NAN, 3, NAN, 2], [3, 3, 3, 3, 2]),
        ([1, 2, 3], [3, 2, NAN], [3, 2, 2]),
        ([1, 1, 2, 2], [3, NAN, NAN, 2], [3, 2]),
        ([1, 2, 3], [3, math.inf, 2], [3, NAN, 2]),
    ],
    ids=["every other epoch", "not the last", "two rows an epoch", "infinite"],
)
def test_an_epoch_without_validation_is_no_divergence(
    epochs: list[int], losses: list[float], read: list[float]
) -> None:
    run = read_past_run(pd.DataFrame({"trial": "a", "epoch": epochs, "loss": losses}), mode="min")
    assert np.array_equal(run.workload.scores, [read], equal_nan=True)


def test_two_rows_of_one_epoch_tell_of_score_and_seconds() -> None:
    frame = pd.DataFrame({"trial": "a", "epoch": 1, "loss": [3.0, NAN], "seconds": [NAN, 5.0], "workers": [NAN, 2]})
    run = read_past_run(frame, mode="min")
    assert (run.workload.scores.tolist(), run.epoch_seconds) == ([[3]], 10)
    again = read_past_run(frame[::-1], mode="min")
    assert (again.workload.scores.tolist(), again.epoch_seconds) == ([[3]], 10)


def test_one_of_several_metrics() -> None:
    frame = FRAME.assign(accuracy=[0.1, 0.2, 0.3, 0.4, 0.5])
    assert read_past_run(frame, metric="accuracy", mode="max").workload.best(3) == 0.5


@pytest.mark.parametrize(
    ("change", "metric", "mode", "message"),
    [
        ({"accuracy": 1.0}, None, "min", r"`metric` is None, but must be one of the columns \['loss', 'accuracy'\]"),
        ({}, None, None, "`mode` is None, but must be 'min' or 'max'"),
        ({"training_iteration": 0}, None, "min", r"`epoch` is 0.0, but must be an integer from 1 to 100,000 \(row 1\)"),
        ({"training_iteration": 1e18}, None, "min", "`epoch` is 1e.18, but must be an integer"),
        ({"workers": 0.5}, None, "min", r"`workers` is 0.5, but must be an integer >= 1 \(row 1\)"),
        ({"loss": "low"}, None, "min", "`loss` is 'low' in row 1, but must be a number"),
        ({"loss": np.nan}, None, "min", "`metric` is 'loss', but must be one with a finite score"),
    ],
)
def test_bad_tables(change: dict[str, Any], metric: str | None, mode: Mode | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_past_run(FRAME.assign(**change), metric, mode)


def test_columns_that_are_missing() -> None:
    with pytest.raises(ValueError, match=r"`run` is .*, but must be columns, among them epoch or training_iteration"):
        read_past_run(FRAME.drop(columns="training_iteration"), mode="min")
    with pytest.raises(ValueError, match="`run` is 'a table without rows', but must be"):
        read_past_run(FRAME.iloc[:0], mode="min")


def test_no_text(tmp_path: Path) -> None:
    (tmp_path / "curves.csv").write_bytes(bytes(range(256)))
    with pytest.raises(ValueError, match=r"`run` is .*, but must be a CSV file in UTF-8"):
        read_past_run(tmp_path / "curves.csv", mode="min")


def report(t: int, loss: float, seconds: float, at: float, workers: int = 1, first: bool = False) -> str:
    """A line of Tune's, which writes times in whole seconds."""
    line = {"training_iteration": t, "loss": loss, "time_this_iter_s": seconds, "timestamp": int(at), "done": False}
    return json.dumps(line | {"iterations_since_restore": 1 if first else 2, "workers": workers, "config": {"lr": 1}})


def test_an_experiment_of_ray_tune(tmp_path: Path) -> None:
    """Epochs of 10 s, or of 5 s on two workers; each start takes 20 s, which Tune counts with the epoch after it.

    Two reports of the last trial are lost: what lies between the others is more than one restart.
    """
    grown = [report(1, 3.0, 30, 130, first=True), report(2, 2.0, 10, 140)]
    grown += [report(3, 1.0, 25, 165, 2, first=True), report(4, 0.5, 5, 170, 2)]
    failed = [report(1, 4.0, 30, 130, first=True), report(2, 4.0, 10, 140), '{"training_iter']
    lossy = [report(1, 5.0, 30, 130, first=True), report(4, 4.0, 25, 190, 4, first=True)]
    for name, lines in (("train_0", grown), ("train_1", failed), ("train_2", lossy)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text("\n".join(lines))
    trials = [[json.dumps({"relative_logdir": "train_1", "status": "ERROR"}), "{}"]]
    state = {"trial_data": trials, "runner_data": {"_metric": "loss"}}
    (tmp_path / "experiment_state-2026.json").write_text(json.dumps(state))
    run = read_past_run(tmp_path, mode="min")
    assert run.workload.scores[0].tolist() == [3, 2, 1, 0.5]
    assert np.isnan(run.workload.scores[1]).tolist() == [False, False, True, True]
    assert run.epoch_seconds == 10.0
    assert (run.restart_seconds, run.resizes) == (165 - 140 - 5, 1)


@pytest.mark.parametrize("without", [0, 1])
def test_a_restart_of_which_a_report_has_no_time_is_not_counted(tmp_path: Path, without: int) -> None:
    lines = [json.loads(report(1, 3.0, 10, 110, first=True)), json.loads(report(2, 2.0, 25, 140, 2, first=True))]
    del lines[without]["timestamp"]
    (tmp_path / "train_0").mkdir()
    (tmp_path / "train_0" / "result.json").write_text("\n".join(map(json.dumps, lines)))
    run = read_past_run(tmp_path, "loss", "min")
    assert (run.restart_seconds, run.resizes) == (None, 0)


def test_nested_metrics_of_ray_tune_have_the_names_that_its_schedulers_know(tmp_path: Path) -> None:
    for name in ("a", "b"):
        lines = [{**json.loads(report(t, 0.0, 10, 10 * t)), "val": {"loss": 3.0 - t, "hits": t}} for t in (1, 2)]
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert read_past_run(tmp_path, "val/loss", "min").workload.scores.tolist() == [[2, 1], [2, 1]]
    with pytest.raises(ValueError, match=r"`metric` is None, but must be one of \['loss', 'val/hits', 'val/loss'\]"):
        read_past_run(tmp_path, mode="min")


def test_tunes_csv_where_its_json_is_gone(tmp_path: Path) -> None:
    (tmp_path / "train_0").mkdir()
    lines = ["loss,training_iteration,time_this_iter_s,trial_id", "3.0,1,10.0,a", "2.0,2,10.0,a"]
    (tmp_path / "train_0" / "progress.csv").write_text("\n".join(lines))
    run = read_past_run(tmp_path, mode="min")
    assert (run.workload.scores.tolist(), run.epoch_seconds) == ([[3, 2]], 10.0)


def test_an_experiment_without_the_metric(tmp_path: Path) -> None:
    (tmp_path / "train_0").mkdir()
    (tmp_path / "train_0" / "result.json").write_text(report(1, 3.0, 30, 130))
    with pytest.raises(ValueError, match=r"`metric` is 'accuracy', but must be one of \['loss'\]"):
        read_past_run(tmp_path, "accuracy", "max")


def test_cells_that_pandas_calls_missing_are_empty() -> None:
    run = read_past_run(FRAME, mode="min")
    same(read_past_run(FRAME.convert_dtypes(), mode="min"), run)


def test_columns_of_one_name_and_rows_without_a_trial_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`run` is \[.*'loss'\], but must be columns of different names"):
        read_past_run(pd.concat([FRAME, FRAME["loss"]], axis=1), metric="loss", mode="min")
    with pytest.raises(ValueError, match=r"`trial` is None, but must be given \(row 2\)"):
        read_past_run(FRAME.assign(trial_id=FRAME["trial_id"].where(FRAME.index != 1)), mode="min")
    (tmp_path / "curves.csv").write_text("trial,epoch,loss\na,1,3.0\n,2,2.0\n")
    with pytest.raises(ValueError, match=r"`trial` is '', but must be given \(row 2\)"):
        read_past_run(tmp_path / "curves.csv", mode="min")


def test_a_line_that_a_killed_tune_left_unfinished_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "train_0").mkdir()
    (tmp_path / "train_0" / "progress.csv").write_text("loss,training_iteration,trial_id\n3.0,1,a\n2.0,2,a\n1.0")
    assert read_past_run(tmp_path, mode="min").workload.scores.tolist() == [[3, 2]]


def test_a_file_may_be_given_by_any_kind_of_path(tmp_path: Path) -> None:
    class At:
        def __fspath__(self) -> str:
            return str(tmp_path / "curves.csv")

    FRAME.to_csv(tmp_path / "curves.csv", index=False)
    same(read_past_run(At(), mode="min"), read_past_run(FRAME, mode="min"))  # type: ignore[arg-type]
