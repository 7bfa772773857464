"""The dry run: before any training, what is tuned is tried with one batch, and the data are read once."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fusion import optimizer
from fusion.compare import check_copy
from fusion.keys import OWN, lr_factors, optimizer_name, read
from fusion.tensors import duplicate
from fusion.width.memory import objects_so_far_set_aside, peak_memory
from fusion.width.microbatch import can_be_split, is_weight, split
from hydro_rasda.checks import require
from hydro_rasda.data import Batch, Batches, batch_length, naming_batch, non_finite, outline, unlike
from hydro_rasda.hidden import shown
from hydro_rasda.metrics import EVAL_BATCH_FACTOR
from hydro_rasda.objective import check_metrics, checked, give_config, reads_config, scalars, steering
from hydro_rasda.precision import as_given, in_precision
from hydro_rasda.problem import NoModule, Problem, width_form
from hydro_rasda.reads import Notes
from hydro_rasda.seeds import next_seed
from hydro_rasda.trial import Trial
from hydro_rasda.whole_metrics import Collected, measured


@dataclass(frozen=True)
class DryRun:
    """What a dry run found.

    Attributes:
        parameters: Name and "shape dtype" of each parameter of the first target that could be built.
        example_input: What the objective called it with: positional arguments, or a dict of keyword arguments, of a
            few examples; None where it never called the model itself.
        pretrained: Whether initial weights are the same from every seed. A narrow surrogate would keep a random part of
            what was learnt, so none was tried. With `surrogate=1` this is not looked for, and it is False.
        objective_reads: Keys of the configuration that the objective read.
        whole_names: What `metrics` calls what it returns.
        shared: Whether models of two calls of `model_fn` have tensors in common: it then returns, or wraps, a module
            that it keeps, which training one trial would change for all others.
        peak: Bytes that training the full-size model takes, reckoned from a batch of it.
        epoch_seconds: Seconds that an epoch of it takes, reckoned likewise; infinite where the data have no length.
    """

    parameters: dict[str, str]
    example_input: Any
    pretrained: bool = False
    shared: bool = False
    objective_reads: frozenset[str] = frozenset()
    whole_names: tuple[str, ...] = ()
    peak: float = 0.0
    epoch_seconds: float = math.inf


_BESIDE_A_STEP = 4
"""What else a training holds, in sizes of the model: its weights, their average, and two moments of Adam's."""

PRETRAINED_SHARE = 0.1
"""So many of a model's elements come out the same from two seeds where they were trained before."""
EXAMPLES = 4
MISFITS = 8
"""So many configurations in a row whose model is built but cannot be trained mean that none can."""

SURVEYED = 32
"""So many batches of a data set are tried that stand out."""

ASKED, RANDOM = 64, 3
"""So many batches, and so many models of random weights, are tried where a loss or a metric is not finite."""


class _Misfit(Exception):
    """One trial cannot be trained; its cause says why, for the user if it is the same for all trials."""


def dry_run(problem: Problem, trials: Iterable[Trial], survey: bool = True) -> DryRun:
    """Build one trial's models and run one batch of each data set through them, so that nothing fails hours later.

    Trials are tried in turn until one can be trained: a configuration that the model refuses fails alone.

    Args:
        problem: What will be tuned.
        trials: At least one.
        survey: Whether to read the data once, too.

    Raises:
        ValueError: where, for all of them, `model_fn` fails, the model cannot take a batch, the loss cannot take the
            model's output and the target, loss or metric are never finite, or the model cannot be made narrower; or
            where `model_fn` returns no module, the objective no dict of tensors, or the metric is unknown. Each names
            the argument.
    """
    unbuilt: list[Exception] = []
    misfits: list[Exception] = []
    for trial in trials:
        try:
            target = problem.target(trial)
        except NoModule:
            raise
        except Exception as error:
            told = f"for {shown(trial.config)!r} with {type(error).__name__}: {error}"
            unbuilt.append(_misfit(f"`model_fn` fails for every configuration, {told}", error).args[0])
            continue
        try:
            return _try(problem, trial, target, survey)
        except _Misfit as misfit:
            misfits.append(misfit.args[0])
        if len(misfits) == MISFITS:
            break
    raise (misfits or unbuilt)[0]


