"""The problem of a search: the model function, the objective and the data."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from fusion import fusion_key
from fusion.keys import check_settings
from fusion.streams import seed_generators
from fusion.structure.module_parts import duplicate
from hydro_rasda.common.heat_names import HeatName
from hydro_rasda.common.seeds import derive_seed
from hydro_rasda.common.trial import Trial
from hydro_rasda.data import Batches, Folds, outline, reseeded
from hydro_rasda.problem.lr_roles import asked_roles, note_roles
from hydro_rasda.problem.metrics import WholeMetrics
from hydro_rasda.problem.objective import Objective, give_config, reads_config, steering
from hydro_rasda.problem.precision import as_given
from hydro_rasda.problem.read_keys import Notes
from hydro_rasda.problem.width_argument import DEPTH, Plans, WidthForm, call_model_fn, width_form
from hydro_rasda.settings.config import TuneConfig
from surrogate import PlanMismatch, SurrogatePlan, make_surrogate, parameter_roles, plan_shrink, plan_surrogate, shrink
from surrogate.widths import compare_widths, shapes_of


class NoModule(ValueError):
    """A model function did not return a module that can be trained."""


class NoRoles(ValueError):
    """A configuration has learning rates by role, but the model cannot be made narrower, so its roles are unknown."""


@dataclass(frozen=True)
class OwnLoop:
    """The user's `train(worker)`, which replaces the library's training loop.

    Attributes:
        data: The value of `worker.data`.
        sweeps: True if it trains in every heat; False if it trains only the full-size models.
    """

    train: Callable[[Any], None]
    data: Any
    sweeps: bool = False


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The findings of a dry run that heats and workers need. Their defaults stand for a problem before its dry run.

    Attributes:
        example_input: Arguments with which the objective called the model, cut to a few examples: positional arguments,
            or a dict of keyword arguments. If `model_fn` takes no width ratio, the library passes them through the
            model to make it narrower. None if the objective never called the model itself.
        copied: True if `model_fn` returns the same tensors in each call, so that models must be copies.
        objective_reads: Keys of the configuration that the objective read.
        whole_names: Names of the metrics that `metrics` returns.
        peak: Bytes that training a trial's full-size models takes, estimated from one batch. A trial has several models
            if there are folds or repeats.
        epoch_seconds: Seconds of a first epoch of these models, estimated from one batch; infinite if the data have no
            length.
        steady_epoch_seconds: Seconds of a later epoch on a single CPU thread, estimated from a repeated batch. Training
            also gives each core a model, which a single thread computes.
    """

    example_input: Any = None
    copied: bool = False
    objective_reads: frozenset[str] = frozenset()
    whole_names: tuple[str, ...] = ()
    peak: float = 0.0
    epoch_seconds: float = math.inf
    steady_epoch_seconds: float = math.inf


