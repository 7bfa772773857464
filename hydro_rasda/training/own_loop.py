"""Full-size training by a function of the user's own, `train(worker)`: on one device, or on ranks of either backend."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import pickle
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fusion.streams import seed_generators
from hydro_rasda.checks import is_number, require
from hydro_rasda.config import TuneConfig
from hydro_rasda.contracts import EpochMetrics, History, TargetOutcome, TargetTask
from hydro_rasda.problem import Problem
from hydro_rasda.seeds import derive_seed
from hydro_rasda.training.best import bettered
from hydro_rasda.training.worker import Saving, State, Worker
from hydro_rasda.trial import Trial

METRICS = ("train_", "val_")
"""What the names of the metrics begin with that a run keeps."""


class Kept:
    """What a run keeps of what a training function reports.

    Args:
        settings: The run's.
        state: A checkpoint that training goes on from.

    Attributes:
        own: The function's own state in it.
    """

    def __init__(self, settings: TuneConfig, state: Mapping[str, Any] | None) -> None:
        self._settings = settings
        self._best = None if state is None else state.get("best")
        # A checkpoint that the library's own training left has none, where `full_size` came later.
        self.own: State | None = None if state is None else state.get("own", state)

    def taken(self, epoch: int, metrics: Mapping[str, Any], saving: Saving) -> tuple[dict[str, Any], Saving]:
        """An epoch's metrics as floats, and what gives the checkpoint after it: "own", "model" and "best".

        Raises:
            ValueError: where the run's metric is not among them, or the state has no model.
        """
        metric, mode = self._settings.metric, self._settings.mode
        rule = f"a mapping with the number {metric!r}, which is `tune`'s `metric`"
        require(is_number(metrics.get(metric)), "metrics", dict(metrics), rule)
        require(saving is not None, "state", None, "given with every report")
        numbers = {n: float(v) for n, v in metrics.items() if n.startswith(METRICS) and is_number(v)}
        if self._settings.keep == "best":
            self._best = bettered(self._best, epoch, numbers[metric], mode, lambda: _state_of(saving)["model"])
        best = {} if self._best is None else {"best": self._best}

        def whole() -> dict[str, Any]:
            own = _state_of(saving)
            return {"own": own, "model": own["model"], **best}

        return {**metrics, **numbers, "epoch": epoch}, whole


def _state_of(saving: Saving) -> dict[str, Any]:
    """What was given as a report's state.

    Raises:
        ValueError: where it holds no model, or what could not be read back without running code.
    """
    state = saving() if callable(saving) else saving
    rule = 'a dict whose "model" is the state dict of the model that `model_fn(worker.config)` builds'
    has_model = isinstance(state, Mapping) and isinstance(state.get("model"), Mapping)
    require(has_model, "state", sorted(map(str, state)) if isinstance(state, Mapping) else state, rule)
    assert state is not None
    written = io.BytesIO()
    try:
        torch.save(tree_map(lambda leaf: None if isinstance(leaf, Tensor) else leaf, dict(state)), written)
        torch.load(io.BytesIO(written.getvalue()), weights_only=True)
    except (AttributeError, TypeError, pickle.PickleError) as error:
        raise ValueError(f"`state` must hold tensors and plain values alone: {error}") from error
    return dict(state)


class Over(BaseException):
    """Leaves the training function where its part ends; what `except Exception` does not stop."""


class LocalWorker(Worker):
    """The only rank of a trial, in the process that trains it; it leaves the function where a unit of work ends.

    Args:
        problem: What is tuned.
        trial: The task's.
        task: Which epochs.
        state: What its source gave.
        should_stop: Asked after each epoch.
        on_epoch: Told of each.

    Attributes:
        history: The epochs.
        whole: Gives the checkpoint after the last; None before the first.
        left: Whether the function was left, as it was not to go on for now.
    """

    def __init__(
        self,
        problem: Problem,
        trial: Trial,
        task: TargetTask,
        state: Mapping[str, Any] | None,
        should_stop: Callable[[], bool],
        on_epoch: Callable[[int, EpochMetrics], None],
    ) -> None:
        assert problem.full_size is not None
        self._kept = Kept(problem.settings, state)
        config = copy.deepcopy(dict(trial.config))
        job = {"config": config, "trial": str(trial.number), "rank": 0, "world_size": 1, "workers": 1}
        saved: dict[str, Any] = {"state": self._kept.own, "iteration": task.span.start, "rescaled": [], "measured": {}}
        super().__init__(job, problem.full_size.data, problem.device, saved)
        self._settings, self._stop = problem.settings, task.span.stop
        self._should_stop, self._on_epoch = should_stop, on_epoch
        self.history: History = []
        self.whole: Saving = None
        self.left = False

    def _deliver(self, results: dict[str, Any], saving: Saving, final: bool) -> None:
        if self.left:  # the function went on all the same
            raise Over
        results, self.whole = self._kept.taken(self.iteration, results, saving)
        metrics = {name: value for name, value in results.items() if name.startswith(METRICS)}
        self.history.append((self.iteration, metrics))
        self._on_epoch(self.iteration, {name: [value] for name, value in metrics.items()})
        score = metrics[self._settings.metric]
        over = not math.isfinite(score) or self._settings.good_enough(score)
        self.left = over or self.iteration >= self._stop or (not final and self._should_stop())
        if self.left:
            raise Over


def train_own(
    problem: Problem,
    trial: Trial,
    task: TargetTask,
    state: Mapping[str, Any] | None,
    should_stop: Callable[[], bool],
    on_epoch: Callable[[int, EpochMetrics], None],
) -> TargetOutcome:
    """Train a full-size model for a span of epochs by the user's function, from a checkpoint or anew.

    The global generators are seeded by trial and span: what the function draws of them is the same again.

    Raises:
        ValueError: where the function returns without a report.
        Exception: what it raises.
    """
    assert problem.full_size is not None
    started = time.perf_counter()
    seed_generators(derive_seed(problem.settings.seed, "full size", trial.number, task.span.start))
    worker = LocalWorker(problem, trial, task, state, should_stop, on_epoch)
    with contextlib.suppress(Over):
        problem.full_size.train(worker)
    if worker.whole is None and state is None:
        raise ValueError("`full_size` returned without a report, but must end each epoch with `worker.report(...)`")
    kept = state if worker.whole is None else worker.whole()  # type: ignore[operator]
    seconds = time.perf_counter() - started
    return TargetOutcome(task, kept, worker.history, None, seconds, ended=not worker.left)


def train_own_on_rank(worker: Worker) -> None:
    """The same on a rank, from its last checkpoint to the trial's end, or to where the worker leaves it.

    Args:
        worker: Its `data` is the `Problem`; its configuration as of `train_full_size`.
    """
    problem: Problem = worker.data
    assert problem.full_size is not None
    kept = Kept(problem.settings, worker.checkpoint)
    worker.config, worker.data, worker.checkpoint = worker.config["config"], problem.full_size.data, kept.own
    worker.through, worker.last = kept.taken, problem.settings.max_t
    problem.full_size.train(worker)