def _try(problem: Problem, trial: Trial, target: nn.Module, survey: bool) -> DryRun:
    parameters = {name: f"{tuple(p.shape)} {p.dtype}" for name, p in target.named_parameters()}
    other = problem.with_settings(seed=next_seed(problem.settings.seed)).target(trial)
    learning = [name for name, p in target.named_parameters() if p.requires_grad]
    try:
        lr_factors(trial.config, learning)
    except ValueError as error:
        raise _misfit(str(error), error) from error
    if optimizer_name(trial.config) == OWN:
        _try_optimizer(trial, target)
    pretrained = problem.settings.surrogate < 1 and _is_pretrained(target, other)
    if shared := not _addresses(target).isdisjoint(_addresses(other)):
        problem, target = replace(problem, copied=True), duplicate(target)
    del other
    notes = Notes()
    if reads_config(as_given(problem.objective)):
        give_config(target, notes.noting(steering(trial.config)))
    calls: list[Any] = []
    handle = target.register_forward_pre_hook(lambda _, args, kwargs: calls.append(kwargs or args), with_kwargs=True)
    with naming_batch("train_data", "its first batch", trial.batch_size):
        batches = problem.train_data.epoch(trial.batch_size, 0)
        train = next(batches)
        _warn_of_other_sizes(trial, batch_length(train), lambda: next(batches, None) is None)
    parts, began = _parts(trial, train, "train_data"), time.perf_counter()
    with objects_so_far_set_aside(problem.device), peak_memory(problem.device) as step:
        trained = _run_batch(problem, target.train(), parts[0], "train_data")
    weights = sum(tensor.nbytes for tensor in (*target.parameters(), *target.buffers()))
    peak = step.bytes + _BESIDE_A_STEP * weights
    with naming_batch("val_data", "its first batch", trial.batch_size):
        validation = next(problem.val_data.in_order(trial.batch_size))
    with torch.no_grad():
        validated = _run_batch(problem, target.eval(), _parts(trial, validation, "val_data")[0], "val_data")
    handle.remove()
    steps = problem.train_data.steps(trial.batch_size) or math.inf
    epoch_seconds = (time.perf_counter() - began) * len(parts) * steps
    whole = _whole(problem, trial, target, validated)
    found = {f"train_{name}": value.item() for name, value in trained.items()}
    found |= {f"val_{name}": value.item() for name, value in validated.items()}
    found |= {f"val_{name}": value for name, value in whole.items()}
    found = {name: value for name, value in found.items() if not is_weight(name.partition("_")[2])}
    require(problem.settings.metric in found, "metric", problem.settings.metric, f"one of {sorted(found)}")
    for argument, data in (("train_data", problem.train_data), ("val_data", problem.val_data)) if survey else ():
        _survey(problem, trial, target, data, argument)
    if survey:
        _check_finite(problem, trial, target, found)
    example = tree_map(lambda leaf: leaf[:EXAMPLES] if _has_rows(leaf) else leaf, calls[0]) if calls else None
    if not pretrained:
        tried = replace(problem, example_input=example)
        _try_surrogate(tried, trial)
        _try_copy(tried, trial, parts[0])
    reads = frozenset(notes.read) | getattr(as_given(problem.objective), "reads", frozenset())
    return DryRun(parameters, example, pretrained, shared, reads, tuple(whole), peak, epoch_seconds)


def _whole(problem: Problem, trial: Trial, model: nn.Module, known: Mapping[str, Any]) -> dict[str, float]:
    """What `metrics` says of the whole validation set, which one untrained model has to go through.

    Raises:
        ValueError: where it fails, or returns no numbers, or uses a name of the objective's.
    """
    if problem.metrics is None:
        return {}
    collected, batch_size = Collected(), EVAL_BATCH_FACTOR * trial.batch_size
    with torch.no_grad():
        for batch in problem.val_data.in_order(batch_size):
            for part in _parts(trial, batch, "val_data"):
                found = problem.objective(model, part)
                collected.take({name: value[None] for name, value in found.items()}, batch_length(part))
    (outputs,), (targets,) = collected.whole()
    try:
        values = measured(problem.metrics, outputs, targets)
    except Exception as error:
        told = f"`metrics` fails on the whole validation set, {outline((outputs, targets))}"
        raise ValueError(f"{told}: {type(error).__name__}: {error}") from error
    twice = sorted(known.keys() & values.keys())
    require(not twice, "metrics", twice, "a function whose names are not the objective's, too")
    return values