@dataclass(frozen=True)
class Problem(Findings):
    """The functions, data and settings that every heat and every worker needs to train a trial.

    Attributes:
        objective: Function that returns the loss and metrics of one model on one batch.
        val_data: Batches on which trials are compared. With folds, `val_data` and `train_data` are those of the first
            fold.
        folds: All data and their folds, if `val_data` is a splitter; see `each`.
        settings: Arguments of `tune` that are numbers and words: the surrogates' width, the metric, the seed, ...
        metrics: Function for further metrics on the whole validation set; None for none.
        own_loop: The user's function that trains models; None for the library's own loop.
        horizon: The epoch at which schedules end; None for `max_t`. If schedules of surrogates depend on shares of the
            training (such as `warmup`), `horizon` is the sweep's last rung, see `dry_run.dry_run_and_hints`.
        unhurried: Up to this epoch, schedules run as in a full training. Their remaining part is compressed into the
            epochs from `unhurried` to `horizon`.
        plans: The plans found so far for making models narrower; copies of this problem share them. A plan is not used
            for models of other shapes. A copy needs its own plans if its `model_fn` draws initial weights of the same
            shapes by other rules.
    """

    model_fn: Callable[..., nn.Module]
    objective: Objective
    train_data: Batches
    val_data: Batches
    settings: TuneConfig
    device: torch.device
    metrics: WholeMetrics | None = None
    own_loop: OwnLoop | None = None
    folds: Folds | None = None
    horizon: int | None = None
    unhurried: int = 0
    plans: Plans = field(default_factory=Plans, compare=False, repr=False)

    def tried(self, found: Findings) -> Problem:
        """Return this problem with the findings of its dry run."""
        return replace(self, **{each.name: getattr(found, each.name) for each in fields(Findings)})

    def first_epoch_seconds(self, heat: HeatName) -> float:
        """Return the expected seconds of a first epoch; infinite if the user's own function trains the models."""
        return math.inf if self.is_own(heat) else self.epoch_seconds

    def is_own(self, heat: HeatName) -> bool:
        """Tell whether the user's own function trains the models of a heat."""
        return self.own_loop is not None and (heat == "race" or self.own_loop.sweeps)

    def library_keys(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the part of a configuration, or of the space, that the library may read.

        It is empty if the user's own function trains the sweep, because then all keys belong to that function.
        """
        return {} if self.is_own("sweep") else config

    def check_config(self, config: Mapping[str, Any]) -> None:
        """Raise ValueError if a configuration has a value that the library reads but cannot use."""
        check_settings(self.library_keys(config))

    @property
    def goes_on(self) -> bool:
        """True if full-size training continues from the sweep's weights: at the same width, and by the same loop."""
        return self.settings.sweep.surrogate == 1 and self.is_own("sweep") == self.is_own("race")

    def with_settings(self, **changes: Any) -> Problem:
        """Return this problem with changed settings: `problem.with_settings(seed=1)`."""
        return replace(self, settings=replace(self.settings, **changes))

    def at_full_size(self, seed: int, horizon: int | None) -> Problem:
        """Return this problem for a full-size training with a seed; schedules end at `horizon` (None for `max_t`)."""
        return replace(self.with_settings(seed=seed), horizon=horizon, unhurried=0)

    def at_width(self, width: float | None) -> Problem:
        """Return this problem for a heat that trains surrogates of `width` up to `max_t`.

        If `width` is None, return this problem itself, which is that of the sweep.
        """
        if width is None:
            return self
        sweep = replace(self.settings.sweep, surrogate=width, grace_period=self.settings.max_t)
        return replace(self.with_settings(sweep=sweep), horizon=None, unhurried=0)

    def each(self, heat: HeatName) -> list[Problem]:
        """Return the problem of each model that a trial trains in a heat: one for each fold and each seed.

        The first model has the run's own seed. If no heat trains several models, the only problem is this one.
        """
        if self.settings.models("sweep") == 1:
            return [self]
        return [self._of_model(i) for i in range(self.settings.models(heat))]

    def _of_model(self, i: int) -> Problem:
        seed = self.settings.seed if i == 0 else derive_seed(self.settings.seed, "model", i)
        alone = self._alone(seed)
        if self.folds is not None and i > 0:
            train_data, val_data = self.folds.data(i % len(self.folds), seed)
            return replace(alone, train_data=train_data, val_data=val_data)
        return alone if i == 0 else replace(alone, train_data=reseeded(self.train_data, seed))

    def _alone(self, seed: int) -> Problem:
        sweep = replace(self.settings.sweep, repeats=1)
        return replace(self.with_settings(seed=seed, sweep=sweep, folds=0), folds=None)

    def on_all_examples(self) -> Problem:
        """Return the problem of one model that trains on the examples of all folds, without validation."""
        assert self.folds is not None
        alone = self._alone(self.settings.seed)
        return replace(alone, train_data=self.folds.base, val_data=self.folds.nothing(), metrics=None)

    def schedule_time(self, epoch: float) -> float:
        """Return the epoch of a full training whose learning rate applies at `epoch` of this training."""
        if self.horizon is None or epoch <= self.unhurried:
            return epoch
        passed = (epoch - self.unhurried) / (self.horizon - self.unhurried)
        return self.unhurried + passed * (self.settings.max_t - self.unhurried)

    def on(self, device: torch.device) -> Problem:
        """Return this problem with models and batches on another device."""
        if device == self.device:
            return self
        if self.folds is not None:
            folds = self.folds.on(device)
            train_data, val_data = folds.data(0, self.settings.seed)
            return replace(self, device=device, folds=folds, train_data=train_data, val_data=val_data)
        return replace(self, device=device, train_data=self.train_data.on(device), val_data=self.val_data.on(device))

    def target(self, trial: Trial) -> nn.Module:
        """Build the full-size model, with initial weights drawn from the trial's own seed."""
        model = self._target(trial)
        self.note_roles(model, trial)
        return model

    def _target(self, trial: Trial) -> nn.Module:
        seed_generators(derive_seed(self.settings.seed, "weights", trial.number))
        model = self._build(trial.config, 1.0)
        if not isinstance(model, nn.Module):
            raise NoModule(f"`model_fn` returned a {type(model).__name__}, but must return a torch.nn.Module")
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            told = f"`model_fn` returned a {type(model).__name__} whose {name!r}"
            if is_lazy(tensor):
                rule = "give the layer its input size, or run the model once on a batch inside `model_fn`"
                raise NoModule(f"{told} is lazy: it has no shape before the first batch; {rule}")
            if tensor.is_meta:
                raise NoModule(f"{told} lies on the device 'meta', where it has no data; build it on the CPU")
        return self._configured(model, trial).to(self.device)

    def note_roles(self, model: nn.Module, trial: Trial) -> None:
        """Store the roles of a full-size model's parameters on it, if its configuration has learning rates by role.

        Roles are found by making the model narrower. If `model_fn` takes no width ratio, this needs `example_input`;
        before that is known, nothing is stored.

        Raises:
            NoRoles: If the model cannot be made narrower.
        """
        asked = asked_roles(
            self.library_keys(trial.config), [name for name, p in model.named_parameters() if p.requires_grad]
        )
        if not asked or (self._width_form is None and self.example_input is None):
            return
        shapes = tuple(shapes_of(model).items())
        if shapes not in self.plans.roles:
            try:
                self.plans.roles[shapes] = self._roles(model, trial.config)
            except Exception as error:
                told = "needs the roles of parameters, which are found by making the model narrower"
                raise NoRoles(f"`{next(iter(asked))}` {told}: {error}; give names of its parts instead") from error
        note_roles(model, self.plans.roles[shapes])

    def _roles(self, model: nn.Module, config: Mapping[str, Any]) -> Mapping[str, str]:
        width = self.settings.sweep.surrogate
        ratio = width if width < 1 else 1 / 2
        with torch.random.fork_rng(devices=[]):
            if self._width_form is not None:
                return parameter_roles(model, compare_widths(model, self._build(config, ratio)))
            plan = plan_shrink(model, ratio, self.example_input)
            return parameter_roles(shrink(model, ratio, self.example_input, plan=plan))

    def _configured(self, model: nn.Module, trial: Trial) -> nn.Module:
        if reads_config(as_given(self.objective)):
            give_config(model, steering(trial.config))
        return model

    def surrogate(self, trial: Trial, *, checked: bool = False) -> nn.Module:
        """Build the trial's surrogate; if `checked`, check that its output has the shape of the full-size output."""
        width = self.settings.sweep.surrogate
        if width == 1:
            return self.target(trial)
        return self._configured(self._narrow(trial, checked), trial)

    def _narrow(self, trial: Trial, checked: bool) -> nn.Module:
        width = self.settings.sweep.surrogate
        if self._width_form is None:
            return self._shrunk(trial)
        config = dict(trial.config)
        plan, seed = self._planned(config), derive_seed(self.settings.seed, "weights", trial.number)
        example = self.example_input if checked else None
        seed_generators(seed)
        try:
            model = make_surrogate(self._build_shallow, config, width, example_input=example, plan=plan)
        except PlanMismatch:
            # The model depends on more than its configuration, so the plan does not fit. Build the model without a
            # plan, from the same random numbers.
            seed_generators(seed)
            model = make_surrogate(self._build_shallow, config, width, example_input=example)
        return model.to(self.device)

    def builds_alike(self, config: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        """Return whether two configurations are known to build surrogates that differ only in their tensors."""
        known, theirs = (self.plans.known_for(self.settings.sweep.surrogate, of) for of in (config, other))
        read = reads_config(as_given(self.objective)) and steering(config) != steering(other)
        return known is not None and known == theirs and not read

    def _planned(self, config: Mapping[str, Any]) -> SurrogatePlan | None:
        """Return the plan for the surrogate of a configuration; None if no plan is possible.

        It is the plan for all configurations that agree with `config` in the keys that `model_fn` reads.
        """
        width = self.settings.sweep.surrogate
        if (known := self.plans.known_for(width, config)) is not None:
            return self.plans.by_reads[known]
        notes = Notes()
        noted = replace(self, model_fn=notes.taken_by(self.model_fn))
        try:
            plan = plan_surrogate(noted._build_shallow, config, width)
        except Exception:  # `model_fn` needs a real dict, or it fails and will raise again when the model is built
            return None
        reads = notes.of(config)
        if reads is not None:
            self.plans.keep_for_reads(width, reads, plan)
        return plan

    def _shrunk(self, trial: Trial) -> nn.Module:
        """Build the full-size model and make it narrower by the plan for its structure."""
        if self.example_input is None:
            raise ValueError(
                "`objective` calls parts of it, but never the model itself, whose forward pass is followed"
            )
        target = self._target(trial)
        structure = self._structure(target)
        plan = self.plans.by_structure.get(structure)
        if plan is None:
            plan = plan_shrink(target, self.settings.sweep.surrogate, self.example_input)
            # A model with an object that cannot be inspected has a new structure each time. Its plan cannot be reused.
            if self._structure(target) == structure:
                self.plans.keep_for_structure(structure, plan)
        try:
            return shrink(target, self.settings.sweep.surrogate, self.example_input, plan=plan)
        except PlanMismatch:
            # The model branches on a float or at random, so the plan does not fit. Build the full-size model again,
            # from the same random numbers, and make it narrower without a plan.
            return shrink(self._target(trial), self.settings.sweep.surrogate, self.example_input)

    def _structure(self, target: nn.Module) -> str:
        """Return a key that is equal for full-size models that one plan narrows.

        It ignores floats, although a model may branch on them. `_shrunk` then makes the model narrower without a plan.
        """
        modes = tuple(module.training for module in target.modules())
        example = tree_map(lambda leaf: outline(leaf) if isinstance(leaf, Tensor) else leaf, self.example_input)
        key = fusion_key(target, modes, self.settings.sweep.surrogate, repr(example))
        return hashlib.sha256(repr(key).encode()).hexdigest()

    # Cached, because reading a signature takes a third of the time to build a small model.
    @cached_property
    def _width_form(self) -> WidthForm | None:
        return width_form(self.model_fn)

    def _build_shallow(self, config: Mapping[str, Any], width_ratio: float) -> nn.Module:
        """Build the model at the surrogates' depth. If `width_ratio` is 1, it has the full width at this depth."""
        depth = self.settings.sweep.depth
        if depth == 1:
            return self._build(config, width_ratio)
        return replace(self, model_fn=partial(self.model_fn, **{DEPTH: depth}))._build(config, width_ratio)

    def _build(self, config: Mapping[str, Any], width_ratio: float) -> nn.Module:
        """Call the model function with its own copy of the configuration, which it may change."""
        own = copy.deepcopy(dict(config))
        try:
            model: nn.Module = call_model_fn(self.model_fn, self._width_form, own, width_ratio)
        except SystemExit as end:
            raise RuntimeError(f"`model_fn` would end the script: {end!r}") from end
        return duplicate(model) if self.copied else model
