"""A past run as a workload: journals written by the library's own store."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hydro_rasda.history.lines import Unit
from hydro_rasda.run.run_folder import Store
from hydro_rasda.simulator import SweepCost, read_past_run
from hydro_rasda.simulator.past_run import Stretch, continued, costs

NAN, INF = np.nan, np.inf

ASKED = {
    "metric": "val_loss",
    "mode": "min",
    "max_t": 4,
    "train_data": "tensors (640, 8) float32, (640,) int64",
    "model": {
        "0.weight": "(16, 8) torch.float32",
        "0.bias": "(16,) torch.float32",
        "1.weight": "(4, 16) torch.bfloat16",
    },
}


def metrics(heat: str, trial: int, epoch: int, loss: float) -> dict[str, Any]:
    return {"event": "metrics", "heat": heat, "trial": trial, "epoch": epoch, "val_loss": loss}


def trial(number: int, batch_size: int) -> dict[str, Any]:
    return {"event": "trial", "trial": number, "config": {"lr": 0.1, "batch_size": batch_size}}


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., Path]:
    """Writes a run: units as (key, lines), all of them without a duration of their own."""

    def write(*units: tuple[str, list[dict[str, Any]]], **changes: Any) -> Path:
        with Store.open(tmp_path / "run", ASKED | changes, "auto") as store:
            for key, lines in units:
                store.record(key, Unit(None, lines))
        return tmp_path / "run"

    return write


def test_a_stopped_trial_goes_on_with_the_mean_step_of_the_others() -> None:
    table = np.array([[8.0, 6.0, 5.0], [9.0, 5.0, 3.0], [10.0, NAN, NAN], [7.0, 6.5, NAN]])
    # Steps to epoch 2: -2, -4, -0.5; to epoch 3: -1, -2.
    expected = [[8, 6, 5], [9, 5, 3], [10, 10 - 6.5 / 3, 10 - 6.5 / 3 - 1.5], [7, 6.5, 5.0]]
    assert continued(table) == pytest.approx(np.array(expected))


def test_what_nobody_trained_leaves_scores_as_they_are() -> None:
    assert continued(np.array([[2.0, 1.0, NAN], [3.0, NAN, NAN]])).tolist() == [[2, 1, 1], [3, 2, 2]]


def test_a_run_of_several_metrics_is_read_by_the_first_that_training_measures(record: Callable[..., Path]) -> None:
    asked = {"metric": ["macs", "val_loss"], "mode": ["min", "max"]}
    path = record(("sweep/to-1/group-0", [metrics("sweep", n, 1, 3.0 - n) for n in range(3)]), **asked)
    assert read_past_run(path, metric="val_loss", mode="max").workload.best(1) == 3.0
    with pytest.raises(ValueError, match="`metric` is 'macs', but must be the run's, 'val_loss'"):
        read_past_run(path, metric="macs")
    with pytest.raises(ValueError, match="`mode` is 'min', but must be the run's, 'max'"):
        read_past_run(path, mode="min")


def test_a_trial_whose_training_loss_is_not_finite_has_diverged(record: Callable[..., Path]) -> None:
    lines = [metrics("sweep", n, t, 1.0 / t) for n in range(2) for t in (1, 2)]
    path = record(("sweep/to-2/group-0", [*lines[:3], lines[3] | {"train_loss": None}]), max_t=2)
    assert np.isnan(read_past_run(path).workload.scores).tolist() == [[False, False], [False, True]]


def test_before_its_first_score_a_trial_has_that() -> None:
    assert continued(np.array([[NAN, 2.0, 1.0]])).tolist() == [[2, 2, 1]]


def test_a_diverged_trial_stays_diverged() -> None:
    filled = continued(np.array([[3.0, INF, NAN], [2.0, 1.0, 0.5]]))
    assert np.isnan(filled[0]).tolist() == [False, True, True]
    assert filled[1].tolist() == [2.0, 1.0, 0.5]


def test_reads_what_the_store_wrote(record: Callable[..., Path]) -> None:
    path = record(
        ("sweep/kinds-from-0", [trial(0, 64), trial(1, 64), trial(2, 16)]),
        ("sweep/to-1/group-0", [metrics("sweep", n, 1, 3.0 - n) for n in range(3)]),
        ("sweep/to-4/group-0", [metrics("sweep", 2, t, 1.0 - t / 10) for t in (2, 3, 4)]),
        ("race/trial-2/to-2", [metrics("race", 2, t, 0.9) for t in (1, 2)]),
    )
    run = read_past_run(path)
    assert run.workload.scores[:, 0].tolist() == [3.0, 2.0, 1.0]
    assert run.workload.scores[2].tolist() == [1.0, 0.8, 0.7, 0.6]
    assert run.workload.scores[0] == pytest.approx([3.0, 2.8, 2.7, 2.6])
    assert run.parameters == 16 * 8 + 16 + 4 * 16
    assert run.gradient_bytes == 4 * (16 * 8 + 16) + 2 * 4 * 16
    assert run.steps == 640 / 64
    assert run.epoch_seconds is not None
    assert run.settings["max_t"] == 4


def train(store: Store, trial: int, stop: int, each: float, start: int = 0, workers: int | None = None) -> None:
    """Records epochs of a full-size trial that took so many seconds each."""
    own = {} if workers is None else {"workers": workers}
    lines = [metrics("race", trial, t, 1 / t) | own for t in range(start + 1, stop + 1)]
    store.record(f"race/trial-{trial}/to-{stop}", Unit(None, lines, each * (stop - start)))


def test_epoch_times_are_those_of_full_size_units(tmp_path: Path) -> None:
    with Store.open(tmp_path / "run", ASKED, "auto") as store:
        train(store, 0, 2, each=3.0)
        train(store, 1, 2, each=1.0)
    run = read_past_run(tmp_path / "run")
    assert run.epoch_seconds == 2.0
    assert run.workload.work.tolist() == [1.5, 0.5]
    assert run.workload.scores[1].tolist() == [1, 1 / 2, 1 / 2, 1 / 2]
    assert run.steps is None


@pytest.mark.parametrize("slower", [1.0, 30.0])
def test_a_machine_that_is_slower_for_a_while_makes_no_trial_dearer(tmp_path: Path, slower: float) -> None:
    """Trials 2 and 3 cost twice as much as the others. As fewer are left, each has more of the machine; the last one
    trains while other programs run, too."""
    with Store.open(tmp_path / "run", ASKED, "auto") as store:
        for trial, each in enumerate((1.0, 1.0, 2.0, 2.0)):
            train(store, trial, 1, each)
        for trial, each in enumerate((0.6, 0.6, 1.2)):
            train(store, trial, 2, each, start=1)
        train(store, 2, 4, 1.0 * slower, start=2)
    run = read_past_run(tmp_path / "run")
    assert run.workload.work == pytest.approx(np.array([1.0, 1.0, 2.0, 2.0]) / 1.5)
    assert run.epoch_seconds is not None
    assert 0.9 <= run.epoch_seconds <= 1.5


def test_one_slow_stretch_of_a_trial_does_not_set_its_cost(tmp_path: Path) -> None:
    with Store.open(tmp_path / "run", ASKED, "auto") as store:
        for stop in (1, 2, 4):
            for trial in range(3):
                slow = (trial, stop) == (1, 2)
                train(store, trial, stop, each=50.0 if slow else 1.0, start=stop // 2)
    run = read_past_run(tmp_path / "run")
    assert run.workload.work.tolist() == [1.0, 1.0, 1.0]
    assert run.epoch_seconds == 1.0


def test_trials_are_compared_only_over_the_same_epochs(tmp_path: Path) -> None:
    """The second epoch takes longer, and trial 0 trains both in one unit."""
    with Store.open(tmp_path / "run", ASKED, "auto") as store:
        train(store, 0, 2, each=1.0)
        train(store, 1, 1, each=1.0)
        train(store, 1, 2, each=3.0, start=1)
    assert read_past_run(tmp_path / "run").workload.work.tolist() == [1.0, 1.0]


def test_epochs_on_ray_count_in_seconds_of_one_worker(tmp_path: Path) -> None:
    """Those of the fewest workers, of a run whose trials grew."""
    with Store.open(tmp_path / "run", ASKED, "auto") as store:
        for trial, epoch, workers, seconds in ((0, 1, 2, 3.0), (0, 2, 4, 2.9), (1, 1, 2, 1.0)):
            line = metrics("race", trial, epoch, 0.5) | {"workers": workers}
            store.record(f"race/trial-{trial}/to-{epoch}", Unit(None, [line], seconds))
    run = read_past_run(tmp_path / "run")
    assert run.epoch_seconds == (6.0 + 2.0) / 2
    assert run.workload.work.tolist() == [1.5, 0.5]


def test_restarts_are_what_lies_between_two_sizes_of_a_trial(tmp_path: Path) -> None:
    """The clock of a store runs on, so that gaps are short; a trial that keeps its workers has none."""
    with Store.open(tmp_path / "run", ASKED, "auto") as store:
        for number, sizes in enumerate(((1, 2, 2, 4), (1, 1, 1, 1))):
            for stop, workers in enumerate(sizes, start=1):
                train(store, number, stop, each=0.0, start=stop - 1, workers=workers)
    run = read_past_run(tmp_path / "run")
    assert run.resizes == 2
    assert run.restart_seconds is not None
    assert 0 <= run.restart_seconds < 60


def test_the_sweep_and_its_finalists(tmp_path: Path) -> None:
    with Store.open(tmp_path / "run", ASKED, "auto") as store:
        for group, seconds, trials in ((0, 3.0, (0, 1)), (2, 5.0, (2,))):
            lines = [metrics("sweep", n, 1, 1.0 + n) for n in trials]
            store.record(f"sweep/to-1/from-0/group-{group}", Unit(None, lines, seconds))
        lines = [metrics("sweep", 0, t, 1.0 / t) for t in (2, 3)]
        store.record("sweep/to-3/from-1/group-0", Unit(None, lines, 4.0))
        train(store, 0, 4, each=10.0)
    run = read_past_run(tmp_path / "run")
    assert run.sweep == SweepCost(trials=3, device_seconds=12.0, longest=5.0 + 4.0, epochs=5)
    assert run.workload.trials == 3
    assert run.finalists is not None
    assert run.finalists.scores.tolist() == [[1, 1 / 2, 1 / 3, 1 / 4]]


def test_a_middle_heat_is_a_cost_and_chooses_what_trains_at_full_size(tmp_path: Path) -> None:
    plan = {"width": 0.25, "entrants": 2, "finalists": 1, "shares": [0.1, 0.2]}
    with Store.open(tmp_path / "run", ASKED | {"top_k": 4}, "auto") as store:
        store.record("heats", Unit(plan))
        store.record("sweep/to-1/from-0/group-0", Unit(None, [metrics("sweep", n, 1, 1.0) for n in range(3)], 3.0))
        store.record("middle/to-1/from-0/group-0", Unit(None, [metrics("middle", n, 1, 1.0) for n in range(2)], 5.0))
        train(store, 0, 4, each=10.0)
    run = read_past_run(tmp_path / "run")
    assert run.sweep == SweepCost(trials=3, device_seconds=8.0, longest=8.0, epochs=3)
    assert run.settings["top_k"] == 1


def test_failed_trials_and_half_a_line(record: Callable[..., Path]) -> None:
    path = record(
        (
            "sweep/to-1/group-0",
            [
                metrics("sweep", 0, 1, 0.5),
                metrics("sweep", 1, 1, NAN),
                {"event": "failed", "trial": 2, "error": "Traceback"},
            ],
        )
    )
    with open(path / "journal.jsonl", "a") as file:
        file.write('{"event": "metrics", "heat": "swe')
    before = (path / "journal.jsonl").read_bytes()
    run = read_past_run(path)
    assert np.isnan(run.workload.scores[:, 3]).tolist() == [False, True, True]
    assert run.epoch_seconds is None
    assert (path / "journal.jsonl").read_bytes() == before


def test_a_finalist_that_fails_at_full_size_leaves_its_surrogate_as_it_was(record: Callable[..., Path]) -> None:
    path = record(
        ("sweep/to-3/group-0", [metrics("sweep", n, t, 1.0 / t) for n in (1, 2) for t in (1, 2, 3)]),
        ("race/trial-1/to-1", [metrics("race", 1, 1, 0.5)]),
        ("race/trial-2/to-1", [metrics("race", 2, 1, 0.5)]),
        ("race/trial-2/failed-after-1", [{"event": "failed", "trial": 2, "error": "Traceback"}]),
    )
    run = read_past_run(path)
    assert np.isfinite(run.workload.scores).all()
    assert run.finalists is not None
    assert np.isfinite(run.finalists.scores[:, 3]).tolist() == [True, False]


def test_data_sets_tell_their_length_and_loaders_do_not(record: Callable[..., Path]) -> None:
    lines = [trial(0, 10), metrics("sweep", 0, 1, 0.5)]
    assert read_past_run(record(("a", lines), train_data="CIFAR10 of 500")).steps == 50


def test_bad_input(tmp_path: Path, record: Callable[..., Path]) -> None:
    with pytest.raises(FileNotFoundError, match=r"`run` is .*, but must be the folder of a run, which holds run.json"):
        read_past_run(tmp_path)
    with pytest.raises(ValueError, match=r"`run` is .*, but must have trained at least one epoch"):
        read_past_run(record())


def test_the_costs_of_long_trainings_take_no_time() -> None:
    stretches = {Stretch(1, t, t): {0: 1.0 + t % 7, 1: 2.0 + 2 * (t % 7)} for t in range(20_000)}
    began = time.monotonic()
    seconds, relative = costs(stretches)
    assert time.monotonic() - began < 5
    assert relative[1] == 2 * relative[0]
    assert seconds == 4.0 * 1.5
