"""Compute each parameter's optimizer settings from the configuration, muP's factors and the objective's settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from fusion.keys import MUON_ORIGINAL, OWN, RULES, configs_of_parts, optimizer_name
from fusion.optim import OPTIMIZERS, Hyperparameters
from hydro_rasda.common.argument_checks import require
from hydro_rasda.problem.lr_roles import asked_roles, by_parameter, roles_of
from hydro_rasda.problem.objective import Objective, OptimizerSettings
from hydro_rasda.problem.precision import as_given
from surrogate import lr_multipliers, weight_decay_multipliers

Multipliers = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Factors `multipliers[argument][optimizer][parameter]`.

The arguments are keywords of `fusion.optim.optimizer` and `fusion.fused_optimizer`.
"""


def optimizer_settings(objective: Objective, model: nn.Module, config: Mapping[str, Any]) -> OptimizerSettings:
    """Return the settings from the objective's method `optimizer_settings`; if it has none, the configuration's.

    Learning rates by role (such as `lr.head`) are expanded to learning rates by parameter.
    """
    own = getattr(as_given(objective), "optimizer_settings", None)
    settings: OptimizerSettings = OptimizerSettings(config) if own is None else own(model, config)
    if not asked_roles(settings.config, ()):
        return settings
    return replace(settings, config=by_parameter(settings.config, roles_of(model)))


def multipliers(settings: OptimizerSettings, module: nn.Module, surrogate: float) -> Multipliers:
    """Return factors of learning rates and weight decays for each optimizer: muP's factors times the objective's.

    Args:
        surrogate: The width of `module` as a ratio of the full width.

    Raises:
        ValueError: If `surrogate` is not 1 and muP has no rule for an optimizer.
    """
    own = {"lr_multipliers": settings.lr_factors, "weight_decay_multipliers": settings.weight_decay_factors}
    if surrogate == 1:
        return {name: dict.fromkeys(RULES, factors) for name, factors in own.items() if factors}
    check_rule(settings.config)
    of_mup = {"lr_multipliers": lr_multipliers, "weight_decay_multipliers": weight_decay_multipliers}
    known = (*OPTIMIZERS, MUON_ORIGINAL)
    return {name: {o: _product(rule(module, o), own[name]) for o in known} for name, rule in of_mup.items()}


def check_rule(config: Mapping[str, Any]) -> None:
    """Raise ValueError if no rule is known that scales learning rates of a configuration's optimizer with the width."""
    for part, own in configs_of_parts(config).items():
        if optimizer_name(own) == OWN and Hyperparameters.from_config(own).kind == OWN:
            rule = "of a class of torch.optim that has a name here: for others nobody knows how learning rates of "
            rule += "narrow surrogates transfer; or set `sweep=SweepConfig(surrogate=1)`"
            require(False, f"optimizer.{part}" if part else "optimizer", own["optimizer"], rule)


def _product(factors: Mapping[str, float], others: Mapping[str, float]) -> dict[str, float]:
    return {name: factors.get(name, 1.0) * others.get(name, 1.0) for name in dict.fromkeys([*factors, *others])}
