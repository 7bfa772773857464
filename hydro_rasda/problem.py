"""What is tuned: the model function, the objective and the data, checked by a dry run before any training."""

from __future__ import annotations

import copy
import hashlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fusion import fusion_key
from fusion.keys import lr_factors, read
from fusion.streams import seed_generators
from fusion.width.memory import objects_so_far_set_aside, peak_memory
from fusion.width.microbatch import split
from hydro_rasda.checks import require
from hydro_rasda.config import TuneConfig
from hydro_rasda.data import Batch, Batches, batch_length, naming_batch, non_finite, unlike
from hydro_rasda.metrics import EVAL_BATCH_FACTOR
from hydro_rasda.objective import Objective, check_metrics, checked, give_config, reads_config, scalars, steering
from hydro_rasda.plans import Plans
from hydro_rasda.precision import as_given, in_precision
from hydro_rasda.reads import Notes
from hydro_rasda.seeds import derive_seed
from hydro_rasda.trial import Trial as Trial
from hydro_rasda.whole_metrics import Collected, WholeMetrics, measured
from surrogate import PlanMismatch, SurrogatePlan, make_surrogate, plan_shrink, plan_surrogate, shrink


class NoModule(ValueError):
    """A model function returned something else than a module."""


@dataclass(frozen=True)
class OwnLoop:
    """A function of the user's that trains the full-size models in the library's place.

    Attributes:
        train: `train(worker)`, with a `Worker`.
        data: Its `worker.data`.
    """

    train: Callable[[Any], None]
    data: Any


