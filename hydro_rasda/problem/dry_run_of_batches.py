"""Run a model on single batches before training: find batches that it cannot take, and losses that are never finite."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fusion.evaluate.microbatch import can_be_split, split
from fusion.keys import read
from fusion.members.attributes import loose_tensors
from fusion.structure.module_parts import has_samples
from fusion.warn import warn
from hydro_rasda.common.argument_checks import require
from hydro_rasda.common.seeds import derive_seed
from hydro_rasda.common.trial import Trial
from hydro_rasda.data import EVAL_BATCH_FACTOR, Batch, Batches, batch_length, non_finite, outline, unlike
from hydro_rasda.data.batch_splits import IndexedBatches, num_parts
from hydro_rasda.problem.metrics import Collected, WholeMetrics, measured
from hydro_rasda.problem.objective import (
    FEW,
    OUTPUTS,
    TARGETS,
    ByPart,
    Objective,
    Written,
    check_metrics,
    checked,
    joined,
    moving,
    scalars,
)
from hydro_rasda.problem.precision import as_given, in_precision, turns
from hydro_rasda.problem.problem import Problem

SURVEYED = 32
"""Largest number of unusual batches of a data set that are tried."""

ASKED, RANDOM = 64, 3
"""If a loss or a metric is not finite, at most `ASKED` batches and `RANDOM` models with random weights are tried."""


SUMMED = 4
"""While a metric is 0, at most this many further batches are doubled to find out if it is a sum over the batch."""

GROWTH, EXACT = 0.2, 0.02
"""A value counts as a sum if it grows by more than the share `GROWTH` when the batch is doubled.

It must also match the expected growth of a sum within the share `EXACT`.
"""


ONE_SHAPE = "bring output and target to one shape, such as by `output.squeeze(-1)`"


class Misfit(Exception):
    """One trial cannot be trained. If no trial can, the user sees a ValueError with the same message and cause."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Within the context, let torch compute with a single CPU thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def parts_of(trial: Trial, batch: Batch, argument: str) -> list[Batch]:
    """Split a batch of `argument` into the trial's micro-batches, because memory may not suffice for a whole batch."""
    parts = read(trial.config, "accumulate")
    try:
        return split(batch, num_parts(batch, trial.batch_size, parts))
    except ValueError as error:
        told = f"`accumulate` is {parts}, but a batch {outline(batch)} of `{argument}`"
        raise Misfit(f"{told}: {error}") from error


def run_batch(problem: Problem, model: nn.Module, batch: Batch, argument: str) -> Mapping[str, Tensor]:
    """Return the metrics of one batch; if gradients are enabled, also differentiate the loss (of each model part).

    Errors name `argument`, the argument of `tune` from which the batch comes.
    """
    objective = in_precision(checked(as_given(problem.objective)), problem.settings.precision)
    each, found = turns(objective) if torch.is_grad_enabled() else {"": objective}, {}
    for part, own in each.items():
        with moving(part, model, dict(model.named_parameters())):
            found[part] = _run_turn(problem, own, part, model, batch, argument)
    return joined(found)


def _run_turn(
    problem: Problem, objective: Objective, part: str, model: nn.Module, batch: Batch, argument: str
) -> Mapping[str, Tensor]:
    outputs: list[Any] = []
    handle = model.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    try:
        with warnings.catch_warnings():
            # If torch broadcasts an output against a target of another size, it only warns. Make this an error.
            warnings.filterwarnings("error", "Using a target size")
            metrics = objective(model, batch)
    except (Exception, SystemExit) as error:
        told = f"a batch {outline(batch)} of `{argument}`: {type(error).__name__}: {error}"
        if outputs:
            told = f"`loss_fn` (or `objective`) cannot take the model's output {outline(outputs[-1])} with {told}"
        else:
            told = f"the model cannot take {told}"
        if _is_of_one_tensor(batch, lambda alone: objective(model, alone), error):
            told += f"; a batch of one tensor is a {type(batch).__name__} of it: take `batch[0]`"
        if any(isinstance(leaf, Tensor) and leaf.ndim == 0 for leaf in tree_leaves(batch)):
            told += "; is this an example rather than a batch? A DataLoader stacks examples to batches"
        if outputs and re.search("target size", str(error), re.IGNORECASE):
            told = f"{told.rstrip('.')}; {ONE_SHAPE}"
        raise Misfit(told + _about_dtypes(model, batch, error, bool(outputs))) from error
    finally:
        handle.remove()
    if problem.metrics is not None and isinstance(metrics, Mapping):
        for name in sorted(metrics.keys() & {OUTPUTS, TARGETS}):
            if not isinstance(metrics[name], Tensor):
                told = f"`objective` returned {name!r} as a {type(metrics[name]).__name__}, but must return a tensor"
                raise ValueError(f"{told}, since `metrics` is given those of all batches as one")
        metrics = scalars(metrics)
    check_metrics(metrics)
    if torch.is_grad_enabled():
        _check_trained(model, objective, batch, metrics["loss"])
        try:
            metrics["loss"].backward()
        except (Exception, SystemExit) as error:
            of_part = f" of {part!r}" if part else ""
            told = f"the loss{of_part} of a batch {outline(batch)} of `{argument}` cannot be differentiated"
            raise Misfit(f"{told}: {type(error).__name__}: {error}") from error
    return metrics


