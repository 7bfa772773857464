"""Checks of the winner: can the validation examples tell it from the second, and does it overfit at full size?"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import stdev
from typing import Any, NamedTuple

import torch
from torch import nn

from fusion.streams import preserved_generators
from hydro_rasda.common.heat_names import HeatName
from hydro_rasda.common.short_values import counted, show
from hydro_rasda.data import batch_length
from hydro_rasda.data.batch_splits import IndexedBatches
from hydro_rasda.history.lines import number_of
from hydro_rasda.history.winner import best_of
from hydro_rasda.problem.dry_run_of_batches import one_thread
from hydro_rasda.problem.problem import Problem
from hydro_rasda.records.records import DIFFER, second_of
from hydro_rasda.results.result import TuneResult
from hydro_rasda.run.state import Run

LOST = 0.25
"""A training overfits if the validation loss has risen since its best epoch by this share of the final gap.

The gap is the difference between validation and training loss. The share was chosen on the six best recorded trainings
of each task (`benchmarks/replay`) with a `WIDE` gap. The loss rises by .44 to .86 of the gap on breast cancer, by .10
to .69 on diabetes, and by at most .10 on the other ten tasks."""

WIDE = 0.25
"""The final gap must be at least this share of the total fall of the validation loss. A smaller gap may be noise."""

BEYOND = 2.0
"""The gap at full size must be at least this number of times the surrogate's gap."""


class Losses(NamedTuple):
    """The mean losses of an epoch: of its training batches, and of the validation set after it."""

    train: float
    val: float

    @property
    def gap(self) -> float:
        """The validation loss minus the training loss."""
        return self.val - self.train


def overfits_beyond(full: Sequence[Losses], narrow: Sequence[Losses]) -> bool:
    """Tell whether a full-size training overfits while the training of its surrogate did not, or did far less.

    Three things must hold at the end of the training. The gap between training and validation loss is at least `WIDE`
    times the total fall of the validation loss. Since its best epoch, the validation loss has risen by at least `LOST`
    times the gap, because a gap alone does no harm. The gap is at least `BEYOND` times the surrogate's gap at the end
    of the sweep. All three are ratios of differences, so that neither the unit nor the zero of a loss matters.

    >>> full = [Losses(0.9, 0.8), Losses(0.5, 0.6), Losses(0.3, 0.7), Losses(0.1, 0.8)]
    >>> overfits_beyond(full, [Losses(0.9, 0.9), Losses(0.7, 0.75)]), overfits_beyond(full, [Losses(0.2, 0.6)])
    (True, False)
    >>> overfits_beyond([Losses(0.9, 0.8), Losses(0.3, 0.4), Losses(0.0, 0.41)], [Losses(0.5, 0.5)])
    False
    """
    if len(full) < 2 or not narrow or not all(map(math.isfinite, (*full[-1], *narrow[-1]))):
        return False
    known = [losses.val for losses in full if math.isfinite(losses.val)]
    best, gap = min(known), full[-1].gap
    wide = gap > 0 and gap >= WIDE * (known[0] - best)
    return wide and full[-1].val - best >= LOST * gap and gap >= BEYOND * narrow[-1].gap


def overfitting_line(run: Run, finalists: Collection[int]) -> list[str]:
    """Return a line if the winner overfits beyond its surrogate; else none, and none after a sweep at full width."""
    if run.settings.sweep.surrogate == 1 or not finalists:
        return []
    winner, _ = best_of(run.history, [*finalists])
    full, narrow = (_losses(run, heat, winner) for heat in ("race", "sweep"))
    if not overfits_beyond(list(full.values()), list(narrow.values())):
        return []
    epoch = min((at for at in full if math.isfinite(full[at].val)), key=lambda at: full[at].val)
    end = full[max(full)]
    epochs = counted(max(narrow), "epoch")
    told = f"trial {winner} overfits at full size, which its surrogate of {epochs} did not show: val_loss "
    told += f"rises from {show(full[epoch].val)} after epoch {epoch} to {show(end.val)}, and train_loss ends at "
    early = "" if run.settings.race.patience else ", or end such trainings early (`race=RaceConfig(patience=3)`)"
    return [f"{told}{show(end.train)}. Sweep the model itself (`sweep=SweepConfig(surrogate=1)`){early}"]


