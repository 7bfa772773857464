"""The chance baseline: the score of a constant prediction. A trial that does not beat it has not learned yet."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor, nn

from fusion.warn import warn
from hydro_rasda.common.heat_names import HeatName
from hydro_rasda.data import EVAL_BATCH_FACTOR, Batch, Batches, batch_length
from hydro_rasda.problem.metrics import summed
from hydro_rasda.problem.objective import Supervised, scalars
from hydro_rasda.problem.precision import as_given
from hydro_rasda.problem.problem import Problem
from hydro_rasda.run.state import Run
from hydro_rasda.settings.config import Mode

EXAMPLES = 10_000
"""Number of training examples from which the constant is computed. They give a class frequency to about 0.01."""

RELATIVE_MARGIN = 0.01
"""Margin of a loss, relative to the loss of the constant. Both are of the same examples, so noise cancels.

A trial within the margin improves on the constant's loss by less than a hundredth. With the squared error, R squared is
then below 0.01.
"""


_OTHER_OUTPUTS = AttributeError, IndexError, KeyError, TypeError, ValueError
"""Errors of a loss that refuses a constant: it expects another output than one tensor with a column for each class."""


@dataclass(frozen=True)
class Chance:
    """The chance baseline: the score of a constant prediction, which a trial must beat to have learned anything.

    Attributes:
        score: The run's metric for the constant prediction.
        margin: A score that differs from `score` by at most the margin is no better than chance.
    """

    score: float
    margin: float

    def beaten(self, scores: Iterable[float], mode: Mode) -> bool:
        """Tell whether any score is better than chance by more than the margin.

        >>> Chance(2.3, 0.1).beaten([2.25, 9.0], "min"), Chance(0.1, 0.05).beaten([0.12, 0.2], "max")
        (False, True)
        """
        sign = 1 if mode == "max" else -1
        return any(sign * (score - self.score) > self.margin for score in scores)


def warn_of_chance(run: Run, scores: Mapping[int, float], epoch: int) -> None:
    """Warn if no trial is better than chance at the first rung, because then noise decides which trials continue."""
    if (chance := unbeaten_chance(run, "sweep", scores)) is None:
        return
    finite = [score for score in scores.values() if math.isfinite(score)]
    best = min(finite) if run.settings.mode == "min" else max(finite)
    later = min(2 * epoch, run.settings.max_t)
    longer = f"Give trials time to learn (`sweep=SweepConfig(grace_period={later})`)"
    remedy = "So noise decides who goes on. " if len(scores) > 1 else ""
    remedy += longer if later > epoch else "Raise `max_t`"
    told = (
        f"no trial's {run.settings.metric} differs from chance at the first rung (epoch {epoch}): the best is "
        f"{best:.4g}, a constant prediction has {chance.score:.4g}. {remedy}, or look at the range of `lr`"
    )
    run.store.keep_message(told)  # not `run.say`: a callback that shows messages also shows the warning
    warn(told)


def unbeaten_chance(run: Run, heat: HeatName, scores: Mapping[int, float]) -> Chance | None:
    """Return the chance baseline if no trial of a heat beats it; None if a trial beats it, or if it is unknown.

    The baseline is known only if the library made the objective from `loss_fn`, not if the user wrote `objective`.
    """
    finite = [score for score in scores.values() if math.isfinite(score)]
    if not finite or not isinstance(as_given(run.problem.objective), Supervised):
        return None
    batch_size = next(iter(run.history.trials.values())).batch_size
    classes = any("val_accuracy" in line for n in scores for line in run.history.metrics.get((heat, n), ()))
    chance = chance_of(run.problem, batch_size, classes)
    return None if chance is None or chance.beaten(finite, run.settings.mode) else chance


def chance_of(problem: Problem, batch_size: int, classes: bool) -> Chance | None:
    """Return the score of the best constant prediction. The constant is the class frequencies, or the mean target.

    `classes` tells whether integer targets are classes; if they are not, the score is unknown.

    Return None if the score is unknown, for example because the loss does not accept such a prediction. Warn if the
    user's loss or data raise any other error, and no constant could be measured.
    """
    if problem.folds is not None:
        found = [chance_of(of_model, batch_size, classes) for of_model in problem.each("sweep")]
        known = [chance for chance in found if chance is not None]
        both = (fmean(getattr(chance, name) for chance in known) for name in ("score", "margin"))
        return Chance(*both) if len(known) == len(found) else None
    part, name = problem.settings.metric.split("_", 1)
    measured = problem.val_data if part == "val" else problem.train_data
    tried, failed = list[dict[str, float]](), list[Exception]()
    try:
        for constant in _constants(_targets(problem.train_data.epoch(batch_size, 0)), classes):
            try:
                tried.append(_measured(problem, constant, measured, EVAL_BATCH_FACTOR * batch_size))
            except _OTHER_OUTPUTS:
                continue
            except Exception as error:  # the loss may still accept the next constant
                failed.append(error)
    except Exception as error:  # the user's data may raise anything
        failed.append(error)
    if failed and not tried:
        told = f"measuring a constant prediction failed with {type(failed[0]).__name__}: {failed[0]}"
        warn(f"{told}. So trials may be stopped by scores that do not differ from chance")
    finite = [metrics for metrics in tried if math.isfinite(metrics["loss"])]
    best = min(finite, key=lambda metrics: metrics["loss"], default={})
    if not math.isfinite(score := best.get(name, math.nan)):
        return None
    if name == "accuracy":
        return Chance(score, 2 * math.sqrt(score * (1 - score) / best["predictions"]))
    return Chance(score, RELATIVE_MARGIN * abs(score))


def _targets(batches: Iterator[Batch]) -> Tensor:
    """Return the targets of the first `EXAMPLES` examples, or of fewer examples if each has many targets."""
    found: list[Tensor] = []
    examples = numbers = 0
    for _, target in batches:
        found.append(target if target.is_floating_point() else target.flatten())  # flat: sequences may differ in length
        examples, numbers = examples + len(target), numbers + target.numel()
        if examples >= EXAMPLES or numbers >= 100 * EXAMPLES:
            break
    return torch.cat(found)


def _constants(target: Tensor, classes: bool) -> list[Tensor]:
    """Return constant predictions for targets [N, ...]: the log-frequencies of classes [C], or the mean target [...].

    A loss may expect the mean itself, its logarithm or its log-odds. So if the mean lies between 0 and 1, all three are
    returned.
    """
    if not target.is_floating_point():
        if not classes:  # counting takes memory up to the largest number, and these may be large
            return []
        # Add 1, so that no class has the frequency 0: the validation data may have a class that these targets lack.
        counts = torch.bincount(target[target >= 0]) + 1.0
        return [(counts / counts.sum()).log()]
    mean = target.mean(0)
    return [mean, mean.log(), mean.logit()] if bool(((mean > 0) & (mean < 1)).all()) else [mean]


class _Says(nn.Module):
    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output

    def forward(self, *_: object, **__: object) -> Tensor:
        return self.output


def _measured(problem: Problem, constant: Tensor, data: Batches, batch_size: int) -> dict[str, float]:
    """Return the metrics of a constant prediction on `data`, with the number of predicted targets as "predictions"."""
    predictions = 0

    def batches() -> Iterator[tuple[Mapping[str, Tensor], int]]:
        nonlocal predictions
        for batch in data.in_order(batch_size):
            target = batch[1]
            predictions += target.numel()
            one = constant if target.is_floating_point() else constant.view(-1, *(1,) * (target.ndim - 1))
            shape = target.shape if target.is_floating_point() else (len(target), len(constant), *target.shape[1:])
            yield scalars(problem.objective(_Says(one.expand(shape)), batch)), batch_length(batch)

    metrics = {name: float(value) for name, value in summed(batches()).means().items()}
    return metrics | {"predictions": float(predictions)}
