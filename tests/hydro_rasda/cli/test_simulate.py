"""Forecasts by the command line, from a run that was really made."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hydro_rasda import RaceConfig
from hydro_rasda.cli import main
from hydro_rasda.cli.output import size
from hydro_rasda.simulator import RULES
from tests.hydro_rasda.cli.conftest import search
from tests.hydro_rasda.conftest import Said


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One trial trains at full size, so that all cost as much as it does."""
    return search(tmp_path_factory.mktemp("runs"), "past", race=RaceConfig(top_k=1))


def forecast(said: Said, run: str, options: str) -> dict[str, dict[str, Any]]:
    return {row["rule"]: row for row in json.loads(said("simulate", run, *options.split(), "--json"))["forecasts"]}


def screen(said: Said, run: str, options: str) -> str:
    return said("simulate", run, *options.split())


def test_one_trial_on_one_gpu_in_closed_form(past: str, said: Said) -> None:
    options = "--gpus 1 --trials 1 --epoch-seconds 3600 --restart-seconds 0 --jitter 0 --rule asha"
    rows = forecast(said, past, options)
    assert rows["asha"]["hours"] == pytest.approx(9.0)
    assert rows["asha"]["gpu_hours"] == pytest.approx(9.0)
    assert rows["asha"]["utilization"] == pytest.approx(1.0)
    assert (rows["asha"]["epochs"], rows["asha"]["finished"]) == (9, 1)


def test_speed_divides_the_epoch_of_the_past_run(past: str, said: Said) -> None:
    options = "--gpus 1 --trials 1 --restart-seconds 0 --jitter 0 --rule asha"
    slow = forecast(said, past, options)
    fast = forecast(said, past, f"{options} --speed 4")
    assert fast["asha"]["hours"] == pytest.approx(slow["asha"]["hours"] / 4)


def test_more_gpus_take_less_time_and_rasda_uses_more_of_them(past: str, said: Said) -> None:
    few, many = (forecast(said, past, f"--gpus {n} --epoch-seconds 600 --trials 32") for n in (2, 16))
    assert set(few) == {*RULES, "tune"}
    for name, row in many.items():
        assert row["hours"] < few[name]["hours"]
        assert row["hours_range"][0] <= row["hours"] <= row["hours_range"][1]
        assert row["gpu_hours"] <= row["reserved_gpu_hours"] * 1.0001
    assert many["rasda"]["utilization"] > many["asha"]["utilization"]
    assert forecast(said, past, "--gpus 16 --epoch-seconds 600 --trials 32") == many


def test_failures_make_it_longer(past: str, said: Said) -> None:
    """Nine hours on a node that fails every three, each time to be repaired for one."""
    options = "--gpus 4 --trials 1 --seeds 9 --epoch-seconds 3600 --rule asha"
    sound = forecast(said, past, options)["asha"]
    failing = forecast(said, past, f"{options} --mtbf-hours 3")["asha"]
    assert failing["hours"] > sound["hours"] + 1
    assert failing["epochs"] > sound["epochs"]


def test_people_get_a_table_what_it_rests_on_and_why_the_slower_ones_are_slower(past: str, said: Said) -> None:
    """Four trials of nine hours at once, on four GPUs: nobody waits, and growing takes GPUs from nobody."""
    told = screen(said, past, "--gpus 4 --trials 4 --epoch-seconds 3600 --rule random --rule both --grace-period 3")
    gradients = 4 * (8 * 32 + 32 + 32 * 3 + 3)
    assert "4 trials on 4 GPUs" in told
    assert f"an epoch on one GPU 1 h 0 min (10% of it serial), {size(gradients)} of gradients, a restart 30 s" in told
    lines = [line for line in told.splitlines() if line.startswith(("random", "RASDA", "tune()"))]
    assert [line.split("  ")[0] for line in lines[:3]] == ["RASDA, both", "random search", "tune()"]
    assert re.match(r"random search: 1\.\d+ times as long as RASDA, both; it trains 36 epochs, not \d\d$", lines[3])


