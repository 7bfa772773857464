"""Elastic trials on a real Ray with real gloo groups: 8 logical CPUs, 1 -> 2 -> 4 workers."""

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from ray import tune
from ray.tune.result_grid import ResultGrid

from hydro_rasda.backends.cluster import Entry, RASDAScheduler, elastic, read_journal
from tests.hydro_rasda.backends import trainables
from tests.hydro_rasda.backends.trainables import linear

FAULTS = [None, "dies", "hangs", "raises"]


class Curves(tune.Callback):  # type: ignore[misc]
    """The loss after each epoch of each kind of trial; Ray's own files lose rows where a trial is resumed."""

    def __init__(self) -> None:
        self.of: dict[str | None, dict[int, float]] = {fault: {} for fault in FAULTS}

    def on_trial_result(self, iteration: int, trials: list, trial: Any, result: dict, **info: Any) -> None:
        self.of[trial.config["fault"]][result["training_iteration"]] = result["val_loss"]


@pytest.fixture(scope="module")
def curves() -> Curves:
    return Curves()


@pytest.fixture(scope="module")
def trials(ray8: None, curves: Curves, tmp_path_factory: pytest.TempPathFactory) -> ResultGrid:
    folder = tmp_path_factory.mktemp("elastic")
    scheduler = RASDAScheduler(max_t=4, max_workers=4)
    tuner = tune.Tuner(
        elastic(linear, scheduler, data=trainables.data(), timeout_s=6),
        param_space={"fault": tune.grid_search(FAULTS), "folder": str(folder)},
        tune_config=tune.TuneConfig(metric="loss", mode="min", scheduler=scheduler),
        run_config=tune.RunConfig(
            storage_path=str(folder),
            name="run",
            verbose=0,
            callbacks=[curves],
            failure_config=tune.FailureConfig(max_failures=1),
            checkpoint_config=tune.CheckpointConfig(num_to_keep=1),
        ),
    )
    return tuner.fit()


def of(trials: ResultGrid, fault: str | None) -> tuple[tune.Result, list[Entry]]:
    result = next(r for r in trials if r.config is not None and r.config["fault"] == fault)
    assert result.metrics is not None
    entries = read_journal(str(Path(trials.experiment_path)))
    mine = {e.t: e for e in entries if e.trial == result.metrics["trial_id"]}
    return result, [mine[t] for t in sorted(mine)]


def one_process() -> list[float]:
    """The same training in plain torch: the loss after each epoch."""
    x, y = trainables.data()
    model, optimizer = trainables.build()
    curve = []
    for epoch in range(4):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(130):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        with torch.no_grad():
            curve.append(torch.nn.functional.cross_entropy(model(x), y).item())
    return curve


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_workers_and_faults_leave_each_point_of_the_curve_as_it_was(
    trials: ResultGrid, curves: Curves, fault: str | None
) -> None:
    result, entries = of(trials, fault)
    assert result.error is None
    assert [(e.t, e.workers, e.global_batch_size) for e in entries] == [
        (1, 1, 130),
        (2, 2, 130),
        (3, 4, 130),
        (4, 4, 130),
    ]
    assert curves.of[fault] == pytest.approx(dict(enumerate(one_process(), start=1)), abs=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("dies", ["died"]),
        ("hangs", ["did not answer for 6 s"]),
        ("raises", ["raised an error", "the user's own mistake"]),
    ],
)
def test_the_message_names_trial_rank_and_host(trials: ResultGrid, fault: str, words: list[str]) -> None:
    result, _ = of(trials, fault)
    assert result.metrics is not None
    text = Path(result.path, "error.txt").read_text()
    for word in [f"trial {result.metrics['trial_id']}: rank 1 of 2 on {socket.gethostname()}", *words]:
        assert word in text


@pytest.mark.slow
def test_data_is_in_memory_once_on_a_node(trials: ResultGrid) -> None:
    result, _ = of(trials, None)
    assert result.metrics is not None
    assert result.metrics["private_mb"] < 8  # of 32


@pytest.mark.slow
def test_older_checkpoints_are_removed(trials: ResultGrid) -> None:
    result, _ = of(trials, None)
    assert [p.name for p in Path(result.path).glob("checkpoint_*")] == [Path(result.checkpoint.path).name]


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"train": None}, TypeError, "`train` is None, but must be a function of a Worker"),
        ({"scheduler": "asha"}, TypeError, "`scheduler` is 'asha', but must be one of Ray Tune's"),
        ({"checkpoint_every": 0}, ValueError, "`checkpoint_every` is 0, but must be >= 1"),
        ({"timeout_s": 0}, ValueError, "`timeout_s` is 0, but must be > 0"),
        ({"backend": "mpi"}, ValueError, "`backend` is 'mpi', but must be 'gloo', 'nccl' or None"),
    ],
)
def test_bad_input(wrong: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        elastic(**{"train": linear, **wrong})
