"""A check of the choice: can the validation examples tell the winner from the runner-up at all?"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from statistics import stdev

import torch
from torch import nn

from fusion.streams import preserved_generators
from hydro_rasda.batch_checks import one_thread
from hydro_rasda.data import batch_length
from hydro_rasda.data.batch_splits import IndexedBatches
from hydro_rasda.problem import Problem
from hydro_rasda.results.result import TuneResult
from hydro_rasda.schedulers import rank

MOST = 2000
"""Validation examples beyond which nothing is estimated: there, the estimate would take as long as an epoch."""

PARTS = 50
"""The examples are measured in about so many parts, whose differences tell how far chance moves their mean."""


def undecided_line(result: TuneResult, finalists: Collection[int]) -> list[str]:
    """Say that chance may have chosen between the two best finalists, and name the argument that would tell.

    The two are those that trained to the end. They differ by less than the standard error of their difference over the
    validation examples, estimated from parts of these. No line is returned if that is not known: for metrics of the
    whole validation set, loaders, more than `MOST` examples, and models that a function of the user's trained. Folds
    have no such set.
    """
    problem, trials = result._problem, result.trials
    name = result.metric.removeprefix("val_")
    ended = [n for n in finalists if trials[n].status == "finished" and math.isfinite(trials[n].metric)]
    known = name != result.metric and problem.full_size is None and not problem.settings.folds
    if not known or len(ended) < 2 or result.best_trial not in ended or name in problem.whole_names:
        return []
    others = [n for n in ended if n != result.best_trial]
    second = others[rank([trials[n].metric for n in others], result.mode)[0]]
    lead = abs(trials[second].metric - trials[result.best_trial].metric)
    try:
        examples, error = _error_of_difference(result, problem, second, name)
    except Exception:  # it may fail on a checkpoint that is gone, or a model that takes no smaller batches
        return []
    if not lead < error:
        return []
    folds = isinstance(problem.train_data, IndexedBatches)
    more = "`val_data=KFold(5)`" if folds or problem.settings.sweep.repeats > 1 else "`SweepConfig(repeats=3)`"
    told = f"trials {result.best_trial} and {second} differ by {lead:.2g} in {result.metric}, less than the sampling"
    return [f"{told} error of {examples} validation examples ({error:.2g}). To choose by more, use {more}"]


def _error_of_difference(result: TuneResult, problem: Problem, second: int, name: str) -> tuple[int, float]:
    """Return the number of validation examples, and the standard error of the difference of two models' means."""
    data = problem.val_data
    length = data._length if isinstance(data, IndexedBatches) else 0
    if not 2 * PARTS <= length <= MOST:
        return length, math.nan
    two, size = (result.best_trial, second), -(-length // PARTS)
    # A part has few examples: several threads would wait for each other for longer than they compute.
    with one_thread():
        of_each = [_in_parts(problem, result.best_model(number), size, name) for number in two]
    differences = [one - other for one, other in zip(*of_each, strict=True)]
    return length, stdev(differences) / math.sqrt(len(differences))


def _in_parts(problem: Problem, model: nn.Module, size: int, name: str) -> list[float]:
    found: list[float] = []
    with torch.no_grad(), preserved_generators():
        for batch in problem.val_data.in_order(size):
            if batch_length(batch) == size:  # a smaller last one would count too much
                metrics: Mapping[str, torch.Tensor] = problem.objective(model, batch)
                found.append(float(metrics[name]))
    return found