@dataclass(frozen=True)
class Problem:
    """What every stage and every worker needs to train a trial.

    Attributes:
        model_fn: `model_fn(config)` or `model_fn(config, width_ratio)`.
        objective: What one model does with one batch.
        train_data: Batches to train on.
        val_data: Batches to compare trials on.
        settings: What `tune` was asked for in numbers and words: the surrogates' width, the metric, the seed, ...
        device: Where models train.
        example_input: What the model is called with, for a few examples (`dry_run` finds it): positional arguments, or
            a dict of keyword arguments. A model that takes no width is narrowed by following it through the model.
        metrics: Of the whole validation set, beside the objective's; None for none.
        whole_names: What these are called (`dry_run` finds it).
        objective_reads: Keys of the configuration that the objective was seen to read (`dry_run`).
        full_size: What trains the full-size models; None for the library's own loop.
        copied: Whether each model is a copy of what `model_fn` returns, which keeps its tensors for the next call.
        plans: How its models are made narrower, as far as that was found; shared by this problem's copies. For
            models of other shapes they are not used; a copy with a `model_fn` that draws initial weights of the same
            shapes by other rules needs its own.
    """

    model_fn: Callable[..., nn.Module]
    objective: Objective
    train_data: Batches
    val_data: Batches
    settings: TuneConfig
    device: torch.device
    example_input: Any = None
    metrics: WholeMetrics | None = None
    whole_names: tuple[str, ...] = ()
    objective_reads: frozenset[str] = frozenset()
    full_size: OwnLoop | None = None
    copied: bool = False
    peak: float = 0.0
    plans: Plans = field(default_factory=Plans, compare=False, repr=False)

    def with_settings(self, **changes: Any) -> Problem:
        """The same problem, some of its settings changed: `problem.with_settings(seed=1)`."""
        return replace(self, settings=replace(self.settings, **changes))

    def on(self, device: torch.device) -> Problem:
        """The same problem, its models and batches on another device."""
        if device == self.device:
            return self
        train_data, val_data = self.train_data.on(device), self.val_data.on(device)
        return replace(self, device=device, train_data=train_data, val_data=val_data)

    def target(self, trial: Trial) -> nn.Module:
        """The full-size model, its initial weights drawn from the trial's own seed."""
        seed_generators(derive_seed(self.settings.seed, "weights", trial.number))
        model = self._build(trial.config, 1.0)
        if not isinstance(model, nn.Module):
            raise NoModule(f"`model_fn` returned a {type(model).__name__}, but must return a torch.nn.Module")
        return self._configured(model, trial).to(self.device)

    def _configured(self, model: nn.Module, trial: Trial) -> nn.Module:
        if reads_config(as_given(self.objective)):
            give_config(model, steering(trial.config))
        return model

    def surrogate(self, trial: Trial, *, checked: bool = False) -> nn.Module:
        """The model that stands in for it in the sweep, likewise.

        Args:
            trial: The configuration.
            checked: Whether to run it on the example input, to see that its output has the target's shape.
        """
        width = self.settings.surrogate
        if width == 1:
            return self.target(trial)
        return self._configured(self._narrow(trial, checked), trial)

    def _narrow(self, trial: Trial, checked: bool) -> nn.Module:
        width = self.settings.surrogate
        if not self._takes_width:
            return self._shrunk(trial)
        config = dict(trial.config)
        plan, seed = self._planned(config), derive_seed(self.settings.seed, "weights", trial.number)
        example = self.example_input if checked else None
        seed_generators(seed)
        try:
            model = make_surrogate(self._build, config, width, example_input=example, plan=plan)
        except PlanMismatch:
            # The model depends on more than its configuration. It is built again for random numbers as they were.
            seed_generators(seed)
            model = make_surrogate(self._build, config, width, example_input=example)
        return model.to(self.device)

    def _planned(self, config: Mapping[str, Any]) -> SurrogatePlan | None:
        """What holds for all configurations in which what `model_fn` reads is equal; None where nothing is known."""
        width = self.settings.surrogate
        if (known := self.plans.known_for(width, config)) is not None:
            return self.plans.by_reads[known]
        notes = Notes()
        noted = replace(self, model_fn=notes.taken_by(self.model_fn))
        try:
            plan = plan_surrogate(noted._build, config, width)
        except Exception:  # of the model's own, which building it tells; or as it takes no stand-in for a dict
            return None
        reads = notes.of(config)
        if reads is not None:
            self.plans.keep_for_reads(width, reads, plan)
        return plan

    def _shrunk(self, trial: Trial) -> nn.Module:
        """The target made narrower, as planned for its structure."""
        target = self.target(trial)
        structure = self._structure(target)
        plan = self.plans.by_structure.get(structure)
        if plan is None:
            plan = plan_shrink(target, self.settings.surrogate, self.example_input)
            # What cannot be looked into is like nothing else, not even itself: its plan would serve nobody.
            if self._structure(target) == structure:
                self.plans.keep_for_structure(structure, plan)
        try:
            return shrink(target, self.settings.surrogate, self.example_input, plan=plan)
        except PlanMismatch:
            # It branches on a float, or at random. The target is built again for random numbers as they were.
            return shrink(self.target(trial), self.settings.surrogate, self.example_input)

    def _structure(self, target: nn.Module) -> str:
        """Equal for targets that one plan narrows, but for floats on which they may branch."""
        modes = tuple(module.training for module in target.modules())
        example = tree_map(lambda leaf: outline(leaf) if isinstance(leaf, Tensor) else leaf, self.example_input)
        key = fusion_key(target, modes, self.settings.surrogate, repr(example))
        return hashlib.sha256(repr(key).encode()).hexdigest()

    # Kept: to read a signature takes a third of the time in which a small model is built.
    @cached_property
    def _takes_width(self) -> bool:
        return takes_width_ratio(self.model_fn)

    def _build(self, config: Mapping[str, Any], width_ratio: float) -> nn.Module:
        """Call the model function, with a copy of the configuration that is its own to change."""
        own = copy.deepcopy(dict(config))
        try:
            if not self._takes_width:
                model = self.model_fn(own)
            elif "width_ratio" in inspect.signature(self.model_fn).parameters:
                model = self.model_fn(own, width_ratio=width_ratio)
            else:
                model = self.model_fn(own, width_ratio)
        except SystemExit as end:
            raise RuntimeError(f"`model_fn` would end the script: {end!r}") from end
        return copy.deepcopy(model) if self.copied else model


def takes_width_ratio(model_fn: Callable[..., nn.Module]) -> bool:
    """Whether a model function has the form `model_fn(config, width_ratio)`.

    A second argument of another name counts where it has no default.

    >>> takes_width_ratio(lambda config, width_ratio=1.0: None), takes_width_ratio(lambda config, depth=2: None)
    (True, False)
    """
    parameters = list(inspect.signature(model_fn).parameters.values())
    if any(p.name == "width_ratio" for p in parameters):
        return True
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.kind in positional and p.default is inspect.Parameter.empty]
    return len(required) >= 2


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
    """

    parameters: dict[str, str]
    example_input: Any
    pretrained: bool = False
    shared: bool = False
    objective_reads: frozenset[str] = frozenset()
    whole_names: tuple[str, ...] = ()
    peak: float = 0.0


_BESIDE_A_STEP = 4
"""What else a training holds, in sizes of the model: its weights, their average, and two moments of Adam's."""

