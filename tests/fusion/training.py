"""Members of a fused model beside the same modules alone: trained step by step, and compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from fusion import FusedModel, clip_grad_norm_, fused_optimizer
from fusion.members.rows import make_dense
from fusion.optim import optimizer

Close = Callable[..., None]
"""Compares as `torch.testing.assert_close`, which may have other tolerances."""


class Both:
    """A fused model and its modules, which stand for the members alone, each with the optimizer of its configuration.

    Attributes:
        models: The modules of the present members.
        alone: Their optimizers.
    """

    def __init__(
        self,
        fused: FusedModel,
        models: Sequence[nn.Module],
        configs: Sequence[Mapping[str, Any]],
        objective: Callable[[Any, Any], Tensor],
    ) -> None:
        self.fused, self.models, self.objective = fused, list(models), objective
        self.opt = fused_optimizer(fused, configs)
        self.alone = [optimizer(*pair) for pair in zip(models, configs, strict=True)]

    def step(
        self, batch: Any, clip: float | None = None, *, set_to_none: bool = True, close: Close = assert_close
    ) -> None:
        """Train all for a step, whose losses must be equal; norms of gradients are clipped to `clip`."""
        self.opt.zero_grad(set_to_none)
        loss_K = self.fused.map(self.objective, batch)
        loss_K.sum().backward()
        if clip is not None:
            clip_grad_norm_(self.fused, clip)
        self.opt.step()
        losses = [self._alone(*pair, batch, clip, set_to_none) for pair in zip(self.models, self.alone, strict=True)]
        close(loss_K.detach(), torch.stack(losses))

    def _alone(
        self, model: nn.Module, own: torch.optim.Optimizer, batch: Any, clip: float | None, set_to_none: bool
    ) -> Tensor:
        own.zero_grad(set_to_none)
        loss = self.objective(model, batch)
        loss.backward()
        if clip is not None:
            make_dense(model.parameters())
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        own.step()
        return loss.detach()

    def keep(self, indices: Sequence[int]) -> None:
        for part in (self.fused, self.opt):
            part.keep(indices)
        self.models, self.alone = [self.models[k] for k in indices], [self.alone[k] for k in indices]

    def assert_equal(self, close: Close = assert_close) -> None:
        assert_same_states(self.fused, self.models, close)


def assert_same_states(fused: FusedModel, models: Sequence[nn.Module], close: Close = assert_close) -> None:
    """Parameters and buffers of each member are those of its module."""
    for k, model in enumerate(models):
        close(dict(fused.unfuse(k).state_dict()), dict(model.state_dict()))


def assert_same_gradients(fused: FusedModel, models: Sequence[nn.Module], close: Close = assert_close) -> None:
    """Each member has the gradients that its module has; where that has none, the member's do not count."""
    assert any(p.grad is not None for model in models for p in model.parameters())
    for k, model in enumerate(models):
        for name, p in model.named_parameters():
            if p.grad is not None:
                grad_K = fused.stacked[name].grad
                assert grad_K is not None
                close(grad_K[k], p.grad)
