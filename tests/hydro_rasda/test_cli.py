"""``hydro-rasda simulate``, from a run that was really made."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hydro_rasda import choice, loguniform, tune
from hydro_rasda.backends.simulator import read_past_run
from hydro_rasda.cli import main, plans


def model_fn(config: dict[str, Any], width_ratio: float = 1.0) -> nn.Module:
    width = int(32 * width_ratio)
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3))


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> str:
    """12 configurations on random data, 9 epochs; one trains at full size, so that all cost as much as it does."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(256, 8, generator=generator), torch.randint(0, 3, (256,), generator=generator)
    folder = tmp_path_factory.mktemp("runs")
    space = {"lr": loguniform(1e-4, 1), "batch_size": choice([32, 64])}
    tune(
        model_fn,
        space,
        train_data=(x, y),
        val_data=(x, y),
        num_samples=12,
        max_t=9,
        top_k=1,
        storage_path=folder,
        name="past",
        progress=False,
    )
    return str(folder / "past")


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
    study = Namespace(max_t=9, grace_period=1, reduction_factor=2, scaling_factor=3, workers=1, max_workers=None)
    both = plans(read_past_run(past), Namespace(**vars(study), scheduler="both"))
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
        ("--gpus 0", "`gpus` is 0, but must be >= 1"),
        ("--gpus 2 --workers 4", "`workers` is 4, but must be <= the cluster's 2 GPUs"),
        ("--gpus 2 --max-t 90", "`workload` has 9 epochs, but must have >= max_t (90)"),
        ("--gpus 2 --serial 1", "`--serial` is 1.0, but must be >= 0 and < 1"),
        ("--gpus 2 --speed 0", "`--speed` is 0.0, but must be > 0"),
        ("--gpus 2 --seeds 0", "`--seeds` is 0, but must be >= 1"),
        ("--gpus 2 --trials 0", "`trials` is 0, but must be >= 1"),
        ("--gpus 2 --epoch-seconds 0", "`step_seconds` is 0.0, but must be > 0"),
    ],
)
def test_bad_input(past: str, capsys: pytest.CaptureFixture[str], options: str, message: str) -> None:
    assert main(["simulate", past, *options.split()]) == 2
    assert message in capsys.readouterr().err


def test_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(tmp_path), "--gpus", "2"]) == 2
    assert "must be a run's folder: it holds no run.json" in capsys.readouterr().err
