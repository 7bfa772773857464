"""Several optimizers as one, each for a part of a model."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fusion.checks import require
from fusion.optim.schedule_free import has_modes

PART = "part"
"""Key of a group of parameters that names the part of the model."""


class ByPart(torch.optim.Optimizer):
    """One optimizer of torch's for each part of a model; a step updates every parameter that has a gradient.

    Args:
        parts: By name of the part; it becomes `group["part"]` of their groups.
    """

    def __init__(self, parts: Mapping[str, torch.optim.Optimizer]) -> None:
        self.parts = dict(parts)
        for name, optimizer in self.parts.items():
            rule = "one without the modes `train()` and `eval()` where parts have optimizers of their own"
            require(not has_modes(optimizer), f"optimizer.{name}" if name else "optimizer", type(optimizer), rule)
        groups = []
        for name, optimizer in self.parts.items():
            for group in optimizer.param_groups:
                group[PART] = name
                groups.append(group)
        super().__init__(groups, {})
        for optimizer in self.parts.values():
            self.state.update(optimizer.state)
        self._share()

    def _share(self) -> None:
        """Have all parts update from this optimizer's groups and state."""
        for name, optimizer in self.parts.items():
            optimizer.state = self.state
            optimizer.param_groups = [group for group in self.param_groups if group[PART] == name]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        self._share()
        for optimizer in self.parts.values():
            optimizer.step()
