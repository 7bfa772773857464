"""The comparison with ASHA, each method run for real on a few trials of digits."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.answers.tune import as_good, at_smaller_prices, sooner
from benchmarks.result_files import DEFAULT_DATA, save_lines
from benchmarks.tasks.load import ON_GPU, TASKS, load_task
from benchmarks.tasks.task import Task
from benchmarks.vs_asha.__main__ import study
from benchmarks.vs_asha.cell import busy, measure, trained_before
from benchmarks.vs_asha.methods import METHODS, hydro_rasda
from benchmarks.vs_asha.report import METHOD_NAMES, TASK_NAMES, markdown, read, rows_of
from benchmarks.vs_asha.report import write as write_page
from benchmarks.vs_asha.search import configurations, seeds
from benchmarks.vs_asha.training import build, scores, train

NOWHERE = Path("/nowhere")
KEYS = {"task", "method", "seed", "mode", "score", "reduced", "wall", "apart", "winner", "floor", "again", "settings"}


def digits() -> Task:
    return replace(load_task("digits", NOWHERE), num_samples=9, max_t=4)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A method sets where measurements are kept; afterwards that is as it was."""
    monkeypatch.setenv("HYDRO_RASDA_CACHE", str(tmp_path))


def check(cell: dict[str, Any], task: Task) -> None:
    assert {*cell} == KEYS | {"environment", "events"}
    assert {event[1] for event in cell["events"]} == set(range(task.num_samples))
    times = [event[0] for event in cell["events"]]
    assert times == sorted(times)
    assert 0 < times[0] <= times[-1] <= cell["wall"]
    winner = cell["winner"]
    assert winner["config"] == configurations(task, 0)[winner["trial"]]
    *_, last = (event for event in cell["events"] if event[1] == winner["trial"] and event[2])
    # The model in hand has scores that the search reported for it: after the last epoch, or the one that is kept.
    reported = [last] if cell["settings"]["keep"] == "last" else cell["events"]
    scores = [tuple(event[4:]) for event in reported if event[1] == winner["trial"] and event[2]]
    assert any((winner["score"], winner["test"]) == pytest.approx(of_epoch, abs=1e-5) for of_epoch in scores)
    assert winner["test"] > 0.5
    assert len({*cell["again"]}) > 1
    assert cell["floor"]["test"] == cell["again"][0]


@pytest.mark.parametrize(
    "method",
    ["asha", *(pytest.param(part, marks=pytest.mark.slow) for part in ("tune", "surrogate", "both", "fusion"))],
)
def test_a_method_ends_with_its_winner_in_hand(method: str, tmp_path: Path) -> None:
    task = digits()
    cell = measure(task, method, 0, tmp_path)
    check(cell, task)
    path = tmp_path / f"{task.name}-{method}-0.json"
    save_lines(path, cell, "events")
    assert json.loads(path.read_text()) == cell
    # Another cell with the same winner has trained it again.
    assert trained_before(cell, tmp_path) == {name: cell[name] for name in ("floor", "again")}
    assert trained_before({**cell, "winner": {**cell["winner"], "trial": task.num_samples}}, tmp_path) is None


@pytest.mark.slow
def test_rays_asha_ends_with_its_winner_in_hand(tmp_path: Path) -> None:
    task = digits()
    cell = measure(task, "ray_asha", 0, tmp_path)
    check(cell, task)
    assert cell["winner"]["epochs"] == task.max_t
    assert 0 < cell["apart"]["ray.init"] < cell["apart"]["until the first trial began"] < cell["wall"]
    # Its trials are those of the other methods: each first epoch is the plain one of that configuration and seed.
    first = next(event for event in cell["events"] if event[3] == 1)
    config, given = configurations(task, 0)[int(first[1])], seeds(task, int(first[1]), 0)
    assert next(train(task, config, given, build(task, config, given)))["score"] == pytest.approx(first[4], abs=1e-5)


def test_rays_workers_import_nothing_of_the_library() -> None:
    """What a user of Ray alone would not import, Ray's workers do not wait for."""
    told = "import sys, benchmarks.vs_asha.ray_trial; print([m for m in sys.modules if m.startswith('hydro_rasda')])"
    shown = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


@pytest.mark.slow
def test_plain_training_is_tunes_full_size_training() -> None:
    """Same weights, batches and updates: the same scores after every epoch, where no averages count."""
    task = replace(digits(), num_samples=3)
    outcome = hydro_rasda(task, 5, ema=0)
    of_winner = [event for event in outcome.events if event.trial == outcome.winner and event.full_size]
    config, given = configurations(task, 5)[outcome.winner], seeds(task, outcome.winner, 5)
    plain = list(train(task, config, given, build(task, config, given)))
    assert [event.score for event in of_winner] == pytest.approx(
        [p["score"] for p in plain[: len(of_winner)]], abs=1e-6
    )
    assert scores(task, outcome.model, 32)["test"] == pytest.approx(of_winner[-1].test, abs=1e-6)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_tasks_for_a_gpu_are_left_out_without_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    study(["cifar10_resnet18"], ["tune", "asha"], [0], Path(DEFAULT_DATA), tmp_path / "cells")
    told = capsys.readouterr().out
    assert told == "cifar10_resnet18 is left out: it needs a CUDA GPU, and torch finds none here\n"
    assert not (tmp_path / "cells").exists()
    page = markdown({}, "vs_asha.png")
    assert page.count("Not run: no GPU") == len(ON_GPU)
    assert "vs_asha.png" not in page


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("method", ["asha", "ray_asha", "tune"])
def test_a_method_trains_on_the_gpu(method: str, tmp_path: Path) -> None:
    cell = measure(replace(digits(), device="cuda"), method, 0, tmp_path)
    check(cell, digits())
    assert cell["environment"]["gpu"] == torch.cuda.get_device_name()