def _check_finite(problem: Problem, trial: Trial, model: nn.Module, found: Mapping[str, float]) -> None:
    """Refuse a training loss or a metric that is not finite, whatever the batch and, for a metric, the model.

    A loss may be NaN for a batch whose targets are all ignored; a metric, such as a correlation, also for a model that
    predicts the same for all examples.

    Raises:
        _Misfit: where there is no finite value.
    """
    metric, loss = problem.settings.metric, found["train_loss"]
    if not (math.isfinite(loss) or _is_finite(problem, trial, model, "train_loss")):
        told = f"`loss_fn` (or `objective`) gives a loss of {loss} for each batch of `train_data` that was tried"
        raise _Misfit(ValueError(f"{told}, before any training, but must give a finite one"))
    others = (_random(problem, trial, seed) for seed in range(1, RANDOM + 1))
    if not (math.isfinite(found[metric]) or any(_is_finite(problem, trial, m, metric) for m in chain([model], others))):
        told = f"`metric` is {metric!r}, which is {found[metric]} for the untrained model and {RANDOM} others"
        raise _Misfit(ValueError(f"{told} with random weights, but must be one that can be finite"))


def _is_finite(problem: Problem, trial: Trial, model: nn.Module, metric: str) -> bool:
    """Whether a metric of a model is finite, for any batch, or for the whole validation set."""
    part, name = metric.split("_", 1)
    data, argument = (problem.train_data if part == "train" else problem.val_data), f"{part}_data"
    model.train(part == "train")
    with torch.no_grad():
        batches = islice(data.in_order(trial.batch_size), ASKED)
        for piece in (piece for batch in batches for piece in _parts(trial, batch, argument)):
            values = _run_batch(problem, model, piece, argument)
            if name not in values:
                return math.isfinite(_whole(problem, trial, model, {})[name])
            if math.isfinite(values[name]):
                return True
    return False


def _random(problem: Problem, trial: Trial, seed: int) -> nn.Module:
    """A model whose weights are random also where those of an untrained one are constant."""
    model = problem.with_settings(seed=problem.settings.seed + seed).target(trial)
    drawn = torch.Generator().manual_seed(seed)
    for parameter in (p for p in model.parameters() if p.is_floating_point()):
        noise = torch.randn(parameter.shape, generator=drawn).to(parameter)
        parameter.data += noise * (float(parameter.detach().std(correction=0)) or 0.02)
    return model


def _warn_of_other_sizes(trial: Trial, length: int, is_last: Callable[[], bool]) -> None:
    """Warn where a loader goes by another batch size than that of the configuration."""
    asked = trial.batch_size
    if "batch_size" in trial.config and (length > asked or (length < asked and not is_last())):
        warnings.warn(
            f"`train_data` was asked for batches of {asked} examples, and the first has {length}: what `space` says of "
            "`batch_size` changes nothing where its loader takes no notice of it",
            stacklevel=6,
        )


def _has_rows(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0


def _survey(problem: Problem, trial: Trial, model: nn.Module, data: Batches, argument: str) -> None:
    """Read the data once, as far as a few seconds go, and run the model on the batches that it may fail on.

    Raises:
        ValueError: where a batch cannot be read, the objective cannot take it, or its loss is infinite or NaN, as its
            numbers are.
    """
    with torch.no_grad():
        for name, batch in islice(unlike(data, trial.batch_size, argument), SURVEYED):
            try:
                losses = [_run_batch(problem, model, p, argument)["loss"] for p in _parts(trial, batch, argument)]
            except _Misfit as misfit:
                raise ValueError(f"{name} of `{argument}`: {misfit.args[0]}") from misfit
            wrong = non_finite(batch)
            lost = [loss.item() for loss in losses if not bool(loss.isfinite())]
            if wrong and lost:
                raise ValueError(f"{name} of `{argument}` has {wrong}, for which the loss is {lost[0]}")


def _addresses(model: nn.Module) -> set[int]:
    """Where those of its tensors lie in memory that training changes."""
    # What is frozen can be shared: training writes to none of it.
    tensors = (*(p for p in model.parameters() if p.requires_grad), *model.buffers())
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}