PRETRAINED_SHARE = 0.1
"""So many of a model's elements come out the same from two seeds where they were trained before."""
EXAMPLES = 4
MISFITS = 8
"""So many configurations in a row whose model is built but cannot be trained mean that none can."""


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
            model's output and the target, or the model cannot be made narrower; or where `model_fn` returns no module,
            the objective no dict of tensors, or the metric is unknown. Each names the argument.
    """
    unbuilt: list[Exception] = []
    misfits: list[Exception] = []
    for trial in trials:
        try:
            target = problem.target(trial)
        except NoModule:
            raise
        except Exception as error:
            told = f"for {dict(trial.config)!r} with {type(error).__name__}: {error}"
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
    other = problem.with_settings(seed=problem.settings.seed + 1).target(trial)
    learning = [name for name, p in target.named_parameters() if p.requires_grad]
    try:
        lr_factors(trial.config, learning)
    except ValueError as error:
        raise _misfit(str(error), error) from error
    pretrained = problem.settings.surrogate < 1 and _is_pretrained(target, other)
    if shared := not _addresses(target).isdisjoint(_addresses(other)):
        problem, target = replace(problem, copied=True), copy.deepcopy(target)
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
    with objects_so_far_set_aside(problem.device), peak_memory(problem.device) as step:
        trained = _run_batch(problem, target.train(), _parts(trial, train, "train_data")[0], "train_data")
    weights = sum(tensor.nbytes for tensor in (*target.parameters(), *target.buffers()))
    peak = step.bytes + _BESIDE_A_STEP * weights
    with naming_batch("val_data", "its first batch", trial.batch_size):
        validation = next(problem.val_data.in_order(trial.batch_size))
    with torch.no_grad():
        validated = _run_batch(problem, target.eval(), _parts(trial, validation, "val_data")[0], "val_data")
    handle.remove()
    whole = _whole_names(problem, trial, target, validated)
    available = sorted([f"train_{name}" for name in trained] + [f"val_{name}" for name in (*validated, *whole)])
    metric = problem.settings.metric
    require(metric in available, "metric", metric, f"one of {available}")
    for argument, data in (("train_data", problem.train_data), ("val_data", problem.val_data)) if survey else ():
        _survey(problem, trial, target, data, argument)
    example = tree_map(lambda leaf: leaf[:EXAMPLES] if _has_rows(leaf) else leaf, calls[0]) if calls else None
    if not pretrained:
        _try_surrogate(replace(problem, example_input=example), trial)
    return DryRun(parameters, example, pretrained, shared, frozenset(notes.read), whole, peak)


def _whole_names(problem: Problem, trial: Trial, model: nn.Module, known: Mapping[str, Any]) -> tuple[str, ...]:
    """What `metrics` calls what it says of the whole validation set, which one untrained model has to go through.

    Raises:
        ValueError: where it fails, or returns no numbers, or uses a name of the objective's.
    """
    if problem.metrics is None:
        return ()
    collected, batch_size = Collected(), EVAL_BATCH_FACTOR * trial.batch_size
    with torch.no_grad():
        for batch in problem.val_data.in_order(batch_size):
            for part in _parts(trial, batch, "val_data"):
                found = problem.objective(model, part)
                collected.take({name: value[None] for name, value in found.items()}, batch_length(part))
    (outputs,), (targets,) = collected.whole()
    try:
        names = tuple(measured(problem.metrics, outputs, targets))
    except Exception as error:
        told = f"`metrics` fails on the whole validation set, {outline((outputs, targets))}"
        raise ValueError(f"{told}: {type(error).__name__}: {error}") from error
    twice = sorted(known.keys() & set(names))
    require(not twice, "metrics", twice, "a function whose names are not the objective's, too")
    return names


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
        for name, batch in islice(unlike(data, trial.batch_size, argument), MISFITS):
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


def _try_surrogate(problem: Problem, trial: Trial) -> None:
    try:
        problem.surrogate(trial, checked=True)
    except (Exception, SystemExit) as error:
        if takes_width_ratio(problem.model_fn):
            raise _Misfit(error) from error
        raise _misfit(
            f"`surrogate` is {problem.settings.surrogate:g}, but the model cannot be made narrower by itself "
            f"({error}); give `model_fn` an argument `width_ratio`, or set `surrogate=1`",
            error,
        ) from error


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


def outline(value: Any) -> str:
    """Shapes and types of the tensors in a value: "[(64, 3) float32, (64,) int64]"."""
    leaves = [
        f"{tuple(v.shape)} {str(v.dtype).removeprefix('torch.')}" for v in tree_leaves(value) if isinstance(v, Tensor)
    ]
    return f"[{', '.join(leaves)}]"