def _check_trained(model: nn.Module, objective: Objective, batch: Batch, loss: Tensor) -> None:
    """Raise ValueError if the loss depends on a tensor that needs a gradient but is not a parameter of the model.

    No optimizer would train such a tensor. Tensors of the batch are allowed, and so are tensors that the objective
    makes anew in each call.
    """
    known = {id(tensor) for tensor in (*model.parameters(), *tree_leaves(batch))}
    others = [leaf for leaf in _leaves(loss) if id(leaf) not in known]
    if others:
        # This is rare. Call the objective again, to find which tensors it makes anew. The tensors of the first call
        # still exist, so no new tensor has the id of one of them.
        again = {id(leaf) for leaf in _leaves(objective(model, batch)["loss"])}
        others = [leaf for leaf in others if id(leaf) in again]
    if others:
        first = next((where for where, tensor in loose_tensors(model) if tensor is others[0]), "")
        where = f"the model keeps in `{first}`" if first else "`loss_fn` (or `objective`) keeps"
        raise ValueError(
            f"the loss depends on a tensor {outline(others[0])} that needs a gradient, which {where}, but nothing "
            "trains it, because it is no parameter of the model. Make it one, by `nn.Parameter`, `nn.ParameterList` or "
            "a module in the model, which `objective` finds there; or freeze it by `requires_grad_(False)`"
        )


def _leaves(loss: Tensor) -> list[Tensor]:
    """Return the leaf tensors for which the loss has gradients."""
    found, seen, left = list[Tensor](), set[Any](), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            found.append(node.variable)  # type: ignore[attr-defined]
        left += [following for following, _ in node.next_functions]
    return found


