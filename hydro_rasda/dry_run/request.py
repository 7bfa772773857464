"""The arguments of `tune`: functions, space and data, checked together before any work."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from hydro_rasda.common.argument_checks import check_function, is_text, require
from hydro_rasda.contracts import Backend
from hydro_rasda.data import Batches, Data, Folds, OwnData, Splitter, is_splitter, make_batches, make_folds
from hydro_rasda.heats.search import check_first, check_searcher, named_searcher, prepare
from hydro_rasda.problem.metrics import WholeMetrics
from hydro_rasda.problem.objective import GivenObjective, LossFn, as_objective, takes_config, unmeasured
from hydro_rasda.problem.precision import in_precision
from hydro_rasda.problem.problem import OwnLoop, Problem
from hydro_rasda.problem.width_argument import (
    check_depth_argument,
    check_second_argument,
    check_width_argument,
    width_form,
)
from hydro_rasda.run.pickling import pickle_config_modules
from hydro_rasda.schedulers.named_rules import POPULATION
from hydro_rasda.schedulers.population import PopulationBasedTraining
from hydro_rasda.schedulers.sweep_rule import CHANGEABLE
from hydro_rasda.settings.config import HISTORY, TuneConfig
from hydro_rasda.space.branches import reachable
from hydro_rasda.space.space import check_space, explored, reached

if TYPE_CHECKING:
    from ray.tune.search import Searcher


@dataclass(frozen=True)
class Request:
    """The arguments of `tune` for the model, the space, the data and the training, under the same names."""

    model_fn: Callable[..., nn.Module]
    space: Mapping[str, Any]
    train_data: Data | Any
    val_data: Data | Splitter | Any
    loss_fn: LossFn | None
    objective: GivenObjective | None
    metrics: WholeMetrics | None
    train: Callable[..., None] | None
    settings: TuneConfig

    def check(self) -> None:
        """Raise ValueError for wrong arguments that later steps would notice only after work has started."""
        rule = "a function of (config) or (config, width_ratio)"
        if isinstance(self.model_fn, nn.Module):  # a module is callable, too, but takes inputs
            kind = type(self.model_fn).__name__
            raise ValueError(f"`model_fn` is a model, a {kind}, but must be {rule} that builds one")
        check_function("model_fn", self.model_fn, 1, 2, rule=rule, or_class=True)
        sweep, race = self.settings.sweep, self.settings.race
        self._check_train()
        check_width_argument("model_fn", self.model_fn, sweep.surrogate)
        check_depth_argument(self.model_fn, sweep.depth, sweep.surrogate)
        if self.loss_fn is not None:
            rule = "None, or a function (no class) of (output, target) or (output, target, config)"
            check_function("loss_fn", self.loss_fn, 3 if takes_config(self.loss_fn) else 2, rule=rule)
        if self.objective is not None:
            _check_objective(self.objective, race.strategy)
        if self.objective is not None and self.loss_fn is not None:
            raise ValueError("`loss_fn` and `objective` are both given, but one says all: leave one out")
        for name, own in {"loss_fn": self.loss_fn, "objective": self.objective}.items():
            _check_nothing_to_train(name, own)
        if self.metrics is not None:
            check_function("metrics", self.metrics, 2, rule="None, or a function (no class) of (outputs, targets)")
        check_space(self.space, self.settings.num_samples, self.strategy)
        check_second_argument(self.model_fn, reachable(self.space))
        if sweep.rule == POPULATION:
            explored(self.space, not self.sweeps)
        if isinstance(sweep.rule, PopulationBasedTraining):
            _check_explored(sweep.rule, self.space)
        if isinstance(sweep.searcher, str):
            self.searcher()
        elif sweep.searcher is not None:
            check_searcher(sweep.searcher)
        check_first(sweep.first, self.space)
        if self.folds is not None:
            replace(self.settings, folds=len(self.folds))  # raises if settings do not go together with folds

    def _check_train(self) -> None:
        """Raise ValueError if arguments do not go together with `train`, or are missing without it."""
        given = {"train_data": self.train_data, "val_data": self.val_data}
        for name, data in given.items() if not self.sweeps else ():
            require(data is not None, name, None, "given, unless `train` alone trains the models")
        if self.train is None:
            return
        sweep, race = self.settings.sweep, self.settings.race
        check_function("train", self.train, 1, rule="None, or a function (no class) of a Worker")
        rule = "None with `train`, which returns where its own patience ends"
        require(race.patience is None, "race.patience", race.patience, rule)
        one = not is_splitter(self.val_data) and sweep.repeats == 1
        require(one, "train", self.train, "None where a trial trains several models, of folds or seeds")
        if not self.sweeps:
            return
        alone = "where `train` alone trains the models"
        require(self.metrics is None, "metrics", self.metrics, f"None {alone}: it reports all metrics")
        require(sweep.fusion in ("auto", 1), "sweep.fusion", sweep.fusion, f"'auto' or 1 {alone}, one by one")
        costs = self.settings.comparison.costs
        require(not costs, "metric", costs, f"metrics that `train` reports, {alone}; or a bound of these")
        taken = [name for name in self.settings.comparison.trained if name in HISTORY]
        require(not taken, "metric", taken, f"metrics of other names {alone}: the journal has these for its own values")
        if sweep.surrogate < 1 and width_form(self.model_fn) is None:
            named: object = getattr(self.model_fn, "__name__", repr(self.model_fn))
            rule = "a function of (config, width_ratio), by which `worker.model()` builds narrower models; or set "
            require(False, "model_fn", named, f"{rule}`sweep=SweepConfig(surrogate=1)`")

    @property
    def sweeps(self) -> bool:
        """True if `train` trains the models of every heat, because neither `loss_fn` nor `objective` is given."""
        return self.train is not None and self.loss_fn is None and self.objective is None

    @property
    def strategy(self) -> str | None:
        """`race.strategy`, which restricts the values of some keys; None if the library reads no keys."""
        return None if self.sweeps else self.settings.race.strategy

    @property
    def data(self) -> dict[str, Any]:
        """The data by argument name, for the run's identity. Folds are represented by the indices of their examples."""
        folds = self.folds
        val_data: Any = self.val_data if folds is None else folds.indices()
        given = {"train_data": self.train_data, "val_data": val_data}
        return {name: data for name, data in given.items() if not self.sweeps or data is not None}

    @cached_property
    def folds(self) -> Folds | None:
        """The folds of the training data, on the CPU; None if `val_data` is not a splitter."""
        if self.sweeps or not is_splitter(self.val_data):
            return None
        seed = self.settings.seed
        train_data = self._batches("train_data", self.train_data, torch.device("cpu"))
        return make_folds(self.val_data, self.train_data, train_data, seed)

    def _batches(self, name: str, data: Data, where: torch.device) -> Batches:
        return make_batches(data, name, where, self.settings.seed, self.settings.loader_workers)

    @property
    def _loss_fn(self) -> LossFn:
        return F.cross_entropy if self.loss_fn is None else self.loss_fn  # a module of several losses may have no items

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """The user's functions by argument name, for the run's identity.

        If the library needs a `loss_fn` and the user gave none, it is cross-entropy.
        """
        loss_fn = None if self.sweeps else self._loss_fn
        measures = {"loss_fn": loss_fn} if self.objective is None else {"objective": self.objective}
        given: dict[str, Any] = {"model_fn": self.model_fn, **measures, "metrics": self.metrics, "train": self.train}
        return {name: function for name, function in given.items() if function is not None}

    def searcher(self) -> Searcher | None:
        """Return the searcher that the user asked for, prepared for the space; None for random search.

        If the user gave a searcher object, return a prepared copy, so that the object can serve further runs.
        """
        asked = self.settings.sweep.searcher
        if isinstance(asked, str):
            return named_searcher(asked, self.space, self.settings)
        searcher = copy.deepcopy(asked)
        if searcher is not None:
            prepare(searcher, self.space, self.settings.comparison.objectives)
        return searcher

    def problem(self, backend: Backend) -> Problem:
        pickle_config_modules()
        objective = as_objective(self.objective, self._loss_fn, self.metrics is not None)
        settings, where = self.settings, backend.device
        folds = None if self.folds is None else self.folds.on(where)
        train_data: Batches
        val_data: Batches
        if self.sweeps:
            objective, train_data, val_data = unmeasured, OwnData(), OwnData()
            settings = replace(settings, sweep=replace(settings.sweep, fusion=1))
        if folds is not None:
            settings = replace(settings, folds=len(folds))
            train_data, val_data = folds.data(0, settings.seed)
        if settings.models("race") > 1:  # one device trains all models of a finalist
            settings = replace(settings, race=replace(settings.race, max_workers=1))
        if folds is None and not self.sweeps:
            train_data, val_data = (self._batches(name, data, where) for name, data in self.data.items())
        return Problem(
            self.model_fn,
            in_precision(objective, settings.precision),
            train_data,
            val_data,
            settings=settings.plain(),
            device=where,
            metrics=self.metrics,
            own_loop=None if self.train is None else OwnLoop(self.train, (self.train_data, self.val_data), self.sweeps),
            folds=folds,
        )