def test_a_task_without_its_data_is_left_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    study(["cifar10", "shakespeare"], ["tune"], [0], NOWHERE, tmp_path / "cells")
    told = capsys.readouterr().out
    assert "cifar10 is left out" in told
    assert "shakespeare is left out" in told
    assert not (tmp_path / "cells").exists()


def test_other_work_is_noticed() -> None:
    """A process that spins keeps one core busy: at least a part of 1 / cores."""
    quiet = busy(0.2)
    assert 0 <= quiet <= 1
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        assert busy(0.5) >= 0.2 / (os.cpu_count() or 1)
    finally:
        spinning.kill()
        spinning.wait()


def test_names_agree() -> None:
    assert {*TASK_NAMES} == {*TASKS}
    assert {*METHOD_NAMES} == {*METHODS}


def example(method: str, seed: int, wall: float, test: float, retrained: float) -> dict[str, Any]:
    """A cell as a search of eight trials would leave it."""
    full = int(method in ("ray_asha", "asha"))
    events = [[wall * (i + 1) / 9, i, full, 1, 0.1 * i, 0.1 * i] for i in range(8)]
    return {
        "task": "digits",
        "method": method,
        "seed": seed,
        "mode": "max",
        "score": "accuracy",
        "reduced": False,
        "wall": wall,
        "apart": {"until the first trial began": 2.0} if method == "ray_asha" else {"sweep": 0.5},
        "winner": {"trial": 7, "config": {}, "epochs": 27, "score": test, "test": test},
        "floor": {"seconds": 0.5, "score": 0.9, "test": retrained},
        "settings": {
            "trials": 8,
            "max_t": 27,
            "reduction_factor": 3,
            "examples": {"train": 1197, "validation": 300, "test": 300},
            "space": {"lr": "(0.001, 1.0)"},
        },
        "environment": {
            "cpu": "a processor",
            "cores": 2,
            "threads": 2,
            "python": "3.11",
            "torch": "2.13",
            "ray": "2.60",
            "date": "2026-01-01 00:00 UTC",
            "load at start": 0.25 * seed,
            "busy before": 0.1 * seed,
        },
        "events": [*events, [wall, 7, 1, 27, test, test]],
    }


def test_smaller_prices_stand_beside_the_default(tmp_path: Path) -> None:
    """Spread 0.07: a test score of 0.97 is better than 0.9 by one. A training takes half a second."""
    assert not [*at_smaller_prices(tmp_path)]
    (tmp_path / "vs_asha").mkdir()
    for method, wall, test in (("ray_asha", 12.0, 0.9), ("tune", 3.0, 0.9), ("tune_one", 1.0, 0.97)):
        for seed in (0, 1):
            cell = example(method, seed, wall, test, test - 0.1)
            (tmp_path / "vs_asha" / f"digits-{method}-{seed}.json").write_text(json.dumps(cell))
    (found,) = at_smaller_prices(tmp_path)
    assert [row[1:] for row in found.rows] == [
        ("1", "12x", "2.00", "+1.0 spreads", "2 of 2", "2 of 2"),
        ("3", "4.00x", "6.00", "+0.0 spreads", "2 of 2", "2 of 2"),
    ]
    assert (
        found.meaning == "With `full_trainings=1`, a search costs 2.0 full trainings. It is 12.0 times as fast as ASHA."
    )


@pytest.mark.parametrize(("test", "verdict"), [(0.9, "not worse"), (0.5, "is worse")])
def test_the_page_says_what_the_cells_say(test: float, verdict: str, tmp_path: Path) -> None:
    """Spread sqrt(0.1^2 / 2) = 0.07; 12 s over 1 s is 12 times as fast, and 1 s two trainings of half a second."""
    folder = tmp_path / "vs_asha"
    folder.mkdir()
    for seed in (0, 1):
        for method, wall, own in (("ray_asha", 12.0, 0.9), ("asha", 4.0, 0.9), ("both", 3.0, 0.9), ("tune", 1.0, test)):
            cell = example(method, seed, wall, own, own - 0.1)
            (folder / f"digits-{method}-{seed}.json").write_text(json.dumps(cell))
    write_page(folder)
    page = (tmp_path / "vs_asha.md").read_text()
    assert page == markdown(read(folder), "vs_asha.png")
    assert "`tune` is 12.0 times as fast as Ray's ASHA. It costs 2.0 trainings of its winner." in page
    assert verdict in page
    assert ("**loss**" in page) == (verdict == "is worse")
    assert "Other work took at most 10% of the cores before a cell" in page
    assert "Ray's start-up, until the first trial began: 2.00 s" in page
    assert (tmp_path / "vs_asha.png").stat().st_size > 10_000
    rows = rows_of(read(folder), "digits")
    assert [*rows] == ["ray_asha", "asha", "both", "tune"]
    assert rows["tune"].speedup_without_start == (10.0, 10.0, 10.0)
    (fast,), (good,) = sooner(tmp_path), as_good(tmp_path)
    assert [row[1] for row in fast.rows[1:]] == ["not run"] * len(ON_GPU)
    assert fast.rows[0][1:5] == ["12x", "10x", "4.00x", "2.00"]
    reached = 2 if verdict == "not worse" else 0
    assert good.rows[0][-1] == f"{reached} of 2"
    assert ("**worse**" in good.rows[0][-2]) == (verdict == "is worse")
    assert ("On 1 of 1 tasks" in good.meaning) == (verdict == "is worse")
    assert rows["tune"].floors is not None
    assert math.isclose(rows["tune"].floors.median, 2.0)
