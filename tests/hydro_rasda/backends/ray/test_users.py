"""What Ray's users do: other resources, one scheduler object for several experiments, trainers of Ray Train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray import tune
from ray.train.base_trainer import BaseTrainer
from ray.tune.result_grid import ResultGrid

from hydro_rasda import RASDAScheduler, Worker, elastic
from hydro_rasda.backends.ray import read_journal
from hydro_rasda.backends.ray.rank_actors import actor_options

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def count(worker: Worker) -> None:
    while worker.iteration < 4:
        worker.report({"loss": worker.config["loss"], "ranks": worker.world_size}, {"iteration": worker.iteration})


def fit(trainable: Any, scheduler: RASDAScheduler, folder: Path, losses: list[float]) -> ResultGrid:
    return tune.Tuner(
        trainable,
        param_space={"loss": tune.grid_search(losses)},
        tune_config=tune.TuneConfig(metric="loss", mode="min", scheduler=scheduler),
        run_config=tune.RunConfig(storage_path=str(folder.parent), name=folder.name, verbose=0),
    ).fit()


@pytest.mark.slow
@pytest.mark.usefixtures("ray8")
def test_workers_may_ask_for_memory(tmp_path: Path) -> None:
    scheduler = RASDAScheduler(max_t=4, grace_period=2, resources_per_worker={"CPU": 1, "memory": 50e6})
    (result,) = fit(elastic(count, scheduler), scheduler, tmp_path / "run", [1.0])
    assert result.error is None
    assert result.metrics is not None
    assert (result.metrics["training_iteration"], result.metrics["ranks"]) == (4, 2)


def test_resources_are_asked_for_under_their_own_names() -> None:
    asked = actor_options({"CPU": 2, "memory": 5, "object_store_memory": 7, "TPU": 1})
    assert asked == {"num_cpus": 2, "num_gpus": 0, "memory": 5, "resources": {"TPU": 1}}


@pytest.mark.usefixtures("ray8")
@pytest.mark.slow
def test_a_scheduler_object_serves_one_experiment_after_another(tmp_path: Path) -> None:
    """The second knows nothing of the first, in which all were better."""
    scheduler = RASDAScheduler(max_t=4, grace_period=2)
    for name, losses in (("first", [1.0, 2.0]), ("second", [30.0, 40.0])):
        results = fit(elastic(count, scheduler), scheduler, tmp_path / name, losses)
        assert [result.error for result in results] == [None, None]
        entries = read_journal(str(tmp_path / name))
        assert {entry.score for entry in entries} == set(losses)
        best = next(r for r in results if r.config is not None and r.config["loss"] == losses[0])
        assert best.metrics is not None
        assert best.metrics["training_iteration"] == 4


class Trainer(BaseTrainer):  # type: ignore[misc]
    def training_loop(self) -> None:
        raise AssertionError("no training begins")


@pytest.mark.usefixtures("ray2")
def test_a_trainer_of_ray_train_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its first version; Tune itself refuses those of the second."""
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "0")
    with pytest.raises(Exception, match="`trainable` is 'Trainer', a Trainer of Ray Train, whose ScalingConfig says"):
        fit(Trainer().as_trainable(), RASDAScheduler(max_t=4), tmp_path / "run", [1.0])
