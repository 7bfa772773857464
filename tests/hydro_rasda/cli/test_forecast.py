"""Forecasts by the command line, from a run that was really made."""

import json
from pathlib import Path
from typing import Any

import pytest

from hydro_rasda.cli import main
from hydro_rasda.cli.forecast import Options, plans
from hydro_rasda.simulator import read_past_run
from tests.hydro_rasda.cli.conftest import search


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One trial trains at full size, so that all cost as much as it does."""
    return search(tmp_path_factory.mktemp("runs"), "past", top_k=1)


def forecast(capsys: pytest.CaptureFixture[str], run: str, options: str) -> dict[str, dict[str, Any]]:
    assert main(["simulate", run, *options.split(), "--json"]) == 0
    return {row["scheduler"]: row for row in json.loads(capsys.readouterr().out)}


def test_one_trial_on_one_gpu_in_closed_form(past: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--gpus 1 --trials 1 --epoch-seconds 3600 --restart-seconds 0 --jitter 0 --scheduler asha"
    rows = forecast(capsys, past, options)
    assert rows["ASHA"]["hours"] == pytest.approx(9.0)
    assert rows["ASHA"]["gpu_hours"] == pytest.approx(9.0)
    assert rows["ASHA"]["utilization"] == pytest.approx(1.0)
    assert (rows["ASHA"]["epochs"], rows["ASHA"]["finished"]) == (9, 1)


def test_milestones_lie_the_reduction_factor_apart_under_asha_and_the_scaling_factor_under_rasda(past: str) -> None:
    options = Options(run=past, gpus=1, max_t=9, grace_period=1, reduction_factor=2, scaling_factor=3)
    both = plans(read_past_run(past), options)
    assert both["ASHA"].rule.milestones == (1, 2, 4, 8, 9)
    assert both["RASDA"].rule.milestones == (1, 3, 9)


def test_speed_divides_the_epoch_of_the_past_run(past: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--gpus 1 --trials 1 --restart-seconds 0 --jitter 0 --scheduler asha"
    slow = forecast(capsys, past, options)
    fast = forecast(capsys, past, f"{options} --speed 4")
    assert fast["ASHA"]["hours"] == pytest.approx(slow["ASHA"]["hours"] / 4)


def test_more_gpus_take_less_time_and_rasda_uses_more_of_them(past: str, capsys: pytest.CaptureFixture[str]) -> None:
    few, many = (forecast(capsys, past, f"--gpus {n} --epoch-seconds 600 --trials 32") for n in (2, 16))
    assert set(few) == {"ASHA", "RASDA"}
    for name, row in many.items():
        assert row["hours"] < few[name]["hours"]
        assert row["hours_range"][0] <= row["hours"] <= row["hours_range"][1]
        assert row["gpu_hours"] <= row["reserved_gpu_hours"] * 1.0001
    assert many["RASDA"]["utilization"] > many["ASHA"]["utilization"]
    assert forecast(capsys, past, "--gpus 16 --epoch-seconds 600 --trials 32") == many


def test_failures_make_it_longer(past: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nine hours on a node that fails every three, each time to be repaired for one."""
    options = "--gpus 4 --trials 1 --seeds 9 --epoch-seconds 3600 --scheduler asha"
    sound = forecast(capsys, past, options)["ASHA"]
    failing = forecast(capsys, past, f"{options} --mtbf-hours 3")["ASHA"]
    assert failing["hours"] > sound["hours"] + 1
    assert failing["epochs"] > sound["epochs"]


def test_people_get_a_table_and_what_it_rests_on(past: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", past, "--gpus", "4", "--epoch-seconds", "100"]) == 0
    told = capsys.readouterr().out
    parameters = 8 * 32 + 32 + 32 * 3 + 3
    assert "12 trials on 4 GPUs" in told
    assert f"one epoch on one GPU 100 s (10% of it serial), {parameters} parameters" in told
    assert [line.split()[0] for line in told.splitlines() if line.startswith(("ASHA", "RASDA"))] == ["ASHA", "RASDA"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--gpus 0", "`--gpus` is 0, but must be an integer >= 1"),
        ("--gpus 2 --gpus-per-node 0", "`--gpus-per-node` is 0, but must be an integer >= 1"),
        ("--gpus 2 --workers 4", "`--workers` is 4, but must be <= `--gpus` (2)"),
        ("--gpus 4 --workers 4 --max-workers 2", "`--max-workers` is 2, but must be >= `--workers` (4)"),
        ("--gpus 2 --max-t 90", "`--max-t` is 90, but must be <= the past run's 9 epochs"),
        ("--gpus 2 --max-t 0", "`--max-t` is 0, but must be an integer >= 1"),
        ("--gpus 2 --grace-period 0", "`--grace-period` is 0, but must be an integer >= 1"),
        ("--gpus 2 --grace-period 10", "`--grace-period` is 10, but must be <= `--max-t` (9)"),
        ("--gpus 2 --reduction-factor 0", "`--reduction-factor` is 0, but must be an integer >= 2"),
        ("--gpus 2 --scaling-factor 0", "`--scaling-factor` is 0, but must be an integer >= 2"),
        ("--gpus 2 --serial 1", "`--serial` is 1.0, but must be >= 0 and < 1"),
        ("--gpus 2 --speed 0", "`--speed` is 0.0, but must be a number > 0"),
        ("--gpus 2 --seeds 0", "`--seeds` is 0, but must be an integer >= 1"),
        ("--gpus 2 --trials 0", "`--trials` is 0, but must be an integer >= 1"),
        ("--gpus 2 --steps 0", "`--steps` is 0.0, but must be a number > 0"),
        ("--gpus 2 --epoch-seconds -1", "`--epoch-seconds` is -1.0, but must be a number > 0"),
        ("--gpus 2 --epoch-seconds inf", "`--epoch-seconds` is inf, but must be finite"),
        ("--gpus 2 --jitter nan", "`--jitter` is nan, but must be >= 0 and <= 1"),
        ("--gpus 2 --jitter 1e300", "`--jitter` is 1e+300, but must be >= 0 and <= 1"),
        ("--gpus 2 --inter-bandwidth 0", "`--inter-bandwidth` is 0.0, but must be a number > 0"),
        ("--gpus 2 --mtbf-hours 0", "`--mtbf-hours` is 0.0, but must be a number > 0"),
        ("--gpus 2 --mtbf-hours 1e-5", "`--mtbf-hours` is 1e-05, but must be longer: trial 0 was hit by 1000 node"),
    ],
)
def test_bad_input(past: str, capsys: pytest.CaptureFixture[str], options: str, message: str) -> None:
    assert main(["simulate", past, *options.split()]) == 2
    assert message in capsys.readouterr().err


def test_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(tmp_path), "--gpus", "2"]) == 2
    assert "must be a run's folder: it holds no run.json" in capsys.readouterr().err
