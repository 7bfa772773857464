"""Runs of adjacent members that share an update rule, and the coefficients of their next step.

Shape suffixes: R members of the run, G groups of parameters with equal multipliers.
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
    """Adjacent members (a run), from `start` to `stop` (exclusive), that share an update rule.

    Attributes:
        members: The hyperparameters of the R members.
        vectors: [R, 1] each: the hyperparameters that the rule reads, and the members' learned numbers.
    """

    start: int
    members: Sequence[Hyperparameters]
    vectors: dict[str, Tensor]

    @property
    def stop(self) -> int:
        """Return the index of the last member plus 1."""
        return self.start + len(self.members)

    @property
    def kind(self) -> str:
        """Return the name of the first member's optimizer. A run may mix Adam and AdamW."""
        return self.members[0].kind

    @property
    def rule(self) -> UpdateRule:
        """Return the rule for parameters that are updated element by element; with Muon, those that AdamW updates."""
        return UPDATE_RULES[RULE_OF[self.kind]]

    @property
    def moments(self) -> tuple[str, ...]:
        """Return the names of the moments that these members keep from step to step.

        If the rule has no beta1, it keeps a first moment only if a member has momentum.
        """
        has_first = "beta1" in self.rule.reads or any(hp.momentum for hp in self.members)
        return tuple(name for name in self.rule.moments if name != "first" or has_first)

    def to(self, device: torch.device) -> None:
        """Move the vectors to a device."""
        self.vectors = {name: vector.to(device) for name, vector in self.vectors.items()}

    @torch.no_grad()
    def average(self, values: Tensor, iterate: Tensor, steps_K: Tensor) -> Tensor:
        """Return the averaged weights [R, ...] for evaluation of Schedule-Free members, as in `ScheduleFree.eval`.

        Args:
            values: A parameter of all K members, in training.
            iterate: The sequence z of this parameter, see `fusion.optim.schedule_free`.
            steps_K: The number of steps of this parameter.
        """
        own = slice(self.start, self.stop)
        of_average_R = steps_K.new_tensor([hp.average_share for hp in self.members])
        precise = values[own].to(torch.promote_types(values.dtype, torch.float32))
        # Before its first step, a member has no average yet, so its weights stay as they are.
        share_R = torch.where(steps_K[own] > 0, 1 - 1 / of_average_R, 0.0)
        return torch.lerp(precise, iterate[own].to(precise), wide(share_R, precise))

    def constants(self, decay_RG: Tensor) -> Coefficients:
        """Return the coefficients of the rule that never change, [R, 1] or [R, G] each; None for unused ones."""
        couples = any(hp.decay and not hp.decouples for hp in self.members)
        coupled_RG = decay_RG * (1 - self.vectors["decouples"]) if couples else None
        return {**self.rule.constants(self.members, self.vectors), "weight_decay": coupled_RG}

    def coefficients(
        self, lr_RG: Tensor, decay_RG: Tensor, steps_R1: Tensor, factor_R1: Tensor, *, before: bool = False
    ) -> Coefficients:
        """Return the coefficients that change from step to step, [R, 1] or [R, G] each.

        Args:
            before: If True, return those for the pass before the update.
            lr_RG: Learning rates without the schedule's factor.
            decay_RG: Weight decays if they are decoupled; 0 for members with coupled ones.
            steps_R1: Number of steps, including the one that is about to be taken.
            factor_R1: The schedule's factor.
        """
        now = Now(lr_RG * factor_R1, decay_RG, steps_R1, factor_R1)
        if before:
            assert self.rule.before is not None
            return self.rule.before[0](self.members, self.vectors, now)
        return self.rule.coefficients(self.members, self.vectors, now)


def wide(values_R: Tensor, like: Tensor) -> Tensor:
    """Shape values [R] as [R, 1, ...], to broadcast with `like` [R, ...], in its dtype and on its device."""
    return values_R.to(like).view(-1, *[1] * (like.dim() - 1))


def runs_of(members: Sequence[Hyperparameters]) -> Iterator[RuleMembers]:
    """Split members into the longest runs of adjacent members with one rule. Members that torch updates are skipped.

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