def _losses(run: Run, heat: HeatName, number: int) -> dict[int, Losses]:
    """Map a trial's epochs to losses, without epochs for which the user's training function did not report both."""
    lines = run.history.metrics.get((heat, number), ())
    pairs: dict[int, list[Any]] = {
        line["epoch"]: [line[name] for name in ("train_loss", "val_loss") if name in line] for line in lines
    }
    return {epoch: Losses(*map(number_of, pair)) for epoch, pair in pairs.items() if len(pair) == 2}


MOST = 2000
"""The most validation examples for an estimate of the error. With more, the estimate takes as long as an epoch."""

PARTS = 50
"""The examples are measured in about this number of parts. Their spread tells how far chance moves the mean."""


def undecided_line(result: TuneResult) -> list[str]:
    """Say that chance may have chosen between the two best finalists, and name the argument that would decide.

    The line is returned if both trained to the end, and if their scores differ by less than the standard error of the
    difference. That error is estimated from parts of the validation examples. If the estimate fails, the line says so.
    No line is returned where no estimate is made: for folds, loaders, metrics of the whole validation set, and models
    of the user's `train` function. The same holds for validation sets with fewer than two examples in each part, or
    with more than `MOST` examples.
    """
    problem, trials = result._problem, result.trials
    name = result.metric.removeprefix("val_")
    second, ended = second_of(result), trials[result.best_trial].status == "finished"
    known = name != result.metric and problem.own_loop is None and not problem.settings.folds
    if not known or second is None or not ended or name in problem.whole_names:
        return []
    lead = abs(trials[second].metric - trials[result.best_trial].metric)
    try:
        examples, error = _error_of_difference(result, problem, second, name)
    except Exception as failed:  # the checkpoint may be gone, and a model may raise anything for smaller batches
        told = f"chance may have chosen between trials {result.best_trial} and {second}"
        return [f"{told}: comparing them by parts failed with {type(failed).__name__}: {failed}"]
    if not lead < error:
        return []
    folds = isinstance(problem.train_data, IndexedBatches)
    more = "`val_data=KFold(5)`" if folds or problem.settings.sweep.repeats > 1 else "`sweep=SweepConfig(repeats=3)`"
    told = f"{DIFFER.format(result.best_trial, second)}{show(lead, 2)} in {result.metric}, less than the sampling"
    return [f"{told} error of {examples} validation examples ({show(error, 2)}). To choose by more, use {more}"]


def _error_of_difference(result: TuneResult, problem: Problem, second: int, name: str) -> tuple[int, float]:
    """Return the number of validation examples, and the standard error of the difference between two models' scores.

    The models are those of the winner and of the trial `second`. Their scores are means of the metric `name`. The error
    is NaN if there are too few or too many examples.
    """
    data = problem.val_data
    length = data._length if isinstance(data, IndexedBatches) else 0
    if not 2 * PARTS <= length <= MOST:
        return length, math.nan
    two, size = (result.best_trial, second), -(-length // PARTS)
    # Use one thread: for the few examples of a part, several threads would wait for each other longer than they
    # compute.
    with one_thread():
        of_each = [_in_parts(problem, result.best_model(number), size, name) for number in two]
    differences = [one - other for one, other in zip(*of_each, strict=True)]
    return length, stdev(differences) / math.sqrt(len(differences))


def _in_parts(problem: Problem, model: nn.Module, size: int, name: str) -> list[float]:
    found: list[float] = []
    with torch.no_grad(), preserved_generators():
        for batch in problem.val_data.in_order(size):
            if batch_length(batch) == size:  # a smaller last batch would count too much
                metrics: Mapping[str, torch.Tensor] = problem.objective(model, batch)
                found.append(float(metrics[name]))
    return found
