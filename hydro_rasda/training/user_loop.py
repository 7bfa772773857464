"""Full-size training by a function of the user's own, `train(worker)`: on one device, or on ranks of either backend."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fusion.streams import seed_generators
from hydro_rasda.checks import is_metric, require
from hydro_rasda.config import TuneConfig
from hydro_rasda.contracts import EpochMetrics, FullSizeOutcome, FullSizeTask
from hydro_rasda.problem import Problem
from hydro_rasda.seeds import derive_seed
from hydro_rasda.training.kept_epoch import bettered
from hydro_rasda.training.span_worker import METRICS, Over, SpanWorker
from hydro_rasda.training.worker import Saving, State, Worker
from hydro_rasda.trial import Trial


class Kept:
    """The part of a training function's reports that a run keeps; training goes on from the checkpoint `state`."""

    def __init__(self, settings: TuneConfig, state: Mapping[str, Any] | None) -> None:
        self._settings = settings
        self._best = None if state is None else state.get("best")
        # A checkpoint that the library's own training left has none, where `race.train` came later.
        self.own: State | None = None if state is None else state.get("own", state)

    def taken(self, epoch: int, metrics: Mapping[str, Any], saving: Saving) -> tuple[dict[str, Any], Saving]:
        """Return an epoch's metrics as floats, and a function that returns its checkpoint ("own", "model", "best")."""
        metric, mode = self._settings.metric, self._settings.mode
        for name in self._settings.comparison.trained:
            rule = f"a mapping with the number {name!r}, which is `tune`'s `metric`, or has bounds"
            require(is_metric(metrics.get(name)), "metrics", dict(metrics), rule)
        require(saving is not None, "state", None, "given with every report")
        numbers = {n: float(v) for n, v in metrics.items() if n.startswith(METRICS) and is_metric(v)}
        if self._settings.race.keep == "best":
            self._best = bettered(
                self._best, epoch, numbers[metric], mode, lambda: copy.deepcopy(_state_of(saving)["model"])
            )
        best = {} if self._best is None else {"best": self._best}

        def whole() -> dict[str, Any]:
            own = _state_of(saving)
            return {"own": own, "model": own["model"], **best}

        return {**metrics, **numbers, "epoch": epoch}, whole


def _state_of(saving: Saving) -> dict[str, Any]:
    """Return the state of a report; ValueError if it holds no model, or objects that only running code reads back."""
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


def train_own(
    problem: Problem,
    trial: Trial,
    task: FullSizeTask,
    state: Mapping[str, Any] | None,
    should_stop: Callable[[], bool],
    on_epoch: Callable[[int, EpochMetrics], None],
) -> FullSizeOutcome:
    """Train a full-size model for a span of epochs by the user's function, from a checkpoint or anew."""
    started = time.perf_counter()
    worker = SpanWorker(problem, trial, task, state, should_stop, on_epoch)
    with contextlib.suppress(Over):
        train_own_on_rank(worker)
    reached = worker.reached(state)
    seconds = time.perf_counter() - started
    return FullSizeOutcome(task, reached, worker.history, None, seconds, ended=not worker.left)


def train_own_on_rank(worker: Worker) -> None:
    """The same on a rank, from its last checkpoint to the trial's end, or to where the worker leaves it."""
    problem: Problem = worker.data
    assert problem.full_size is not None
    kept = Kept(problem.settings, worker.checkpoint)
    # By trial, epoch and rank: what the function draws of the global generators is the same again.
    seed = derive_seed(problem.settings.seed, "full size", worker.config["trial"], worker.iteration)
    seed_generators(derive_seed(seed, "rank", worker.rank) if worker.rank else seed)
    worker.config, worker.data, worker.checkpoint = worker.config["config"], problem.full_size.data, kept.own
    worker.through = kept.taken
    problem.full_size.train(worker)