@pytest.mark.parametrize(("epoch", "told"), [(101.1, "0.253"), (493.1, "1.23"), (4931, "12.3"), (49310, "123")])
def test_hours_have_three_digits(past: str, said: Said, epoch: float, told: str) -> None:
    """Nine epochs on one GPU, in hours."""
    options = f"--gpus 1 --trials 1 --epoch-seconds {epoch} --restart-seconds 0 --jitter 0 --rule random"
    row = next(line for line in screen(said, past, options).splitlines() if line.startswith("random"))
    assert row.split("  ").count(told) + row.split("  ").count(f" {told}") == 2  # busy and reserved


def test_limits_are_kept_with_the_fewest_gpu_hours_or_the_least_time(
    past: str, said: Said, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight trials of nine hours each, all of which train to the end: 72 GPU hours on any number of GPUs up to 8."""
    study = "--gpus 16 --trials 8 --epoch-seconds 3600 --restart-seconds 0 --jitter 0 --serial 0 --rule random"
    told = screen(said, past, f"{study} --within 20h --max-workers 1")
    assert "Within 20h: random search on 4 GPUs, 1 GPU for a new trial: 18 h 0 min, 72 GPU hours" in told
    told = screen(said, past, f"{study} --gpu-hours 73 --max-workers 1")
    assert "For 73 GPU hours: random search on 8 GPUs, 1 GPU for a new trial: 9 h 0 min, 72 GPU hours" in told
    told = json.loads(screen(said, past, f"{study} --gpu-hours 73 --max-workers 1 --json"))
    assert told["recommended"]["rule"]["gpus"] == 8
    assert main(["simulate", past, *study.split(), "--max-workers", "1", "--within", "60s"]) == 1
    told = capsys.readouterr().out
    assert "Nothing within 60s on at most 16 GPUs; nearest: random search on 8 GPUs" in told


def test_a_csv_and_its_errors(tmp_path: Path, said: Said, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "curves.csv"
    rows = [f"{trial},{t},{trial + 1 / t},60" for trial in range(4) for t in range(1, 5)]
    file.write_text("\n".join(["trial,epoch,loss,seconds", *rows]))
    found = forecast(said, str(file), "--gpus 4 --mode min --rule random --restart-seconds 0 --jitter 0")
    assert found["random"]["hours"] == pytest.approx(4 / 60)
    assert found["random"]["regret"] == 0
    for options, message in {
        "": "`--mode` is None, but must be 'min' or 'max'",
        "--mode min --metric accuracy": "`--metric` is 'accuracy', but must be one of the columns ['loss']",
    }.items():
        assert main(["simulate", str(file), "--gpus", "4", *options.split()]) == 2
        assert message in capsys.readouterr().err


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
        ("--gpus 2 --epoch-seconds inf", "`--epoch-seconds` is inf, but must be <= 1e+09"),
        ("--gpus 2 --restart-seconds 1e308", "`--restart-seconds` is 1e+308, but must be <= 1e+09"),
        ("--gpus 2 --speed 1e-300", "`--speed` is 1e-300, but must be such that an epoch takes <= 1e+09 s"),
        (
            "--gpus 2 --intra-bandwidth 1e-300",
            "`--intra-bandwidth` is 1e-300, but must be such that an epoch's gradients",
        ),
        ("--gpus 2 --wait -1", "`--wait` is -1.0, but must be a number >= 0"),
        ("--gpus 2 --rule fast", "`--rule` is 'fast', but must be one of ['random', 'synchronous',"),
        ("--gpus 2 --within 4", "`--within` is '4', but must be a number above 0 and its unit, such as 4h"),
        ("--gpus 2 --within 1h --gpu-hours 0", "`--gpu-hours` is 0.0, but must be a number > 0"),
        ("--gpus 2 --mode max", "`--mode` is 'max', but must be the run's, 'min'"),
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


def test_the_folder_above_names_the_runs_in_it(past: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(Path(past).parent), "--gpus", "2"]) == 2
    assert capsys.readouterr().err.endswith("or a CSV file: in it are past\n")


def test_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(tmp_path), "--gpus", "2"]) == 2
    assert "must be the folder of a run, which holds run.json, that of a Ray Tune" in capsys.readouterr().err
