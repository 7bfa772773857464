"""The hyperparameters of one optimizer, read from a configuration in one place for fused and single
training."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

OPTIMIZERS = ("sgd", "adam", "adamw")


@dataclass(frozen=True)
class Hyperparameters:
    """One member's optimizer; defaults are those of `torch.optim`.

    Attributes:
        kind: "sgd", "adam" or "adamw".
        lr: learning rate, >= 0.
        momentum: of SGD, >= 0.
        dampening: of SGD: the gradient enters the momentum times `1 - dampening`.
        nesterov: of SGD; needs momentum > 0 and dampening 0.
        weight_decay: >= 0; added to the gradient by sgd and adam (coupled), taken off the weights by adamw.
            None stands for torch's default: 0.01 for adamw, else 0.
        beta1: of Adam, in [0, 1).
        beta2: of Adam, in [0, 1).
        eps: of Adam, >= 0.
        independent_weight_decay: adamw takes `weight_decay` times the schedule's factor off the weights, not
            times the learning rate, so that the two can be tuned apart (Wortsman et al. 2023,
            arXiv:2309.14322).
    """

    kind: str
    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float | None = None
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    independent_weight_decay: bool = False

    def __post_init__(self) -> None:
        if self.kind not in OPTIMIZERS:
            raise ValueError(f"optimizer is {self.kind!r}, but must be one of {', '.join(OPTIMIZERS)}")
        if self.weight_decay is None:
            object.__setattr__(self, "weight_decay", 0.01 if self.kind == "adamw" else 0.0)
        for name in ("lr", "momentum", "weight_decay", "eps"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be >= 0")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be in [0, 1)")
        if self.nesterov and not (self.momentum > 0 and self.dampening == 0):
            given = f"they are {self.momentum} and {self.dampening}"
            raise ValueError(f"nesterov needs momentum > 0 and dampening 0, but {given}")
        if self.independent_weight_decay and self.kind != "adamw":
            raise ValueError(f"independent_weight_decay is for adamw, but optimizer is {self.kind!r}")

    @property
    def decay(self) -> float:
        """The weight decay, torch's default filled in."""
        assert self.weight_decay is not None
        return self.weight_decay

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Hyperparameters":
        """Read `optimizer` (default adamw) and the fields above from a configuration; other keys are ignored.

        Raises:
            ValueError: if `lr` is missing, or a value is out of range.

        >>> Hyperparameters.from_config({"optimizer": "sgd", "lr": 0.1, "width": 64}).lr
        0.1
        """
        if "lr" not in config:
            raise ValueError("config has no key 'lr', the learning rate")
        read = {f.name: _number(f.name, config[f.name]) for f in fields(cls)[1:] if f.name in config}
        return cls(kind=config.get("optimizer", "adamw"), **read)


def _number(name: str, value: Any) -> Any:
    try:
        return bool(value) if name in ("nesterov", "independent_weight_decay") else float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {value!r}, but must be a number") from None