def _is_of_one_tensor(batch: Batch, run: Callable[[Batch], Any], error: BaseException) -> bool:
    """Return whether `run` fails because the batch is a list or tuple of one tensor, not the tensor itself."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 1 or not isinstance(error, (TypeError, AttributeError)):
        return False
    try:
        run(batch[0])
    except (Exception, SystemExit):  # the tensor itself fails, too, so the error has another cause
        return False
    return True


def _about_dtypes(model: nn.Module, batch: Batch, error: BaseException, in_loss: bool) -> str:
    """Return a hint if an error is about dtypes and data have another dtype than the model; otherwise "".

    Integers may be right, for example as class labels. They count as wrong only if the error is about a cast, or if
    they are the batch's first tensor and the model raised the error. `in_loss` is True if the loss raised it.
    """
    weights = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()]
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    real = leaves if "be cast" in str(error) else [leaf for leaf in leaves if leaf.is_floating_point()]
    real += [] if in_loss else leaves[:1]
    wrong = [leaf.dtype for leaf in real if leaf.dtype not in weights]
    if not weights or not wrong or "type" not in str(error):
        return ""
    given, kind = (str(dtype).removeprefix("torch.") for dtype in (wrong[0], weights[0]))
    remedy = f'give `array.astype("{kind}")`, or `tensor.to(torch.{kind})`'
    return f". The data are {given} and the model is {kind}: {remedy}"


def survey_batches(problem: Problem, trial: Trial, model: nn.Module, data: Batches, argument: str) -> None:
    """Read the data once, for a few seconds at most, and run the model on batches on which it may fail."""
    # Try batches of a user's training loader in training mode. Its last batch may have one example, which BatchNorm
    # refuses in this mode. Indexed data never train on such a batch, so try them in evaluation mode.
    model.train(argument == "train_data" and not isinstance(data, IndexedBatches))
    with torch.no_grad():
        for name, batch in islice(unlike(data, trial.batch_size, argument), SURVEYED):
            try:
                losses = [run_batch(problem, model, p, argument)["loss"] for p in parts_of(trial, batch, argument)]
            except Misfit as refused:
                raise ValueError(f"{name} of `{argument}`: {refused}") from refused
            wrong = non_finite(batch)
            lost = [loss.item() for loss in losses if not bool(loss.isfinite())]
            if wrong and lost:
                raise ValueError(f"{name} of `{argument}` has {wrong}, for which the loss is {lost[0]}")


def warn_of_sums(problem: Problem, trial: Trial, model: nn.Module) -> None:
    """Warn if the loss, or a metric that compares trials, grows with the batch as a sum over the batch does.

    The objective is evaluated for a few examples, for two copies of them, and for four copies. A mean stays the same. A
    value that compares each example with all others may change, too, but grows differently.
    """
    if not isinstance(objective := as_given(problem.objective), (Written, ByPart)):
        return
    batches = problem.val_data.in_order(trial.batch_size)
    if not can_be_split(first := next(batches)):
        return
    names = {"loss", *(name.partition("_")[2] for name in problem.settings.comparison.trained)}
    names |= {f"{part}_loss" for part in objective.parts} if isinstance(objective, ByPart) else set()
    few = split(first, -(-batch_length(first) // FEW))[0]
    # A sum may be 0 for some examples, and doubling 0 shows nothing. Then try further batches.
    for once in chain([few, first], islice(batches, SUMMED)):
        if not names:
            return
        twice = _doubled(once)
        try:
            with torch.no_grad():
                found = [problem.objective(model.eval(), part) for part in (once, twice, _doubled(twice))]
        except Exception:  # the objective accepts batches of one size only
            return
        names &= found[0].keys()
        for name in sorted(names):
            one, two, four = (float(values[name]) for values in found)
            if not one:
                continue
            names.remove(name)
            if _grows(one, two, four):
                told = f"a loss of {one:.3g}" if name == "loss" else f"{name!r} as {one:.3g}"
                told = f"`objective` returns {told} for {batch_length(once)} examples, and {two:.3g} for the same twice"
                warn(f"{told}, as a sum does. Return the mean: trials of other batch sizes do not compare by sums")


def warn_of_broadcasting(problem: Problem, trial: Trial, model: nn.Module) -> None:
    """Warn if an objective broadcasts, so that it compares each output of shape [N, 1] with all targets [N].

    Then the loss depends on the targets, but not on their order. Torch's own losses warn of it themselves.
    """
    if not isinstance(as_given(problem.objective), (Written, ByPart)):
        return
    batch = next(problem.val_data.in_order(trial.batch_size))
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        return
    inputs, target = batch
    if not isinstance(target, Tensor) or target.ndim == 0 or len(target) < 2:
        return
    given = [(inputs, other) for other in (target, target.roll(1, 0), target[:1].expand_as(target))]
    try:
        _, shapes = _losses_and_shapes(problem, model, [batch])
        if shapes != {(*target.shape, 1)}:
            return
        # An untrained output layer may give equal outputs. Then no loss depends on the order, so use random weights.
        (loss, turned, constant), _ = _losses_and_shapes(problem, _random(problem, trial, 1), given)
    except Exception:  # the objective may refuse other targets
        return
    if _alike(loss, turned) and not _alike(loss, constant):
        told = f"`objective` compares each output of shape {shapes.pop()} with all targets {tuple(target.shape)}"
        warn(f"{told}: its loss does not depend on their order, so no model can learn from it; {ONE_SHAPE}")


def _losses_and_shapes(
    problem: Problem, model: nn.Module, batches: Sequence[Batch]
) -> tuple[list[Tensor], set[tuple[int, ...]]]:
    """Return each batch's loss in evaluation mode, and the shapes of the model's outputs; () if one is not a tensor."""
    shapes = set[tuple[int, ...]]()
    handle = model.register_forward_hook(
        lambda module, inputs, output: shapes.add(tuple(output.shape) if isinstance(output, Tensor) else ())
    )
    try:
        with torch.no_grad():
            return [problem.objective(model.eval(), batch)["loss"] for batch in batches], shapes
    finally:
        handle.remove()


def _alike(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4)


def _doubled(batch: Batch) -> Batch:
    return tree_map(lambda leaf: torch.cat([leaf, leaf]) if has_samples(leaf) else leaf, batch)


def _grows(one: float, two: float, four: float) -> bool:
    """Return whether a value grows with the batch as a sum plus a constant does, or as a norm does.

    `one`, `two` and `four` are the values for that many copies of a batch. A norm grows by the same factor with each
    doubling.
    """
    added, then, factor = two - one, four - two, two / one
    if abs(added) < GROWTH * abs(one):
        return False
    return abs(then - 2 * added) < EXACT * abs(then) or (factor > 1 and abs(four - factor * two) < EXACT * abs(four))


def measure_whole(problem: Problem, trial: Trial, model: nn.Module, known: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of the user's function `metrics` for one untrained model on the whole validation set.

    With folds, all folds are evaluated, because one may lack a class that `metrics` needs. The values of the first fold
    are returned. Raise ValueError if one of their names is in `known`, the objective's own metrics.
    """
    if problem.metrics is None:
        return {}
    folds = [problem] if problem.folds is None else problem.each("sweep")[: len(problem.folds)]
    names = [""] if problem.folds is None else [f" of fold {number}" for number in range(len(folds))]
    values, *_ = [_measured_whole(*each, problem.metrics, trial, model) for each in zip(folds, names, strict=True)]
    twice = sorted(known.keys() & values.keys())
    require(not twice, "metrics", twice, "a function whose names are not the objective's, too")
    return values


