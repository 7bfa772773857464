"""Measure the speed and memory of a kind's surrogates at each group width, and the speed of compiled steps."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, overload

from torch import Tensor, nn

from fusion import FusionWarning
from fusion.evaluate.backoff import is_out_of_memory
from fusion.graph import GraphWarning
from fusion.warn import warn
from fusion.width.plan import FusionPlan
from fusion.width.probe import compiled_speedup, plan_fusion
from hydro_rasda.common.trial import Trial
from hydro_rasda.data import Batch
from hydro_rasda.problem.precision import matrix_products
from hydro_rasda.problem.problem import Problem
from hydro_rasda.run.cache import Measured
from hydro_rasda.schedulers.packing_policy import MARGIN
from hydro_rasda.training.cuda_graphs import records
from hydro_rasda.training.lr_and_decay_by_parameter import multipliers, optimizer_settings

SECONDS_PER_WIDTH = 0.03
"""Time to measure each width, which is short compared with a sweep. A few steps are measured in any case."""

ONE_BY_ONE, AS_WRITTEN = "trials train one after another", "steps are not compiled"
"""The consequences if groups, or their compiled steps, cannot be measured."""


def measure_widths(problem: Problem, trials: Sequence[Trial], batch: Batch, room: float, cores: int) -> Measured | None:
    """Measure the trials' speed and memory at each width; if that fails, warn and return None.

    If a single trial does not fit a core's part of the memory, a single trial is measured with all of the memory.

    Args:
        trials: Trials of one kind, for one core.
        room: Bytes of memory for all cores.
        cores: Number of cores that share the memory.
    """
    surrogates = _Surrogates(problem, trials)

    def plan(most: int, memory: float, further: Mapping[str, Any]) -> FusionPlan:
        return plan_fusion(
            surrogates,
            [trial.config for trial in trials],
            partial(_loss, problem),
            batch,
            memory=max(1, int(memory / MARGIN)) if memory < math.inf else None,
            max_width=most,
            seconds=SECONDS_PER_WIDTH,
            multipliers=further,
            graph=records(problem),
        )

    try:
        with _measuring(problem):
            further = _multipliers(problem, trials[0], surrogates[0])
            try:
                found = plan(len(trials), room / cores, further)
                fits = found.micro_batches == 1
            except (RuntimeError, MemoryError) as error:
                fits = not is_out_of_memory(error)
                if fits:
                    raise
            if not fits and cores > 1:
                found = plan(1, room, further)
    except (Exception, SystemExit) as error:  # the user's model, loss or data may raise anything
        warn_unmeasured(ONE_BY_ONE, f"{type(error).__name__}: {error}")
        return None
    throughput = {str(width): rate for width, rate in found.throughput.items()}
    sizes = {"fixed": found.fixed_bytes, "each": found.bytes_per_trial}
    return {"width": found.width, "throughput": throughput, "obstacle": found.obstacle, **sizes}


def measure_compiled(problem: Problem, trials: Sequence[Trial]) -> Measured | None:
    """Measure the speedup of a group's compiled step and the time to compile; if that fails, warn and return None."""
    batch = next(problem.train_data.epoch(trials[0].batch_size, 0))
    try:
        with _measuring(problem):
            surrogates, configs = list(_Surrogates(problem, trials)), [trial.config for trial in trials]
            further = _multipliers(problem, trials[0], surrogates[0])
            loss = partial(_loss, problem)
            found = compiled_speedup(surrogates, configs, loss, batch, multipliers=further)
    except (Exception, SystemExit) as error:  # the user's model, loss or data may raise anything
        warn_unmeasured(AS_WRITTEN, f"{type(error).__name__}: {error}")
        return None
    return {"speedup": found.speedup, "seconds": found.compile_seconds}


def warn_unmeasured(what: str, why: str) -> None:
    """Warn that the speed of groups is unknown for the reason `why`, and of the consequence `what`."""
    warn(f"{what}, because measuring how fast groups train failed: {why}")


def _loss(problem: Problem, model: nn.Module, part: Batch) -> Tensor:
    return problem.objective(model, part)["loss"]


@contextmanager
def _measuring(problem: Problem) -> Iterator[None]:
    """Measure with the precision of training and without warnings.

    The caller warns of obstacles, because the warnings are due even if the result comes from an earlier measurement.
    """
    with warnings.catch_warnings(), matrix_products(problem.settings.precision):
        warnings.simplefilter("ignore", FusionWarning)
        warnings.simplefilter("ignore", GraphWarning)
        yield


def _multipliers(problem: Problem, trial: Trial, surrogate: nn.Module) -> Mapping[str, Any]:
    settings = optimizer_settings(problem.objective, surrogate, trial.config)
    return multipliers(settings, surrogate, problem.settings.sweep.surrogate)


class _Surrogates(Sequence[nn.Module]):
    """The trials' surrogates; each is built at its first use."""

    def __init__(self, problem: Problem, trials: Sequence[Trial]) -> None:
        self._problem, self._trials = problem, trials
        self._built: dict[int, nn.Module] = {}

    def __len__(self) -> int:
        return len(self._trials)

    @overload
    def __getitem__(self, at: int) -> nn.Module: ...

    @overload
    def __getitem__(self, at: slice) -> list[nn.Module]: ...

    def __getitem__(self, at: int | slice) -> nn.Module | list[nn.Module]:
        if isinstance(at, slice):
            return [self[i] for i in range(len(self))[at]]
        if at not in self._built:
            self._built[at] = self._problem.surrogate(self._trials[at])
        return self._built[at]
