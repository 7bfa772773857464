"""Scale learning rates and weight decays of narrow models in the user's own loop, by the rules of muP.

The factors are those of `surrogate.lr_multipliers` (Tensor Programs V, table 8).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fusion.keys import MUON_ORIGINAL, OPTIMIZERS
from fusion.warn import warn
from hydro_rasda.common.argument_checks import require
from surrogate import lr_multipliers, weight_decay_multipliers

FACTOR = "lr_factor_of_width"
"""Key of an optimizer's parameter group. Its value is muP's factor of the group's learning rate."""

Factors = Mapping[str, float]


class WidthScaledRates:
    """Scale learning rates and weight decays of a worker's surrogates. Other modules keep theirs.

    Args:
        width_ratio: Width of the surrogates as a ratio of the full width; used in messages only.
    """

    def __init__(self, width_ratio: float = 1.0) -> None:
        self._width_ratio = width_ratio
        self._models: list[nn.Module] = []
        self._seen: list[Optimizer] = []

    def note(self, surrogate: nn.Module) -> None:
        """Register a surrogate, so that `groups` scales the settings of its parameters from now on."""
        self._models.append(surrogate)

    def __bool__(self) -> bool:
        """Tell whether `note` has registered a surrogate; if not, there are no learning rates to scale."""
        return bool(self._models)

    def groups(self, parameters: Any, kind: type[Optimizer], settings: Mapping[str, Any]) -> Any:
        """Return an optimizer's parameter groups with scaled learning rates and weight decays.

        Groups are split so that all parameters of a group have the same factors. If `note` has registered no surrogate,
        return the parameters as given.

        Args:
            parameters: A module, or parameters in any form that torch's optimizers accept.
            kind: The optimizer's class.
            settings: The arguments of the class. Parameter groups may override them.

        Raises:
            ValueError: If no rule is known that scales the learning rates of this class with the width.
        """
        given = [*(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)]
        if not self._models:
            return given
        rule = _rule_of(kind, settings)
        known = "a class with a name among " + ", ".join(OPTIMIZERS)
        require(rule is not None, "optimizer", kind.__name__, f"{known}, whose learning rates transfer by a known rule")
        assert rule is not None
        rates, decays = self._factors(lr_multipliers, rule), self._factors(weight_decay_multipliers, rule)
        found: list[dict[str, Any]] = []
        for group in given if given and isinstance(given[0], Mapping) else [{"params": given}]:
            members = group["params"]
            parts: dict[tuple[float, float], list[Any]] = {}
            for entry in [members] if isinstance(members, Tensor) else members:
                tensor = entry[1] if isinstance(entry, tuple) else entry
                factors = rates.get(id(tensor), ("", 1.0))[1], decays.get(id(tensor), ("", 1.0))[1]
                parts.setdefault(factors, []).append(entry)
            for (rate, decay), part in parts.items():
                scaled = {
                    name: of * _setting(kind, settings, group, name)
                    for name, of in (("lr", rate), ("weight_decay", decay))
                    if of != 1
                }
                found.append({**group, **scaled, "params": part, FACTOR: rate})
        return found

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within the context, warn of optimizers that update a surrogate with full-width learning rates."""
        hook = register_optimizer_step_pre_hook(self._look)
        try:
            yield
        finally:
            hook.remove()

    def _look(self, optimizer: Optimizer, *_: object) -> None:
        if not self._models or any(optimizer is seen for seen in self._seen):
            return
        current = {float(group["lr"]) for group in optimizer.param_groups if "lr" in group}
        if current == {0.0}:  # a warm-up begins at 0, so look at the next step
            return
        self._seen.append(optimizer)
        kind, width = type(optimizer), Fraction(self._width_ratio).limit_denominator(64)
        rule = _rule_of(kind, optimizer.defaults)
        rates = self._factors(lr_multipliers, rule or "adam")
        # Some schedulers, and loops that set `group["lr"]`, replace the rates with which the optimizer was made.
        replaced = len(current) == 1 < len({group.get(FACTOR, 1.0) for group in optimizer.param_groups})
        missed: dict[str, float] = {}
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                name, rate = rates.get(id(tensor), ("", 1.0))
                if rate != (1.0 if replaced else group.get(FACTOR, 1.0)):
                    missed[name] = rate
        if not missed:
            return
        (first, rate), more = next(iter(missed.items())), len(missed) - 1
        others = f", and {more} more parameters need other ones" * (more > 0)
        how = f"that of the full width. Make the optimizer by `worker.optimizer(model, {kind.__name__}, lr=...)`"
        if replaced:
            how = "the same, as OneCycleLR does. Let the schedule multiply the rates that `worker.optimizer` has set"
        warn(
            f"at {width} of the width, {kind.__name__} needs {rate:g} times the learning rate for `{first}`{others}. "
            f"`train` gives all of them {how}; else the sweep's best learning rate may not suit the full-size model"
        )

    def _factors(self, table: Callable[[nn.Module, str], Factors], rule: str) -> dict[int, tuple[str, float]]:
        """Map the `id` of each parameter of the registered surrogates to the parameter's name and factor.

        `table(surrogate, rule)` returns the factors by parameter name: of learning rates, or of weight decays.
        """
        found: dict[int, tuple[str, float]] = {}
        for model in self._models:
            factors = table(model, rule)
            found |= {id(p): (name, factors[name]) for name, p in model.named_parameters()}
        return found


def _rule_of(kind: type[Optimizer], settings: Mapping[str, Any]) -> str | None:
    """Return the name by which muP's table has an optimizer class or its nearest base class; None if it has neither."""
    if issubclass(kind, torch.optim.Muon):
        return "muon" if settings.get("adjust_lr_fn") == "match_rms_adamw" else MUON_ORIGINAL
    return next((name for cls in kind.__mro__ if (name := cls.__name__.lower()) in OPTIMIZERS), None)


def _setting(kind: type[Optimizer], settings: Mapping[str, Any], group: Mapping[str, Any], name: str) -> Any:
    """Return the group's own value of a setting, else the optimizer's, else the class's default (0 if it has none)."""
    parameter = inspect.signature(kind).parameters.get(name)
    default = 0.0 if parameter is None or parameter.default is inspect.Parameter.empty else parameter.default
    return group.get(name, settings.get(name, default))
