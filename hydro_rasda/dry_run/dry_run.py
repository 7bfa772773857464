"""The dry run: before any training, run models on single batches, and read the data once."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fusion.check.compare_with_alone import check_copy
from fusion.evaluate.microbatch import can_be_split, is_weight, split
from fusion.optim import optimizer
from fusion.structure import hidden_by_wrapper
from fusion.structure.module_parts import duplicate, has_samples, named_tensors
from fusion.structure.reduced_values import memory
from fusion.warn import warn
from hydro_rasda.common.argument_checks import require
from hydro_rasda.common.seeds import next_seed
from hydro_rasda.common.trial import Trial
from hydro_rasda.data import Batch, batch_length, naming_batch
from hydro_rasda.problem.dry_run_of_batches import (
    Misfit,
    check_finite,
    measure_whole,
    one_thread,
    parts_of,
    run_batch,
    survey_batches,
    warn_of_broadcasting,
    warn_of_sums,
)
from hydro_rasda.problem.lr_roles import by_parameter, roles_of
from hydro_rasda.problem.model_costs import batch_seconds, training_step
from hydro_rasda.problem.objective import check_parts, give_config, reads_config, scalars, steering
from hydro_rasda.problem.precision import as_given
from hydro_rasda.problem.problem import Findings, NoModule, NoRoles, Problem
from hydro_rasda.problem.read_keys import Notes
from hydro_rasda.problem.width_argument import about_width_argument, width_form
from hydro_rasda.settings.config import check_reported
from hydro_rasda.settings.objectives import COSTS
from surrogate.output_sizes import call_model
from surrogate.roles_and_multipliers import width_plan
from surrogate.widths import WidthPlan


@dataclass(frozen=True, kw_only=True)
class DryRun(Findings):
    """All findings of a dry run.

    Attributes:
        parameters: Maps each parameter of the first full-size model that passed the dry run to its "shape dtype".
        pretrained: True if initial weights do not depend on the seed. Then no surrogate was tried, because it would
            keep only a random part of the pretrained weights. Always False with `sweep.surrogate=1`.
        narrowed: The widths of the surrogate; None if no surrogate was tried.
        metrics: Metrics of the same full-size model by name. The objective's metrics are of the first batch of each
            data set, and the values of `metrics` are of the whole validation set.
    """

    parameters: dict[str, str]
    pretrained: bool = False
    narrowed: WidthPlan | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


PRETRAINED_SHARE = 0.1
"""A model counts as pretrained if more than this share of its weights is the same for two seeds."""
EXAMPLES = 4
QUICK_S = 1.0
"""A training step that takes less than this many seconds is measured twice."""
MISFITS = 8
"""After this many configurations whose model can be built but not trained, the dry run gives up."""


def dry_run(problem: Problem, trials: Iterable[Trial], survey: bool = True) -> DryRun:
    """Build one trial's models and run one batch of each data set through them, so that nothing fails hours later.

    Trials are tried in turn until one can be trained, because a model may refuse single configurations.

    Args:
        survey: True to read the data once, too; see `survey_data`. False reads only the first batches.

    Raises:
        ValueError: If for all trials, `model_fn` fails, the model does not accept a batch, or the loss does not accept
            the model's output and the target. Also if the loss or metric is never finite, or if the model cannot be
            made narrower. Also if `model_fn` returns no module, the objective returns no dict of tensors, or the metric
            is unknown. The message names the argument.
    """
    unbuilt, misfits = list[tuple[str, BaseException | None]](), list[tuple[str, BaseException | None]]()
    for trial in trials:
        try:
            target = problem.target(trial)
        except (NoModule, NoRoles):
            raise
        except Exception as error:
            told = f"for {dict(trial.config)!r} with {type(error).__name__}: {error}"
            unbuilt.append((f"`model_fn` fails for every configuration, {told}", error))
            continue
        try:
            return _try(problem, trial, target, survey)
        except Exception as error:
            if (why := hidden_by_wrapper(target)) is not None:
                misfits.append((f"`model_fn` makes a model that cannot be copied and trained here: {why}", error))
            elif isinstance(error, Misfit):
                misfits.append((str(error), error.__cause__))
            else:
                raise
        if len(misfits) == MISFITS:
            break
    told, cause = (misfits or unbuilt)[0]
    raise ValueError(told) from cause


def survey_data(problem: Problem, trial: Trial, found: DryRun) -> None:
    """Read the data once, to find batches on which a trial's model fails.

    `found` has the findings of a dry run that did not do this (`survey=False`).
    """
    if problem.is_own("sweep"):
        return
    problem = replace(problem, copied=found.copied)
    try:
        target = problem.target(trial).eval()
    except Exception as error:  # unexpected, because `model_fn` did not raise in the dry run
        raise Misfit(str(error)) from error
    _survey(problem, trial, target, found.metrics)


def _survey(problem: Problem, trial: Trial, target: nn.Module, metrics: Mapping[str, float]) -> None:
    for argument, data in (("train_data", problem.train_data), ("val_data", problem.val_data)):
        survey_batches(problem, trial, target, data, argument)
    warn_of_sums(problem, trial, target)
    warn_of_broadcasting(problem, trial, target)
    check_finite(problem, trial, target, metrics)


def _try(problem: Problem, trial: Trial, target: nn.Module, survey: bool) -> DryRun:
    _refuse_frozen(trial, target)
    parameters = {name: f"{tuple(p.shape)} {p.dtype}" for name, p in target.named_parameters()}
    other = problem.with_settings(seed=next_seed(problem.settings.seed)).target(trial)
    try:
        check_parts(as_given(problem.objective), target)
    except ValueError as error:
        raise Misfit(str(error)) from error
    pretrained = problem.settings.sweep.surrogate < 1 and _is_pretrained(target, other)
    if copied := not _addresses(target).isdisjoint(_addresses(other)):
        problem, target = replace(problem, copied=True), duplicate(target)
    del other
    if problem.is_own("sweep"):
        narrow = None if pretrained else _try_surrogate(problem, trial)
        return DryRun(parameters=parameters, pretrained=pretrained, copied=copied, narrowed=narrow)
    _refuse_sparse(target)
    notes = Notes()
    if reads_config(as_given(problem.objective)):
        give_config(target, notes.noting(steering(trial.config)))
    calls: list[Any] = []
    handle = target.register_forward_pre_hook(lambda _, args, kwargs: calls.append(kwargs or args), with_kwargs=True)
    parts, began = parts_of(trial, _first_batch(problem, trial), "train_data"), time.perf_counter()
    trained, peak = _first_step(problem, trial, target, parts[0])
    with naming_batch("val_data", "its first batch", trial.batch_size):
        validation = next(problem.val_data.in_order(trial.batch_size))
    with torch.no_grad():
        validated = run_batch(problem, target.eval(), parts_of(trial, validation, "val_data")[0], "val_data")
    handle.remove()
    steps = problem.train_data.steps(trial.batch_size) or math.inf
    epoch_seconds = (time.perf_counter() - began) * len(parts) * steps
    whole = measure_whole(problem, trial, target, validated)
    found = {f"train_{name}": value.item() for name, value in trained.items()}
    found |= {f"val_{name}": value.item() for name, value in validated.items()}
    found |= {f"val_{name}": value for name, value in whole.items()}
    found = {name: value for name, value in found.items() if not is_weight(name.partition("_")[2])}
    _check_names(problem, found)
    if survey:
        _survey(problem, trial, target, found)
    example = _few(target, calls[0]) if calls else None
    narrow, tried = None, replace(problem, example_input=example)
    _try_optimizer(tried, trial, target)
    if not pretrained:
        narrow = _try_surrogate(tried, trial)
        _try_copy(tried, trial, parts[0])
    reads = frozenset(notes.read) | getattr(as_given(problem.objective), "reads", frozenset())
    steady = min(epoch_seconds, _repeated(problem, target, parts[0]) * len(parts) * steps)
    models = problem.settings.models("race")  # a finalist's models train in turn, but all are in memory
    return DryRun(
        parameters=parameters,
        pretrained=pretrained,
        narrowed=narrow,
        metrics=found,
        example_input=example,
        copied=copied,
        objective_reads=reads,
        whole_names=tuple(whole),
        peak=models * peak,
        epoch_seconds=models * epoch_seconds,
        steady_epoch_seconds=models * steady,
    )


def _first_step(problem: Problem, trial: Trial, model: nn.Module, batch: Batch) -> tuple[Mapping[str, Tensor], float]:
    """Train a model for one step; return its metrics, and the bytes that training takes.

    Raise Misfit if the step changes shapes of the model's buffers so that a new model cannot load its state.
    """

    def shapes() -> dict[str, torch.Size]:
        return {name: value.shape for name, value in model.state_dict().items() if isinstance(value, Tensor)}

    before, step = shapes(), training_step(problem, model, batch)
    if shapes() != before:
        try:
            problem.target(trial).load_state_dict(model.state_dict())
        except RuntimeError as error:
            told = "`model_fn` makes a model whose buffers change in training, so that a new one cannot load its state"
            raise Misfit(f"{told}: {error}") from error
    return step


def _refuse_frozen(trial: Trial, target: nn.Module) -> None:
    """Raise Misfit if a model has no parameters to train."""
    parameters = [*target.parameters()]
    if not any(parameter.requires_grad for parameter in parameters):
        frozen = "whose parameters are all frozen (`requires_grad=False`)" if parameters else "without parameters"
        told = f"`model_fn` makes a model {frozen} for {dict(trial.config)!r}"
        raise Misfit(f"{told}, but must make one that can be trained")


def _refuse_sparse(target: nn.Module) -> None:
    """Raise Misfit if a parameter or buffer of a model is a sparse tensor."""
    for name, tensor in named_tensors(target).items():
        if tensor.layout is not torch.strided:
            told = f"`model_fn` makes a model whose `{name}` has the layout {tensor.layout}"
            raise Misfit(f"{told}, but buffers must be dense. A plain attribute may hold a sparse tensor")


def _check_names(problem: Problem, found: Collection[str]) -> None:
    """Raise ValueError if training does not measure a metric that is asked for or has a bound."""
    comparison = problem.settings.comparison
    named = {name: "metric" for name, _ in comparison.objectives}
    several = len(named) > 1 or comparison.bounds
    rule = f"one of {sorted(found)}" + (f", or a cost of the model: {', '.join(COSTS)}" if several else "")
    for name in comparison.trained:
        require(name in found, named.get(name, "sweep.constraints"), name, rule)
        check_reported(name, found)


def _repeated(problem: Problem, target: nn.Module, batch: Batch) -> float:
    """Return the seconds of another forward and backward pass, which uses a single CPU thread if the device is a CPU.

    The first step on one thread includes set-up work. If it is quick, a second step is measured, and the faster counts.
    """
    step = partial(batch_seconds, problem, target.train(), batch, "train_data")
    with one_thread():
        first = step()
        return min(first, step()) if first < QUICK_S else first


def _few(target: nn.Module, inputs: Any) -> Any:
    """Return the first examples of the inputs of `target`, or all if it is unknown which rows belong to one example."""
    if not can_be_split(inputs):
        return inputs
    few = tree_map(lambda leaf: leaf[:EXAMPLES] if has_samples(leaf) else leaf, inputs)
    if sum(isinstance(leaf, Tensor) for leaf in tree_leaves(inputs)) == 1:
        return few
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            call_model(target, few)
    except Exception:  # rows may refer to other rows, as in the adjacency matrix of a graph
        return inputs
    return few


def _first_batch(problem: Problem, trial: Trial) -> Batch:
    """Return the first training batch; warn if a loader uses another batch size than that of the configuration."""
    asked = trial.batch_size
    with naming_batch("train_data", "its first batch", asked):
        batches = problem.train_data.epoch(asked, 0)
        first = next(batches)
        if "batch_size" in trial.config and can_be_split(first):
            length = batch_length(first)
            if length > asked or (length < asked and next(batches, None) is not None):
                warn(
                    f"`train_data` was asked for batches of {asked} examples, and the first has {length}: what `space` "
                    "says of `batch_size` changes nothing where its loader takes no notice of it"
                )
    return first


def _addresses(model: nn.Module) -> set[int]:
    """Return the memory addresses of the model's tensors that training changes, to find tensors that models share."""
    # Leave out frozen parameters: models may share them, because training does not write to them.
    tensors = (*(p for p in model.parameters() if p.requires_grad), *model.buffers())
    return {memory(tensor) for tensor in tensors if tensor.numel()} - {0}  # a sparse tensor has no address