def _measured_whole(
    problem: Problem, of_fold: str, metrics: WholeMetrics, trial: Trial, model: nn.Module
) -> dict[str, float]:
    collected, batch_size = Collected(), EVAL_BATCH_FACTOR * trial.batch_size
    with torch.no_grad():
        for batch in problem.val_data.in_order(batch_size):
            for part in parts_of(trial, batch, "val_data"):
                found = problem.objective(model, part)
                collected.take({name: value[None] for name, value in found.items()}, batch_length(part))
    (outputs,), (targets,) = collected.whole()
    try:
        return measured(metrics, outputs, targets)
    except Exception as error:
        told = f"`metrics` fails on the whole validation set{of_fold}, {outline((outputs, targets))}"
        raise ValueError(f"{told}: {type(error).__name__}: {error}") from error


def check_finite(problem: Problem, trial: Trial, model: nn.Module, found: Mapping[str, float]) -> None:
    """Raise Misfit if no batch gives a finite training loss, or if no model gives a finite metric on any batch.

    A loss may rightly be NaN for a batch whose targets are all ignored, so up to `ASKED` batches are tried. A metric
    such as a correlation may be NaN for an untrained model that predicts the same for all examples. So `RANDOM` models
    with random weights are tried, too.
    """
    metric, loss = problem.settings.metric, found["train_loss"]
    if not (math.isfinite(loss) or _is_finite(problem, trial, model, "train_loss")):
        told = f"`loss_fn` (or `objective`) gives a loss of {loss} for each batch of `train_data` that was tried"
        raise Misfit(f"{told}, before any training, but must give a finite one")
    others = (_random(problem, trial, seed) for seed in range(1, RANDOM + 1))
    if not (math.isfinite(found[metric]) or any(_is_finite(problem, trial, m, metric) for m in chain([model], others))):
        told = f"`metric` is {metric!r}, which is {found[metric]} for the untrained model and {RANDOM} others"
        raise Misfit(f"{told} with random weights, but must be one that can be finite")


def _is_finite(problem: Problem, trial: Trial, model: nn.Module, metric: str) -> bool:
    """Return whether a metric is finite on some batch, or on the whole validation set if the metric needs all of it."""
    part, name = metric.split("_", 1)
    data, argument = (problem.train_data if part == "train" else problem.val_data), f"{part}_data"
    model.train(part == "train")
    with torch.no_grad():
        batches = islice(data.in_order(trial.batch_size), ASKED)
        for piece in (piece for batch in batches for piece in parts_of(trial, batch, argument)):
            values = run_batch(problem, model, piece, argument)
            if name not in values:
                return math.isfinite(measure_whole(problem, trial, model, {})[name])
            if math.isfinite(values[name]):
                return True
    return False


def _random(problem: Problem, trial: Trial, seed: int) -> nn.Module:
    """Build a model and add noise to all of its weights, those with constant initial values included."""
    model = problem.with_settings(seed=derive_seed(problem.settings.seed, "random", seed)).target(trial)
    drawn = torch.Generator().manual_seed(seed)
    for parameter in (p for p in model.parameters() if p.is_floating_point()):
        noise = torch.randn(parameter.shape, generator=drawn).to(parameter)
        parameter.data += noise * (float(parameter.detach().std(correction=0)) or 0.02)
    return model
