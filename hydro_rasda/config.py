"""What a run is asked to do, as frozen values that are checked when they are made."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Mode = Literal["min", "max"]
Keep = Literal["last", "best"]

MODES: tuple[str, ...] = ("min", "max")
KEEP: tuple[str, ...] = ("last", "best")
RESUME: tuple[str, ...] = ("auto", "must", "never", "changed")
BACKENDS: tuple[str, ...] = ("local", "ray")
LR_RULES: tuple[str, ...] = ("auto", "linear", "sqrt", "none")


def require(holds: bool, argument: str, value: object, rule: str) -> None:
    """Raise the one form of error that bad input gets: argument, value, rule.

    Raises:
        ValueError: where `holds` is false.
    """
    if not holds:
        raise ValueError(f"`{argument}` is {value!r}, but must be {rule}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class RASDAConfig:
    """How the full-size trials of the last stage are halved (RASDA, Aach et al. 2024, Sec. 3).

    Attributes:
        grace_period: Epochs that every full-size trial gets before the first halving; None: a quarter of `max_t`.
        reduction_factor: The paper's rf: one in this many goes on at each milestone.
        scaling_factor: The paper's sf: milestones lie at `grace_period * sf**k`; on several workers, each survivor
            gets sf times the workers.
        workers: Workers of a full-size trial before its first milestone; they share the configuration's batch.
        max_workers: No trial gets more; None for as many as the cluster holds.
        lr_rule: What the learning rate is multiplied by where the workers, and with them the global batch, grow by f
            (Sec. 3.2): "linear" f, "sqrt" its root, "none" 1, a function of f; "auto" linear for SGD, sqrt for Adam.
    """

    grace_period: int | None = None
    reduction_factor: int = 2
    scaling_factor: int = 2
    workers: int = 1
    max_workers: int | None = None
    lr_rule: Literal["auto", "linear", "sqrt", "none"] | Callable[[float], float] = "auto"

    def __post_init__(self) -> None:
        g = self.grace_period
        require(g is None or (_is_int(g) and g >= 1), "rasda.grace_period", g, "None or an integer >= 1 (epochs)")
        for name in ("reduction_factor", "scaling_factor"):
            value = getattr(self, name)
            require(_is_int(value) and value >= 2, f"rasda.{name}", value, "an integer >= 2")
        base, most, rule = self.workers, self.max_workers, self.lr_rule
        require(_is_int(base) and base >= 1, "rasda.workers", base, "an integer >= 1")
        holds = most is None or (_is_int(most) and most >= base)
        require(holds, "rasda.max_workers", most, f"None or an integer >= rasda.workers ({base})")
        require(callable(rule) or rule in LR_RULES, "rasda.lr_rule", rule, f"one of {LR_RULES}, or a function")


@dataclass(frozen=True)
class TuneConfig:
    """The scalar arguments of `tune`, documented there."""

    metric: str = "val_loss"
    mode: Mode = "min"
    num_samples: int = 64
    max_t: int = 27
    grace_period: int = 1
    reduction_factor: int = 3
    top_k: int = 4
    surrogate: float = 1 / 8
    fusion: int | Literal["auto"] = "auto"
    check_transfer: bool = False
    rasda: RASDAConfig = RASDAConfig()
    keep: Keep = "last"
    checkpoint_every: int | None = None
    time_budget_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        require(isinstance(self.metric, str) and bool(self.metric), "metric", self.metric, "the name of a metric")
        require(self.mode in MODES, "mode", self.mode, f"one of {MODES}")
        for name in ("num_samples", "max_t", "grace_period", "top_k"):
            value = getattr(self, name)
            require(_is_int(value) and value >= 1, name, value, "an integer >= 1")
        require(self.grace_period <= self.max_t, "grace_period", self.grace_period, f"<= max_t ({self.max_t})")
        rf = self.reduction_factor
        require(_is_int(rf) and rf >= 2, "reduction_factor", rf, "an integer >= 2")
        ratio = self.surrogate
        require(_is_number(ratio) and 0 < ratio <= 1, "surrogate", ratio, "a width ratio in (0, 1]")
        width = self.fusion
        require(width == "auto" or (_is_int(width) and width >= 1), "fusion", width, '"auto" or an integer >= 1')
        require(isinstance(self.rasda, RASDAConfig), "rasda", self.rasda, "a RASDAConfig")
        g = self.rasda.grace_period
        require(g is None or g <= self.max_t, "rasda.grace_period", g, f"<= max_t ({self.max_t})")
        require(self.keep in KEEP, "keep", self.keep, f"one of {KEEP}")
        every = self.checkpoint_every
        require(every is None or (_is_int(every) and every >= 1), "checkpoint_every", every, "None or epochs >= 1")
        budget = self.time_budget_s
        require(
            budget is None or (_is_number(budget) and budget > 0),
            "time_budget_s",
            budget,
            "None or seconds > 0",
        )
        require(_is_int(self.seed) and self.seed >= 0, "seed", self.seed, "an integer >= 0")

    @property
    def full_grace_period(self) -> int:
        """Epochs of the full-size stage's first rung: `rasda.grace_period`, or a quarter of `max_t`."""
        return self.rasda.grace_period or max(1, self.max_t // 4)

    def determining(self) -> dict[str, Any]:
        """The settings on which a run's decisions depend, as plain values: all but the limits on its cost."""
        values = asdict(self)
        del values["time_budget_s"], values["checkpoint_every"]
        return values