def _is_pretrained(target: nn.Module, from_another_seed: nn.Module) -> bool:
    """Return whether more than `PRETRAINED_SHARE` of a model's weights are the same in a model from another seed.

    Parameters with at most two different values, such as constants and identities, are ignored.
    """
    other = dict(from_another_seed.named_parameters())
    same = total = 0
    for name, parameter in target.named_parameters():
        values = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter.detach()
        if values.numel() == 0 or bool(((values == values.min()) | (values == values.max())).all()):
            continue
        total += values.numel()
        same += values.numel() if name in other and torch.equal(values, other[name]) else 0
    return same > PRETRAINED_SHARE * total


def _try_optimizer(problem: Problem, trial: Trial, target: nn.Module) -> None:
    """Make the trial's optimizer once. Raise Misfit if that fails, for example because of a key for a model part."""
    try:
        problem.note_roles(target, trial)
        optimizer(target, by_parameter(trial.config, roles_of(target)))
    except ValueError as error:
        raise Misfit(str(error)) from error
    except Exception as error:
        told = f"`optimizer` is {trial.config.get('optimizer')!r}, which fails for the model's parameters"
        raise Misfit(f"{told} with {type(error).__name__}: {error}") from error


def _try_surrogate(problem: Problem, trial: Trial) -> WidthPlan | None:
    """Build the trial's surrogate, and return its `WidthPlan`; None if the sweep trains the full-size model."""
    try:
        narrow = problem.surrogate(trial, checked=True)
    except (Exception, SystemExit) as error:
        if width_form(problem.model_fn):
            told = about_width_argument(problem.model_fn)
            raise Misfit(f"{error} ({told})" if told else str(error)) from error
        raise Misfit(
            f"`sweep.surrogate` is {problem.settings.sweep.surrogate:g}, but the model cannot be made narrower by "
            f"itself ({error}); give `model_fn` an argument `width_ratio`, or set `sweep=SweepConfig(surrogate=1)`"
        ) from error
    return width_plan(narrow) if problem.settings.sweep.surrogate < 1 else None


def _try_copy(problem: Problem, trial: Trial, batch: Batch) -> None:
    """Fuse one trial's surrogate, and raise Misfit if the fused copy computes something else than the surrogate."""

    def means(model: nn.Module, part: Batch) -> Mapping[str, Tensor]:
        return scalars(problem.objective(model, part))

    few = split(batch, max(1, batch_length(batch) // EXAMPLES))[0] if can_be_split(batch) else batch
    try:
        check_copy(lambda: problem.surrogate(trial), means, few)
    except ValueError as error:
        told = "`model_fn` makes a model that trains otherwise where it is copied, as the sweep does"
        raise Misfit(f"{told}: {error}") from error
