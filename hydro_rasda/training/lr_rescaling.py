"""Learning rates for a global batch that grows with the workers (RASDA, section 3.2).

Each worker keeps its batch size, so that `f` times the workers make a global batch `f` times as large. The learning
rate is multiplied by `f`; after each change, a linear warm-up leads to the new rate. The paper uses `sqrt(f)` for Adam,
which trained worse for the same number of examples (`benchmarks/results/large_batch.md`). Adaptive optimizers that were
not measured there use `sqrt(f)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

from fusion.optim.parts import ByPart
from hydro_rasda.common.argument_checks import check_function, check_int, is_number, require

Rule = str | Callable[[float], float]

RULES: dict[str, Callable[[float], float]] = {"linear": float, "sqrt": math.sqrt, "none": lambda growth: 1.0}
_AUTO = {
    "SGD": "linear",
    "Adam": "linear",
    "AdamW": "linear",
    "NAdam": "sqrt",
    "RAdam": "sqrt",
    "ASGD": "linear",
    "Adadelta": "sqrt",
    "Adafactor": "sqrt",
    "Adamax": "sqrt",
    "Adagrad": "sqrt",
    "RMSprop": "sqrt",
    "Lion": "sqrt",
    "Prodigy": "sqrt",
    "ScheduleFreeAdamW": "sqrt",
    "ScheduleFreeSGD": "linear",
    **dict.fromkeys(("Muon", "MuonWithAdamW"), "sqrt"),
}

_BY_OPTIMIZER = {"auto": _AUTO, "paper": {name: "linear" if name.endswith("SGD") else "sqrt" for name in _AUTO}}


def lr_factor(growth: float, rule: Rule, optimizer: Optimizer) -> float:
    """Return the factor of a learning rate after the number of workers grew by the factor `growth`.

    Args:
        growth: Number of workers now, divided by the number at the trial's start.
        rule: "linear", "sqrt", "none", "auto", "paper", or a function of `growth`. "auto" is linear for SGD, ASGD,
            Schedule-Free SGD, Adam and AdamW, and sqrt for other adaptive optimizers. "paper" is linear for all kinds
            of SGD, and sqrt for all adaptive optimizers.
        optimizer: The rules "auto" and "paper" depend on its class. If parts of a model have several optimizers, the
            factor closest to 1 is used.

    Raises:
        ValueError: If `growth` is not a finite number >= 0, if `optimizer` is not a torch optimizer, if `rule` is
            unknown, or if "auto" or "paper" has no rule for this optimizer.
    """
    require(is_number(growth) and growth >= 0, "growth", growth, "a finite number >= 0")
    require(isinstance(optimizer, Optimizer), "optimizer", optimizer, "one of torch's optimizers")
    if isinstance(optimizer, ByPart):
        return min((lr_factor(growth, rule, part) for part in optimizer.parts.values()), key=lambda of: abs(of - 1))
    if not isinstance(rule, str):
        told = f"'auto', 'paper', one of {sorted(RULES)}, or a function of the growth"
        check_function("rule", rule, 1, rule=told)
        return float(rule(growth))
    table = _BY_OPTIMIZER.get(rule, {})
    kinds = [table[cls.__name__] for cls in type(optimizer).__mro__ if cls.__name__ in table]
    name = kinds[0] if kinds else rule
    if name in _BY_OPTIMIZER:
        kind = type(optimizer).__name__
        raise ValueError(f"`rule` is {rule!r}, but must be named for {kind}: one of {sorted(RULES)}")
    require(name in RULES, "rule", rule, f"'auto', 'paper', one of {sorted(RULES)}, or a function of the growth")
    return RULES[name](growth)


class RescaledLR:
    """Multiply an optimizer's learning rates during its steps by a factor that suits the number of workers.

    Schedules do not see the factor, because outside `optimizer.step` the learning rates are the user's own.

    When the number of workers changes, the factor goes from `start` to `target`, which `lr_factor` returns. Step `i`
    after the change, counted from 0, multiplies by `start + (target - start) * min(1, (i + 1) / warmup_steps)`.

    Args:
        growth: Number of workers now, divided by the number at the trial's start.
        rule: As in `lr_factor`.
        warmup_steps: Number of optimizer steps in which the multiplier changes to its new value; 0 for no warm-up.
        state: An earlier `state_dict`: an interrupted warm-up continues, but a new multiplier starts a new warm-up.
            None at first.

    Raises:
        ValueError: If `warmup_steps` is negative, or for the reasons of `lr_factor`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        growth: float,
        rule: Rule = "auto",
        warmup_steps: int = 0,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        check_int("warmup_steps", warmup_steps, at_least=0)
        known = state is None or (isinstance(state, Mapping) and {"start", "target", "steps", "done"} <= {*state})
        require(known, "state", state, "None, or what `state_dict` gave")
        self._start, self._target = 1.0, lr_factor(growth, rule, optimizer)
        self._steps, self._done = warmup_steps, 0
        if state is not None:
            self._resume(state)
        self._own: list[Any] = []
        optimizer.register_step_pre_hook(self._scale)
        optimizer.register_step_post_hook(self._unscale)

    @property
    def multiplier(self) -> float:
        """The factor by which the next step multiplies learning rates."""
        if self._done >= self._steps:
            return self._target
        return self._start + (self._target - self._start) * (self._done + 1) / self._steps

    def state_dict(self) -> dict[str, float]:
        return {"start": self._start, "target": self._target, "steps": self._steps, "done": self._done}

    def _resume(self, state: Mapping[str, Any]) -> None:
        if state["target"] == self._target:
            self._start, self._steps, self._done = state["start"], state["steps"], state["done"]
            return
        progress = min(1.0, state["done"] / state["steps"]) if state["steps"] else 1.0
        self._start = state["start"] + (state["target"] - state["start"]) * progress

    def _scale(self, optimizer: Optimizer, *_: Any) -> None:
        self._own = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self.multiplier

    def _unscale(self, optimizer: Optimizer, *_: Any) -> None:
        for group, lr in zip(optimizer.param_groups, self._own):
            group["lr"] = lr
        self._done += 1
