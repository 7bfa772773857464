"""Train by the user's own function, `train(worker)`: in any heat, on one device or on ranks of any backend.

When a task ends, `worker.report` raises `Over`, so that the rank leaves the function.
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
import os
import pickle
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fusion.streams import preserved_generators, seed_generators
from fusion.warn import warn
from hydro_rasda.common.argument_checks import is_metric, require
from hydro_rasda.common.seeds import derive_seed
from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import EpochMetrics, History, Outcome, Task
from hydro_rasda.data import ALONE, Shard
from hydro_rasda.problem.problem import Problem
from hydro_rasda.run.checkpoints import DamagedCheckpoint
from hydro_rasda.schedulers.ranking import ranked
from hydro_rasda.settings.config import TuneConfig, check_reported
from hydro_rasda.training.best_weights import bettered
from hydro_rasda.training.width_scaled_rates import WidthScaledRates
from hydro_rasda.training.worker import Saving, State, Worker

METRICS = ("train_", "val_")
"""Prefixes of the metrics that a run keeps. The metrics that compare trials are kept under any name."""


_FULL_WIDTH = (
    "`train` does not call `worker.model()`, so that the sweep trains at full width: build the model by it, or set "
    "`sweep=SweepConfig(surrogate=1)`, from which full-size training goes on"
)


class Over(BaseException):
    """Raised to leave the user's training function when a task ends; `except Exception` does not catch it."""


class SpanWorker(Worker):
    """A worker that trains a task's span of epochs; when rank 0 leaves the training function, all ranks do.

    `config` holds the trial's number and configuration, and `data` is the problem. `train_own_on_rank` replaces them by
    the user's configuration and data.

    Args:
        should_stop: Called after each epoch; rank 0's answer counts.
        on_epoch: Called by rank 0 after each epoch.
        kept: Names of further values that the run keeps besides metrics.
        carried: Values of `Worker.saved` besides the state, see `RankPlace`.

    Attributes:
        history: The epochs and their metrics, on rank 0.
        saving: The state after the last epoch, or a function that returns it; None before the first report.
        left: True if the worker ended the training function; False if the function returned by itself.
        names: Names in the state dict of the model that `model` built; None before its first call.
    """

    def __init__(
        self,
        problem: Problem,
        trial: Trial,
        task: Task,
        state: State | None,
        should_stop: Callable[[], bool],
        on_epoch: Callable[[int, EpochMetrics], None],
        shard: Shard = ALONE,
        carried: Mapping[str, Any] = MappingProxyType({}),
        kept: Collection[str] = (),
    ) -> None:
        config, world = {"trial": trial.number, "config": copy.deepcopy(dict(trial.config))}, shard.world
        job = {"config": config, "trial": str(trial.number), "rank": shard.rank, "world_size": world, "workers": world}
        saved = {"state": state, "iteration": task.span.start, "rescaled": [], "measured": {}, **carried}
        super().__init__(job, problem, problem.device, saved)
        self._problem, self._trial, self._process = problem, trial, os.getpid()
        self._settings, self._stop = problem.settings, task.span.stop
        self._kept = {*kept, *problem.settings.comparison.trained}
        self._is_full_size = task.heat == "race"
        self.width_ratio = 1.0 if self._is_full_size else problem.settings.sweep.surrogate
        self.scaled = WidthScaledRates(self.width_ratio)
        self.names: frozenset[str] | None = None
        self._should_stop, self._on_epoch = should_stop, on_epoch
        self.history: History = []
        self.saving: Saving = None
        self.left = self._said_final = False

    @property
    def max_t(self) -> int:
        return self._settings.max_t

    def model(self) -> nn.Module:
        # Building a model seeds the generators. Afterwards, `train` must draw the same numbers as if no model was
        # built.
        with preserved_generators():
            built = self._problem.target(self._trial) if self._is_full_size else self._problem.surrogate(self._trial)
        if self.width_ratio < 1:
            self.scaled.note(built)
        self.names = frozenset(built.state_dict())
        return self.prepare(built)

    def report(self, metrics: Mapping[str, Any], state: Saving = None, *, final: bool = False) -> None:
        if self.left or self._said_final:  # the function caught `Over`, or continued after its last report
            raise Over
        if os.getpid() != self._process:
            raise RuntimeError(
                "`worker.report` is called in a process that `train` forked, but must be called in its own"
            )
        if self.width_ratio < 1 and not self.scaled:
            warn(_FULL_WIDTH)
        super().report(metrics, state, final=final)
        if self.world_size > 1:
            said = torch.tensor(int(self.left), device=self.device)
            dist.broadcast(said, 0)
            self.left = bool(said)
        if self.left:
            raise Over

    def reached(self, before: State | None) -> State | None:
        """Return the last reported state; `before` if nothing was reported.

        Raises:
            ValueError: On rank 0, if nothing was reported and `before` is None.
        """
        if self.rank == 0 and self.saving is None and before is None:
            raise ValueError("`train` returned without a report, but must end each epoch with `worker.report(...)`")
        return self.saving() if callable(self.saving) else self.saving or before

    def _attend(self, saving: Saving, final: bool) -> None:
        self.saving = saving

    def _deliver(self, results: dict[str, Any], saving: Saving, final: bool) -> None:
        self.saving = saving
        kept = {name: value for name, value in results.items() if name.startswith(METRICS) or name in self._kept}
        self.history.append((self.iteration, kept))
        self._on_epoch(self.iteration, {name: [value] for name, value in kept.items()})
        score = kept[self._settings.metric]
        over = not math.isfinite(score) or (self.width_ratio == 1 and self._settings.good_enough(score))
        self._said_final = final and self.iteration < self._settings.max_t
        self.left = over or (not self._said_final and (self.iteration >= self._stop or self._should_stop()))


