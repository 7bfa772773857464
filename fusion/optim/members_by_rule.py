"""Neighbouring members with one update rule, and the coefficients of their next step.

Shape suffixes: R members of the run, G groups of parameters that differ in their multipliers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from fusion.optim.optimizer_config import Hyperparameters
from fusion.optim.update_rules import RULE_OF, UPDATE_RULES, Coefficients, Now, UpdateRule


@dataclass
class RuleMembers:
    """Members `start` to `stop` (exclusive), which share an update rule.

    Attributes:
        members: Their R hyperparameters.
        vectors: Each hyperparameter that the rule reads, as [R, 1], and what the members have learned.
    """

    start: int
    members: Sequence[Hyperparameters]
    vectors: dict[str, Tensor]

    @property
    def stop(self) -> int:
        """Return the index after the last member."""
        return self.start + len(self.members)

    @property
    def kind(self) -> str:
        """Return the name of the members' optimizer, or of that of the first where one rule has two."""
        return self.members[0].kind

    @property
    def rule(self) -> UpdateRule:
        """Return the rule of the rows; for Muon it is that of all but matrices."""
        return UPDATE_RULES[RULE_OF[self.kind]]

    @property
    def moments(self) -> tuple[str, ...]:
        """Return the names of the moments that the rule keeps: without beta1, a first one needs momentum."""
        has_first = "beta1" in self.rule.reads or any(hp.momentum for hp in self.members)
        return tuple(name for name in self.rule.moments if name != "first" or has_first)

    def to(self, device: torch.device) -> None:
        """Move the vectors."""
        self.vectors = {name: vector.to(device) for name, vector in self.vectors.items()}

    @torch.no_grad()
    def average(self, values: Tensor, iterate: Tensor, steps_K: Tensor) -> Tensor:
        """Return the weights [R, ...] to evaluate of Schedule-Free members, as `ScheduleFree.eval` does.

        Args:
            values: A parameter of all members in training.
            iterate: Its z.
            steps_K: Its steps so far.
        """
        own = slice(self.start, self.stop)
        of_average_R = steps_K.new_tensor([hp.average_share for hp in self.members])
        precise = torch.promote_types(values.dtype, torch.float32)
        # Before the first step, there is no z.
        share_R = torch.where(steps_K[own] > 0, 1 - 1 / of_average_R, 0.0)
        share = share_R.to(precise).view(-1, *[1] * (values.dim() - 1))
        return torch.lerp(values[own].to(precise), iterate[own].to(precise), share)

    def constants(self, decay_RG: Tensor) -> Coefficients:
        """Return the coefficients of the update rule that never change, [R, 1] or [R, G] each, None if unused."""
        couples = any(hp.decay and not hp.decouples for hp in self.members)
        coupled_RG = decay_RG * (1 - self.vectors["decouples"]) if couples else None
        return {**self.rule.constants(self.members, self.vectors), "weight_decay": coupled_RG}

    def coefficients(
        self, lr_RG: Tensor, decay_RG: Tensor, steps_R1: Tensor, factor_R1: Tensor, *, before: bool = False
    ) -> Coefficients:
        """Return the other coefficients, which change from step to step, in the same shapes.

        Args:
            before: If True, those of the pass before the update.
            lr_RG: Learning rates without the schedule's factor.
            decay_RG: Weight decays that are decoupled, 0 for other members.
            steps_R1: Steps so far, the coming one included.
            factor_R1: The schedule's factor.
        """
        now = Now(lr_RG * factor_R1, decay_RG, steps_R1, factor_R1)
        if before:
            assert self.rule.before is not None
            return self.rule.before[0](self.members, self.vectors, now)
        return self.rule.coefficients(self.members, self.vectors, now)


def runs_of(members: Sequence[Hyperparameters]) -> Iterator[RuleMembers]:
    """Split members into the longest runs with one rule; those that torch updates are left out.

    >>> hps = [Hyperparameters(kind, lr=0.1) for kind in ("adam", "adamw", "sgd", "adam")]
    >>> [(run.start, run.stop) for run in runs_of(hps)]
    [(0, 2), (2, 3), (3, 4)]
    """
    start = 0
    for rule, group in groupby(members, key=lambda hp: RULE_OF[hp.kind] if hp.is_vectorized else None):
        run = list(group)
        if rule is not None:
            columns = {name: [float(getattr(hp, name)) for hp in run] for name in UPDATE_RULES[rule].reads}
            columns["decouples"] = [float(hp.decouples) for hp in run]
            columns["independent"] = [float(hp.independent_weight_decay) for hp in run]
            vectors = {name: torch.tensor(column, dtype=torch.float64)[:, None] for name, column in columns.items()}
            yield RuleMembers(start, run, vectors)
        start += len(run)