def _is_pretrained(target: nn.Module, from_another_seed: nn.Module) -> bool:
    """Whether another seed gives the same weights, constants and identities (of at most two values) aside."""
    other = dict(from_another_seed.named_parameters())
    same = total = 0
    for name, parameter in target.named_parameters():
        values = parameter.detach()
        if values.numel() == 0 or bool(((values == values.min()) | (values == values.max())).all()):
            continue
        total += values.numel()
        same += values.numel() if name in other and torch.equal(values, other[name]) else 0
    return same > PRETRAINED_SHARE * total


def _try_optimizer(trial: Trial, target: nn.Module) -> None:
    try:
        optimizer(target, trial.config)
    except ValueError as error:
        raise _misfit(str(error), error) from error
    except Exception as error:
        told = f"`optimizer` is {trial.config['optimizer']!r}, which fails for the model's parameters"
        raise _misfit(f"{told} with {type(error).__name__}: {error}", error) from error


def _try_surrogate(problem: Problem, trial: Trial) -> None:
    try:
        problem.surrogate(trial, checked=True)
    except (Exception, SystemExit) as error:
        if width_form(problem.model_fn):
            raise _Misfit(error) from error
        raise _misfit(
            f"`surrogate` is {problem.settings.surrogate:g}, but the model cannot be made narrower by itself "
            f"({error}); give `model_fn` an argument `width_ratio`, or set `surrogate=1`",
            error,
        ) from error


def _try_copy(problem: Problem, trial: Trial, batch: Batch) -> None:
    """Fuse one trial's surrogate, and see that the copy computes what the surrogate does.

    Raises:
        _Misfit: where it cannot be fused even by itself, or computes something else.
    """

    def means(model: nn.Module, part: Batch) -> Mapping[str, Tensor]:
        return scalars(problem.objective(model, part))

    few = split(batch, max(1, batch_length(batch) // EXAMPLES))[0] if can_be_split(batch) else batch
    try:
        check_copy(lambda: problem.surrogate(trial), means, few)
    except ValueError as error:
        told = "`model_fn` makes a model that trains otherwise where it is copied, as the sweep does"
        raise _misfit(f"{told}: {error}", error) from error


def _parts(trial: Trial, batch: Batch, argument: str) -> list[Batch]:
    """A batch in the parts that training takes it in, for which alone there may be memory."""
    parts = read(trial.config, "accumulate")
    try:
        return split(batch, parts)
    except ValueError as error:
        raise _misfit(
            f"`accumulate` is {parts}, but a batch {outline(batch)} of `{argument}`: {error}", error
        ) from error


def _run_batch(problem: Problem, model: nn.Module, batch: Batch, argument: str) -> Mapping[str, Tensor]:
    """Metrics of one batch; where gradients are enabled, the loss is differentiated, too."""
    outputs: list[Any] = []
    handle = model.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    try:
        with warnings.catch_warnings():
            # Torch broadcasts one against the other, and only warns of it.
            warnings.filterwarnings("error", "Using a target size")
            objective = in_precision(checked(as_given(problem.objective)), problem.settings.precision)
            metrics = objective(model, batch)
    except (Exception, SystemExit) as error:
        told = f"a batch {outline(batch)} of `{argument}`: {type(error).__name__}: {error}"
        if outputs:
            told = f"`loss_fn` (or `objective`) cannot take the model's output {outline(outputs[-1])} with {told}"
        else:
            told = f"the model cannot take {told}"
        if isinstance(batch, (tuple, list)) and len(batch) == 1:
            told += f"; a batch of one tensor is a {type(batch).__name__} of it: take `batch[0]`"
        raise _misfit(told, error) from error
    finally:
        handle.remove()
    metrics = metrics if problem.metrics is None or not isinstance(metrics, Mapping) else scalars(metrics)
    check_metrics(metrics)
    if torch.is_grad_enabled():
        try:
            metrics["loss"].backward()
        except (Exception, SystemExit) as error:
            told = f"the loss of a batch {outline(batch)} of `{argument}` cannot be differentiated"
            raise _misfit(f"{told}: {type(error).__name__}: {error}", error) from error
    return metrics


def _misfit(told: str, cause: BaseException) -> _Misfit:
    refusal = ValueError(told)
    refusal.__cause__ = cause
    return _Misfit(refusal)
