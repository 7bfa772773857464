"""The request to `tune`: its functions, space and data, checked together before any work."""

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
from hydro_rasda.data import Batches, Data, Folds, Splitter, is_splitter, make_batches, make_folds
from hydro_rasda.heats.search import check_first, check_searcher, named_searcher, prepare
from hydro_rasda.problem.metrics import WholeMetrics
from hydro_rasda.problem.objective import LossFn, as_objective, takes_config
from hydro_rasda.problem.objective_parts import GivenObjective
from hydro_rasda.problem.precision import in_precision
from hydro_rasda.problem.problem import OwnLoop, Problem
from hydro_rasda.problem.width_argument import check_depth_argument, check_second_argument, check_width_argument
from hydro_rasda.run.identity import Identity
from hydro_rasda.run.pickling import pickle_config_modules
from hydro_rasda.schedulers.named_rules import POPULATION
from hydro_rasda.schedulers.population import PopulationBasedTraining
from hydro_rasda.settings.config import TuneConfig
from hydro_rasda.settings.objectives import functions_of
from hydro_rasda.space.branches import reachable
from hydro_rasda.space.space import check_space, explored

if TYPE_CHECKING:
    from ray.tune.search import Searcher


@dataclass(frozen=True)
class Request:
    """The arguments of `tune` that say what is tuned, by their names there."""

    model_fn: Callable[..., nn.Module]
    space: Mapping[str, Any]
    train_data: Data
    val_data: Data | Splitter
    loss_fn: LossFn | None
    objective: GivenObjective | None
    metrics: WholeMetrics | None
    settings: TuneConfig

    def check(self) -> None:
        """Refuse what no later step would refuse before work starts."""
        rule = "a function of (config) or (config, width_ratio)"
        if isinstance(self.model_fn, nn.Module):  # it could be called, but with inputs
            kind = type(self.model_fn).__name__
            raise ValueError(f"`model_fn` is a model, a {kind}, but must be {rule} that builds one")
        check_function("model_fn", self.model_fn, 1, 2, rule=rule, or_class=True)
        sweep, race = self.settings.sweep, self.settings.race
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
        check_space(self.space, self.settings.num_samples, race.strategy)
        check_second_argument(self.model_fn, reachable(self.space))
        if sweep.rule == POPULATION:
            explored(self.space)
        if isinstance(sweep.rule, PopulationBasedTraining):
            unknown = [*sweep.rule.explored.keys() - reachable(self.space).keys()]
            told = f"one whose `explored` has keys of `space`, which has no {', '.join(map(str, sorted(unknown)))}"
            require(not unknown, "sweep.rule", sweep.rule, told)
        if isinstance(sweep.searcher, str):
            self.searcher()
        elif sweep.searcher is not None:
            check_searcher(sweep.searcher)
        check_first(sweep.first, self.space)
        if self.folds is not None:
            replace(self.settings, folds=len(self.folds))  # refuses what does not go together with folds

    @property
    def data(self) -> dict[str, Data]:
        """The data, by argument; folds are recognized by the indices of their examples."""
        folds = self.folds
        val_data: Any = self.val_data if folds is None else folds.indices()
        return {"train_data": self.train_data, "val_data": val_data}

    @cached_property
    def folds(self) -> Folds | None:
        """The folds of the training data, if `val_data` is a splitter; on the CPU."""
        if not is_splitter(self.val_data):
            return None
        seed = self.settings.seed
        train_data = self._batches("train_data", self.train_data, torch.device("cpu"))
        return make_folds(self.val_data, self.train_data, train_data, seed)

    def _batches(self, name: str, data: Data, where: torch.device) -> Batches:
        return make_batches(data, name, where, self.settings.seed, self.settings.loader_workers)

    def identity(self) -> Identity:
        """The identity of the run, noted before any code of the user is called."""
        functions: dict[str, Any] = {
            "model_fn": self.model_fn,
            "loss_fn" if self.objective is None else "objective": self.objective or self.loss_fn or F.cross_entropy,
            "metrics": self.metrics,
            "full_size": self.settings.race.train,
        }
        given = {name: function for name, function in functions.items() if function is not None}
        sweep = self.settings.sweep
        return Identity(self.space, sweep.searcher, sweep.rule, given, sweep.first, functions_of(sweep.constraints))

    def searcher(self) -> Searcher | None:
        """A copy that knows the space and will learn: the user's own can begin the same run again, or another."""
        asked = self.settings.sweep.searcher
        if isinstance(asked, str):
            return named_searcher(asked, self.space, self.settings)
        searcher = copy.deepcopy(asked)
        if searcher is not None:
            prepare(searcher, self.space, self.settings.comparison.objectives)
        return searcher

    def problem(self, backend: Backend) -> Problem:
        pickle_config_modules()
        objective = as_objective(self.objective, self.loss_fn or F.cross_entropy, self.metrics is not None)
        settings, where, train = self.settings, backend.device, self.settings.race.train
        folds = None if self.folds is None else self.folds.on(where)
        train_data: Batches
        val_data: Batches
        if folds is not None:
            settings = replace(settings, folds=len(folds))
            train_data, val_data = folds.data(0, settings.seed)
        if settings.models("target") > 1:  # a device trains all of a finalist's models
            settings = replace(settings, race=replace(settings.race, max_workers=1))
        if folds is None:
            train_data, val_data = (self._batches(name, data, where) for name, data in self.data.items())
        return Problem(
            self.model_fn,
            in_precision(objective, settings.precision),
            train_data,
            val_data,
            settings=settings.plain(),
            device=where,
            metrics=self.metrics,
            full_size=None if train is None else OwnLoop(train, tuple(self.data.values())),
            folds=folds,
        )


def _check_nothing_to_train(name: str, function: object) -> None:
    """Refuse a module with parameters that need gradients in the place of a function: nothing would train them."""
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
