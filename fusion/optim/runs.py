"""Neighbouring members with one update rule, and the coefficients of their next step.

Shape suffixes: P trainable parameters, R members of the run. All coefficients are computed in float64, as
Python's floats are in torch.optim, and rounded once, to the parameter's type.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from fusion.optim.hyper import Hyperparameters

Coefficients = dict[str, Tensor | None]


@dataclass
class Run:
    """Members `start` to `stop` (exclusive), which share an update rule.

    Attributes:
        members: Their R hyperparameters.
        vectors: Each hyperparameter that the rule reads, as [R].
    """

    start: int
    members: Sequence[Hyperparameters]
    vectors: dict[str, Tensor]

    @property
    def stop(self) -> int:
        """The member after the last one."""
        return self.start + len(self.members)

    @property
    def adaptive(self) -> bool:
        """Whether the rule is Adam's, with two moments."""
        return self.members[0].kind != "sgd"

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the moments that the rule keeps."""
        if self.adaptive:
            return ("first", "second")
        return ("first",) if any(hp.momentum for hp in self.members) else ()

    def to(self, device: torch.device) -> None:
        """Move the vectors."""
        self.vectors = {name: vector.to(device) for name, vector in self.vectors.items()}

    def coefficients(self, lr_PR: Tensor, decay_PR: Tensor, steps_PR: Tensor, factor_R: Tensor) -> Coefficients:
        """What the update rule takes besides tensors of the parameters' shape, each [P, R], or None if unused.

        Args:
            lr_PR: Learning rates without the schedule's factor.
            decay_PR: Weight decays.
            steps_PR: Steps so far, the coming one included.
            factor_R: The schedule's factor.
        """
        rule = _adam if self.adaptive else _sgd
        return rule(self, lr_PR, decay_PR, steps_PR, factor_R)


def runs_of(members: Sequence[Hyperparameters]) -> Iterator[Run]:
    """Split members into the longest runs with one rule.

    >>> hps = [Hyperparameters(kind, lr=0.1) for kind in ("adam", "adamw", "sgd", "adam")]
    >>> [(run.start, run.stop) for run in runs_of(hps)]
    [(0, 2), (2, 3), (3, 4)]
    """
    start = 0
    for _, group in groupby(members, key=lambda hp: hp.kind == "sgd"):
        run = list(group)
        names = ("momentum", "dampening", "nesterov") if run[0].kind == "sgd" else ("beta1", "beta2", "eps")
        vectors = {n: torch.tensor([float(getattr(hp, n)) for hp in run], dtype=torch.float64) for n in names}
        for kind in ("adam", "adamw"):
            vectors[kind] = torch.tensor([float(hp.kind == kind) for hp in run], dtype=torch.float64)
        independent = [float(hp.independent_weight_decay) for hp in run]
        vectors["independent"] = torch.tensor(independent, dtype=torch.float64)
        yield Run(start, run, vectors)
        start += len(run)


def _sgd(run: Run, lr_PR: Tensor, decay_PR: Tensor, steps_PR: Tensor, factor_R: Tensor) -> Coefficients:
    momentum, nesterov = run.vectors["momentum"], run.vectors["nesterov"]
    # A member without momentum takes the gradient as it is, whatever its dampening.
    undamped = (steps_PR == 1) | (momentum == 0)
    lookahead = any(hp.nesterov for hp in run.members)
    return {
        "lr": lr_PR * factor_R,
        "weight_decay": decay_PR if any(hp.decay for hp in run.members) else None,
        "momentum": momentum.expand_as(lr_PR),
        "gain": torch.where(undamped, 1.0, 1.0 - run.vectors["dampening"]),
        "direct": nesterov.expand_as(lr_PR) if lookahead else None,
        "buffered": torch.where(nesterov > 0, momentum, 1.0).expand_as(lr_PR),
    }


def _adam(run: Run, lr_PR: Tensor, decay_PR: Tensor, steps_PR: Tensor, factor_R: Tensor) -> Coefficients:
    beta1, beta2 = run.vectors["beta1"], run.vectors["beta2"]
    lr = lr_PR * factor_R
    root = (1 - beta2**steps_PR).sqrt()
    independent = run.vectors["independent"] > 0
    shrink = 1 - torch.where(independent, factor_R, lr) * decay_PR * run.vectors["adamw"]
    return {
        "step_size": lr * root / (1 - beta1**steps_PR),
        "eps": run.vectors["eps"] * root,
        "one_minus_beta1": (1 - beta1).expand_as(lr),
        "one_minus_beta2": (1 - beta2).expand_as(lr),
        "weight_decay": decay_PR * run.vectors["adam"] if _decays(run, "adam") else None,
        "shrink": shrink if _decays(run, "adamw") else None,
    }


def _decays(run: Run, kind: str) -> bool:
    return any(hp.kind == kind and hp.decay for hp in run.members)
