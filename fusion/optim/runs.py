"""Neighbouring members with one update rule, and the coefficients of their next step.

Shape suffixes: R members of the run, G groups of parameters that differ in their multipliers. All coefficients are
computed in float64, as Python's floats are in torch.optim, and rounded once, to the parameter's type.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from fusion.optim.optimizer_config import Hyperparameters

Coefficients = dict[str, Tensor | None]


@dataclass
class Run:
    """Members `start` to `stop` (exclusive), which share an update rule.

    Attributes:
        members: Their R hyperparameters.
        vectors: Each hyperparameter that the rule reads, as [R, 1].
    """

    start: int
    members: Sequence[Hyperparameters]
    vectors: dict[str, Tensor]

    @property
    def stop(self) -> int:
        """Return the index after the last member."""
        return self.start + len(self.members)

    @property
    def is_muon(self) -> bool:
        """Return whether Muon updates matrices, and AdamW the rest."""
        return self.members[0].kind == "muon"

    @property
    def adaptive(self) -> bool:
        """Return whether the rule of the rows is Adam's, with two moments; Muon uses it for all but matrices."""
        return self.members[0].kind != "sgd"

    @property
    def moments(self) -> tuple[str, ...]:
        """Return the names of the moments that the rule keeps."""
        if self.adaptive:
            return ("first", "second")
        return ("first",) if any(hp.momentum for hp in self.members) else ()

    def to(self, device: torch.device) -> None:
        """Move the vectors."""
        self.vectors = {name: vector.to(device) for name, vector in self.vectors.items()}

    def constants(self, decay_RG: Tensor) -> Coefficients:
        """Return the coefficients of the update rule that never change, [R, 1] or [R, G] each, None if unused."""
        v = self.vectors
        if self.adaptive:
            return {
                "one_minus_beta1": 1 - v["beta1"],
                "one_minus_beta2": 1 - v["beta2"],
                "weight_decay": decay_RG * v["adam"] if self._decays("adam") else None,
            }
        lookahead = any(hp.nesterov for hp in self.members)
        return {
            "weight_decay": decay_RG if self._decays("sgd") else None,
            "momentum": v["momentum"],
            "direct": v["nesterov"] if lookahead else None,
            "buffered": torch.where(v["nesterov"] > 0, v["momentum"], 1.0),
        }

    def coefficients(self, lr_RG: Tensor, decay_RG: Tensor, steps_R1: Tensor, factor_R1: Tensor) -> Coefficients:
        """Return the other coefficients, which change from step to step, in the same shapes.

        Args:
            lr_RG: Learning rates without the schedule's factor.
            decay_RG: Weight decays that are decoupled, 0 for other members.
            steps_R1: Steps so far, the coming one included.
            factor_R1: The schedule's factor.
        """
        v, lr = self.vectors, lr_RG * factor_R1
        if not self.adaptive:
            # A member without momentum takes the gradient as it is; its dampening has no effect.
            undamped = (steps_R1 == 1) | (v["momentum"] == 0)
            return {"lr": lr, "gain": torch.where(undamped, 1.0, 1.0 - v["dampening"])}
        root = (1 - v["beta2"] ** steps_R1).sqrt()
        shrink = None
        if self._decays("adamw"):
            independent = any(hp.independent_weight_decay for hp in self.members)
            rate = torch.where(v["independent"] > 0, factor_R1, lr) if independent else lr
            shrink = 1 - rate * decay_RG
        return {
            "step_size": lr * root / (1 - v["beta1"] ** steps_R1),
            "eps": v["eps"] * root,
            "shrink": shrink,
        }

    def _decays(self, kind: str) -> bool:
        return any(_adam_of(hp) == kind and hp.decay for hp in self.members)


def _adam_of(hp: Hyperparameters) -> str:
    """Return the rule of the rows: beside Muon it is AdamW's."""
    return "adamw" if hp.kind == "muon" else hp.kind


def _rule(hp: Hyperparameters) -> str:
    """Return the value that members must share to be updated together; empty if torch updates the member."""
    return {"adam": "adaptive", "adamw": "adaptive"}.get(hp.kind, hp.kind) if hp.is_vectorized else ""


_READ = {
    "sgd": ("momentum", "dampening", "nesterov"),
    "adaptive": ("beta1", "beta2", "eps"),
    "muon": ("beta1", "beta2", "eps", "momentum", "nesterov"),
}
"""Hyperparameters that a rule reads from vectors."""


def runs_of(members: Sequence[Hyperparameters]) -> Iterator[Run]:
    """Split members into the longest runs with one rule; those that torch updates are left out.

    >>> hps = [Hyperparameters(kind, lr=0.1) for kind in ("adam", "adamw", "sgd", "adam")]
    >>> [(run.start, run.stop) for run in runs_of(hps)]
    [(0, 2), (2, 3), (3, 4)]
    """
    start = 0
    for rule, group in groupby(members, key=_rule):
        run = list(group)
        if not rule:
            start += len(run)
            continue
        columns = {name: [float(getattr(hp, name)) for hp in run] for name in _READ[rule]}
        for kind in ("adam", "adamw"):
            columns[kind] = [float(_adam_of(hp) == kind) for hp in run]
        columns["independent"] = [float(hp.independent_weight_decay) for hp in run]
        vectors = {name: torch.tensor(column, dtype=torch.float64)[:, None] for name, column in columns.items()}
        yield Run(start, run, vectors)
        start += len(run)
