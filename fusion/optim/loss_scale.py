"""Loss scaling, so that float16 gradients do not vanish, with a separate scale for each member.

Micikevicius et al., "Mixed precision training" (2018), section 3.2, with the dynamic scale of `torch.amp.GradScaler`.
With one common scale, an overflow in one member would make all members skip the step, and the member that overflows
most often would determine the scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusion.argument_checks import check_int, check_mapping, require
from fusion.members.fused_model import FusedModel
from fusion.members.member_indices import copy_rows, member_indices, member_pairs, member_rows
from fusion.optim.clip import gradients

INITIAL, INTERVAL = 2.0**16, 2000
"""Defaults of `GradScaler`: the first scale, and the number of steps without an overflow after which it doubles."""

LARGEST = 2.0**24
"""Largest scale; its inverse is the smallest. Without bounds, the scale of a diverged member would reach 0 or inf."""


class LossScale:
    """A dynamic loss scale for each of K members; the scales stay on the device, and no step waits for them.

        scale = LossScale(K, device)
        scale.apply(loss_K).sum().backward()
        takes_K = scale.unscale(fused)              # gradients are unscaled now: clip them here
        optimizer.step(takes_K)                     # members whose gradients are not finite stay as they are
        scale.update(takes_K)

    Attributes:
        scale_K: [K], powers of two, in float32.
        steps_K: [K], steps since the last overflow or growth.
    """

    def __init__(self, K: int, device: torch.device | str = "cpu") -> None:
        check_int("K", K, at_least=1)
        self.scale_K = torch.full((K,), INITIAL, device=device)
        self.steps_K = torch.zeros(K, dtype=torch.int32, device=device)

    @property
    def K(self) -> int:  # noqa: N802
        """Return the number of members."""
        return len(self.scale_K)

    def apply(self, loss_K: Tensor) -> Tensor:
        """Multiply losses [K] by the members' scales, in float32 at least. A single member's loss may be a scalar."""
        return loss_K * self.scale_K.view(loss_K.shape)

    @torch.no_grad()
    def unscale(self, fused: FusedModel) -> Tensor:
        """Divide the members' gradients by their scales.

        Args:
            fused: The model, after `backward`.

        Returns:
            [K] of booleans: True for members whose gradients are finite. Other members' gradients are set to 0.
        """
        grads = [grad for grad in gradients(fused)[0] if grad.numel()]
        takes_K = torch.ones_like(self.scale_K, dtype=torch.bool)
        for grad in grads:
            takes_K &= torch.linalg.vector_norm(grad.reshape(len(grad), -1), math.inf, dim=1).isfinite()
        for grad in grads:
            along = (-1, *(1,) * (grad.ndim - 1))
            grad.mul_(self.scale_K.reciprocal().to(grad.dtype).view(along)).masked_fill_(~takes_K.view(along), 0.0)
        return takes_K

    @torch.no_grad()
    def unscale_module(self, module: nn.Module) -> Tensor:
        """Do the same as `unscale` for a module alone (K = 1), but do not set gradients that are not finite to 0.

        Under DDP all ranks have the same gradients, so the result is the same on all of them.
        """
        overflow = torch.zeros_like(self.scale_K)
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        if grads:
            torch._amp_foreach_non_finite_check_and_unscale_(grads, overflow, self.scale_K.reciprocal())
        return overflow == 0

    @torch.no_grad()
    def update(self, takes_K: Tensor) -> None:
        """Halve the scale of members that overflowed; double it after `INTERVAL` steps without an overflow.

        Args:
            takes_K: The result of `unscale`: False for members that overflowed.
        """
        self.steps_K += 1
        grows_K = self.steps_K >= INTERVAL
        self.scale_K *= torch.where(takes_K, torch.where(grows_K, 2.0, 1.0), 0.5)
        self.scale_K.clamp_(1 / LARGEST, LARGEST)
        self.steps_K.masked_fill_(grows_K | ~takes_K, 0)

    def keep(self, indices: Sequence[int]) -> None:
        """Drop all members but those at `indices`, in that order, as `FusedModel.keep` does."""
        chosen = member_indices(indices, self.K)
        self.scale_K, self.steps_K = member_rows(self.scale_K, chosen), member_rows(self.steps_K, chosen)

    def copy(self, sources: Mapping[int, int]) -> None:
        """Copy the scales of members to others, in place, as `FusedModel.copy` copies members."""
        targets, copied = member_pairs(sources, self.K)
        if targets:
            copy_rows(self.scale_K, targets, copied)
            copy_rows(self.steps_K, targets, copied)

    def concat(self, other: LossScale) -> None:
        """Append the scales of the members of `other`, as `FusedModel.concat` appends members."""
        require(isinstance(other, LossScale), "other", other, "a LossScale")
        self.scale_K = torch.cat([self.scale_K, other.scale_K.to(self.scale_K.device)])
        self.steps_K = torch.cat([self.steps_K, other.steps_K.to(self.steps_K.device)])

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state that `load_state_dict` restores."""
        return {"scale": self.scale_K.clone(), "steps": self.steps_K.clone()}

    def load_state_dict(self, state_dict: Mapping[str, Any], *, members: Sequence[int] | None = None) -> None:
        """Restore the result of `state_dict`.

        If `members` is given, load only these members of `state_dict`, in this order.

        Raises:
            ValueError: if the number of members differs from K.
        """
        check_mapping("state_dict", state_dict, "scale", "steps")
        K = len(state_dict["scale"])
        chosen = list(range(K)) if members is None else member_indices(members, K, "members")
        require(len(chosen) == self.K, "state_dict", f"of {len(chosen)} members", f"of {self.K}")
        self.scale_K.copy_(member_rows(state_dict["scale"], chosen))
        self.steps_K.copy_(member_rows(state_dict["steps"], chosen))