class KeptReports:
    """The part of a training function's reports that a run keeps.

    Args:
        state: The earlier checkpoint, if any.
        names: Returns `SpanWorker.names`.
    """

    def __init__(
        self, settings: TuneConfig, state: Mapping[str, Any] | None, names: Callable[[], frozenset[str] | None]
    ) -> None:
        self._settings, self._names = settings, names
        self._best = None if state is None else state.get("best")
        # If the library's own loop wrote the checkpoint, the whole checkpoint is the state. This happens if a user adds
        # `train` in a later call.
        self.own: State | None = None if state is None else state.get("own", state)

    def taken(self, epoch: int, metrics: Mapping[str, Any], saving: Saving) -> tuple[dict[str, Any], Saving]:
        """Return an epoch's metrics as floats, and a function that returns its checkpoint ("own", "model", "best")."""
        metric, mode = self._settings.metric, self._settings.mode
        for name in self._settings.comparison.trained:
            rule = f"a mapping with the number {name!r}, which is `tune`'s `metric`, or has bounds"
            require(is_metric(metrics.get(name)), "metrics", dict(metrics), rule)
            check_reported(name, metrics)
        require(saving is not None, "state", None, "given with every report")
        wanted = {n: v for n, v in metrics.items() if n.startswith(METRICS) or n in self._settings.comparison.trained}
        numbers = {n: float(v) for n, v in wanted.items() if isinstance(v, (int, float))}
        # In a journal, a training loss that is not finite says that the trial has diverged. Here the metric says so.
        if not math.isfinite(numbers.get("train_loss", 0.0)) and "train_loss" not in self._settings.comparison.trained:
            del numbers["train_loss"]
        others = {n: v for n, v in metrics.items() if n not in wanted}
        if self._settings.race.keep == "best":
            self._best = bettered(
                self._best, epoch, numbers[metric], mode, lambda: copy.deepcopy(self._state_of(saving)["model"])
            )
        best = {} if self._best is None else {"best": self._best}

        def whole() -> dict[str, Any]:
            own = self._state_of(saving)
            return {"own": own, "model": own["model"], **best}

        return {**others, **numbers, "epoch": epoch}, whole

    def _state_of(self, saving: Saving) -> dict[str, Any]:
        state, names = _state_of(saving), self._names()
        if names is not None and (other := sorted(map(str, names ^ state["model"].keys()))):
            rule = "the state dict of the model that `worker.model()` returned, not of a wrapper, such as that of "
            rule += f"`torch.compile`; it has or lacks {other[:3]}"
            require(False, "state['model']", sorted(map(str, state["model"])), rule)
        return state