def _check_explored(rule: PopulationBasedTraining, space: Mapping[str, Any]) -> None:
    """Raise ValueError if a rule would change keys that the space lacks, or keys whose values are not floats."""
    unknown = sorted(map(str, rule.explored.keys() - reachable(space).keys()))
    told = f"one whose `explored` has keys of `space`, which has no {', '.join(unknown)}"
    require(not unknown, "sweep.rule", rule, told)
    own = [name for name in rule.explored if name not in CHANGEABLE]
    fixed = [name for name in own if not all(isinstance(value, float) for value in reached(name, space))]
    told = f"one whose `explored` has floats of `space`: a copy cannot change {', '.join(fixed)}"
    require(not fixed, "sweep.rule", rule, told)


def _check_nothing_to_train(name: str, function: object) -> None:
    """Raise ValueError if a function is a module with parameters that need gradients, as nothing would train them."""
    for part, own in function.items() if isinstance(function, Mapping) else [("", function)]:
        trained = [n for n, p in own.named_parameters() if p.requires_grad] if isinstance(own, nn.Module) else []
        where = f"{name}[{part!r}]" if part else name
        rule = (
            f"a function without parameters of its own, which nothing would train, such as {trained[:1]}: put the "
            "module into the model, and have `objective` call it there; or freeze them by `requires_grad_(False)`"
        )
        require(not trained, where, type(own).__name__, rule)


def _check_objective(objective: GivenObjective, strategy: str) -> None:
    rule = "a function (no class) of (model, batch) or (model, batch, config)"
    if isinstance(objective, Mapping):
        named = bool(objective) and all(is_text(part) and part for part in objective)
        require(named, "objective", objective, f"None, {rule}, or a dict of these by names of parts of the model")
        whole = "one function with race.strategy 'fsdp': the parts of a model that ranks split cannot take turns"
        require(strategy != "fsdp", "objective", list(objective), whole)
    for part, own in objective.items() if isinstance(objective, Mapping) else [("", objective)]:
        name = f"objective[{part!r}]" if part else "objective"
        check_function(name, own, 3 if takes_config(own) else 2, rule=rule if part else f"None, or {rule}")
        settings = getattr(own, "optimizer_settings", None)
        require(
            not part or settings is None, name, own, "one without `optimizer_settings`, beside those of other parts"
        )
