"""Updates of all members of a run (adjacent members with one rule) at once, on any device.

The parameters of each member fill one row of a matrix, see `fusion.members.rows`.

Shape suffixes: K members, R of them in the run, B of them in a chunk. A member has N elements, n of them in a segment.
The segment has P parameters, in G groups of adjacent parameters with equal multipliers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, groupby, pairwise

import torch
from torch import Tensor

from fusion.members.bounded_cache import kept
from fusion.optim import elementwise, native
from fusion.optim.members_by_rule import RuleMembers
from fusion.optim.segments import Segment, chunk
from fusion.optim.update_rules import Coefficients


class Tile:
    """Updates the parameters of one segment in the members of one run.

    Args:
        lr_RP: Learning rates without the schedule's factor, on the CPU.
        decay_RP: Weight decays, on the CPU.
    """

    def __init__(
        self, run: RuleMembers, segment: Segment, lr_RP: Tensor, decay_RP: Tensor, device: torch.device
    ) -> None:
        self.run, self.segment = run, segment
        # A complex number counts as two elements, because its real and imaginary part are updated separately.
        self._reals = 2 if segment.block.dtype.is_complex else 1
        alike = list(zip(lr_RP.T.tolist(), decay_RP.T.tolist()))
        groups = [[i for i, _ in group] for _, group in groupby(enumerate(alike), key=lambda pair: pair[1])]
        first = [group[0] for group in groups]
        self._lr_RG, decay_RG = lr_RP[:, first].to(device), decay_RP[:, first].to(device)
        self._decoupled_RG = decay_RG * run.vectors["decouples"]
        self._widths = [self._reals * sum(segment.sizes[i] for i in group) for group in groups]
        self._decay_RG = decay_RP[:, first].tolist()
        self._views: dict[tuple[int, ...], list[native.Views]] = {}
        self._group_n: Tensor | None = None
        if len(groups) > 1 and device.type != "cpu":
            self._group_n = torch.arange(len(groups)).repeat_interleave(torch.tensor(self._widths)).to(device)
        self._math = _math_dtype(segment.block.dtype)
        self._constants = self._rounded(run.constants(decay_RG))

    @torch.no_grad()
    def update(
        self,
        stored: Sequence[Tensor],
        steps_K1: Tensor,
        factor_K1: Tensor,
        takes_K1: Tensor | None = None,
        *,
        before: bool = False,
    ) -> Tensor | None:
        """Update the segment's parameters of the run's members by their rule, in place.

        Args:
            stored: Parameters, gradients and moments, [K, N] each.
            steps_K1: Number of steps, including this one.
            factor_K1: The schedule's factor.
            takes_K1: True for members that take the step; None for all.
            before: If True, run the rule's pass before the update instead, and return its sums [R, ...].
        """
        run, segment = self.run, self.segment
        stored = [torch.view_as_real(t).flatten(1) if t.is_complex() else t for t in stored]
        own = [_rows(t, run.start, run.stop) for t in (steps_K1, factor_K1)]
        changing = run.coefficients(self._lr_RG, self._decoupled_RG, *own, before=before)
        coefficients = {**self._constants, **self._rounded(changing)}
        if takes_K1 is not None:
            coefficients = elementwise.for_those(_rows(takes_K1, run.start, run.stop), coefficients)
        start, stop = self._reals * segment.start, self._reals * segment.stop
        tensors = [_columns(_rows(t, run.start, run.stop), start, stop) for t in stored]
        R, n = tensors[0].shape
        step, sums = max(1, chunk(tensors[0].device) // max(1, n)), []
        for start in range(0, R, step):
            stop = min(start + step, R)
            inside = {
                name: None if c is None else self._wide(_rows(c, start, stop)) for name, c in coefficients.items()
            }
            sums.append(self._apply([_rows(t, start, stop) for t in tensors], inside, before))
        return torch.cat([found for found in sums if found is not None]) if before else None

    @property
    def worth_a_call(self) -> bool:
        """Return whether members have enough elements for a separate call of torch's kernel for each member."""
        return sum(self._widths) >= native.LEAST_PER_CALL * len(self._widths)

    @torch.no_grad()
    def update_in_turn(
        self, stored: Sequence[Tensor], steps_K1: Tensor, factor_K1: Tensor, takes_K1: Tensor | None = None
    ) -> None:
        """Apply the rule as `update` does, but by torch's CPU kernels, one member after another."""
        own = slice(self.run.start, self.run.stop)
        steps_R, factors_R = steps_K1[own, 0].tolist(), factor_K1[own, 0].tolist()
        lr_RG = (self._lr_RG * factor_K1[own]).tolist()
        takes_R = [True] * len(steps_R) if takes_K1 is None else takes_K1[own, 0].tolist()
        groups = kept(self._views, tuple(t.data_ptr() for t in stored), lambda: self._views_of(stored))
        for g, views in enumerate(groups):
            for r, (hp, tensors) in enumerate(zip(self.run.members, views)):
                if takes_R[r]:
                    native.update(hp, tensors, lr_RG[r][g], self._decay_RG[r][g], steps_R[r], factors_R[r])

    def _views_of(self, stored: Sequence[Tensor]) -> list[native.Views]:
        """Return the members' views of `stored` for each group of parameters."""
        own = slice(self.run.start, self.run.stop)
        columns = pairwise(accumulate(self._widths, initial=self.segment.start))
        return [native.views_of([[t[own, start:stop]] for t in stored]) for start, stop in columns]

    def _rounded(self, coefficients: Coefficients) -> Coefficients:
        return {name: c if c is None or c.shape[1] > 1 else c.to(self._math) for name, c in coefficients.items()}

    def _wide(self, coefficient: Tensor) -> Tensor:
        """Expand a coefficient [B, G] to [B, n]: each group's value fills the group's columns. Keep [B, 1] as it is."""
        if coefficient.shape[1] == 1:
            return coefficient
        if self._group_n is not None:
            return coefficient.to(self._math).index_select(1, self._group_n)
        # On a CPU, copies are several times as fast as `index_select`.
        wide = coefficient.new_empty(len(coefficient), sum(self._widths), dtype=self._math)
        torch._foreach_copy_(wide.split(self._widths, 1), coefficient.split(1, 1))
        return wide

    def _apply(self, stored: Sequence[Tensor], coefficients: Coefficients, before: bool) -> Tensor | None:
        """Apply the rule to a chunk of members, [B, n] each, in the precision of the coefficients."""
        tensors = [t if t.dtype == self._math else t.to(self._math) for t in stored]
        decays = (coefficients.pop(name, None) for name in ("shrink", "weight_decay"))
        tensors[1] = elementwise.decayed(*tensors[:2], *decays)
        rule = self.run.rule
        apply: Callable[..., Tensor | None] | None = rule.before[1] if before and rule.before else rule.update
        assert apply is not None
        sums = apply(*tensors, **coefficients)
        if stored[0].dtype != self._math:
            for target, value in zip([stored[0], *stored[2:]], [tensors[0], *tensors[2:]], strict=True):
                target.copy_(value)
        return sums


def _rows(t: Tensor, start: int, stop: int) -> Tensor:
    return t if stop - start == t.shape[0] else t[start:stop]


def _columns(t: Tensor, start: int, stop: int) -> Tensor:
    return t if stop - start == t.shape[1] else t[:, start:stop]


def _math_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the precision of updates: at least float32, because 1 - lr * weight_decay would be 1 in half precision."""
    real = dtype.to_real() if dtype.is_complex else dtype
    return torch.float32 if real in (torch.bfloat16, torch.float16) else real