def _state_of(saving: Saving) -> dict[str, Any]:
    """Return the state of a report, which gave the state or a function that returns it.

    Raises:
        ValueError: If the state has no "model", or holds objects that `torch.load(weights_only=True)` refuses.
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


def train_own(
    problem: Problem,
    trial: Trial,
    task: Task,
    state: Mapping[str, Any] | None,
    should_stop: Callable[[], bool],
    on_epoch: Callable[[int, EpochMetrics], None],
) -> Outcome:
    """Train a model for a span of epochs by the user's function, from a checkpoint or anew."""
    started = time.perf_counter()
    worker = SpanWorker(problem, trial, task, state, should_stop, on_epoch)
    with contextlib.suppress(Over), _in_one_process():
        train_own_on_rank(worker)
    reached = worker.reached(state)
    seconds = time.perf_counter() - started
    return Outcome.of_model(trial.number, reached, worker.history, seconds, ended=not worker.left)


@contextlib.contextmanager
def _in_one_process() -> Iterator[None]:
    """If the user's function forks, end the child where it leaves that function, so that it runs no library code."""
    here = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != here:
            os._exit(1)


def train_own_on_rank(worker: SpanWorker) -> None:
    """Call the user's function on one rank, from the worker's last checkpoint; the function returns or raises `Over`.

    If the checkpoint comes from a sweep in which the function returned early, the function is not called again.
    """
    problem: Problem = worker.data
    assert problem.own_loop is not None
    if worker.checkpoint is not None and worker.checkpoint.get("over"):
        return
    kept = KeptReports(problem.settings, worker.checkpoint, lambda: worker.names)
    # The seed depends on trial, epoch and rank, so that a repeated call draws the same numbers from global generators.
    size = "full size" if worker.width_ratio == 1 else "surrogate"
    seed = derive_seed(problem.settings.seed, size, worker.config["trial"], worker.iteration)
    seed_generators(derive_seed(seed, "rank", worker.rank) if worker.rank else seed)
    worker.config, worker.data, worker.checkpoint = worker.config["config"], problem.own_loop.data, kept.own
    worker.through = kept.taken
    with worker.scaled.watched():
        problem.own_loop.train(worker)


def train_own_surrogate(
    problem: Problem,
    trial: Trial,
    task: Task,
    load: Callable[[str], Mapping[str, Any]],
    should_stop: Callable[[], bool],
    on_epoch: Callable[[int, EpochMetrics], None],
) -> Outcome:
    """Train a trial of the sweep to its next milestone by the user's function.

    If the function returns early, the metrics of its best epoch count as those of all later epochs. They decide at each
    later milestone, and the function is not called again.
    """
    started, own = time.perf_counter(), task.copies.get(trial.number, trial.number)
    try:
        state = next((found for key in task.sources if (found := state_in(load(key), own)) is not None), None)
        outcome = train_own(problem, trial, task, state, should_stop, on_epoch)
        epochs, before = outcome.epochs, [] if state is None else [(0, state["top"])]
        top = _best([*before, *epochs], problem.settings)
        if outcome.ended:
            trained = epochs[-1][0] if epochs else task.span.start
            epochs = [*epochs, *((epoch, dict(top)) for epoch in range(trained + 1, task.span.stop + 1))]
        reached = {**outcome.state, "top": top, "over": outcome.ended}
        return Outcome.of_model(trial.number, reached, epochs, outcome.seconds)
    except DamagedCheckpoint:
        raise  # the trial that loads the checkpoint is not at fault
    except (Exception, SystemExit):  # an uncaught SystemExit would look like success
        return Outcome.failed(trial.number, traceback.format_exc(), time.perf_counter() - started)


def _best(epochs: History, settings: TuneConfig) -> Mapping[str, float]:
    """Return the metrics of the best epoch. Values that are not numbers are left out."""
    best = ranked({i: metrics[settings.metric] for i, (_, metrics) in enumerate(epochs)}, settings.mode)[0]
    return {name: value for name, value in epochs[best][1].items() if is_metric(value)}


def state_in(checkpoint: Mapping[str, Any], number: int) -> Mapping[str, Any] | None:
    """Return the state of a trial in a checkpoint of the sweep; None if the trial is not in the checkpoint."""
    return next((part["state"] for part in checkpoint["parts"] if number in part["members"]), None)
