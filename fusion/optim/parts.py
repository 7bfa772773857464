"""Several of torch's optimizers as one, such as one for each part of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fusion.optim.schedule_free import ScheduleFree, has_modes, keep_average

PART = "part"
"""Key in a parameter group. Its value is the name of the group's part of the model."""


class SeveralAsOne(torch.optim.Optimizer):
    """Joins several of torch's optimizers into one, which holds the groups and the state of all, and steps all.

    Args:
        parts: Name -> optimizer. The name is stored under the key `key` in the optimizer's groups.
    """

    key: str

    def __init__(self, parts: Mapping[Any, torch.optim.Optimizer]) -> None:
        self.parts = dict(parts)
        groups = []
        for name, optimizer in self.parts.items():
            for group in optimizer.param_groups:
                group[self.key] = name
                groups.append(group)
        super().__init__(groups, {})
        for optimizer in self.parts.values():
            self.state.update(optimizer.state)
        self._share()

    def __getstate__(self) -> dict[str, Any]:
        """Keep the parts in copies; torch's own method would lose them."""
        return {**super().__getstate__(), "parts": self.parts}

    def _share(self) -> None:
        """Make all parts use this optimizer's groups and state."""
        for name, optimizer in self.parts.items():
            optimizer.state = self.state
            optimizer.param_groups = [group for group in self.param_groups if group[self.key] == name]

    def load_state_dict(self, state_dict: Any) -> None:
        """Restore the result of `state_dict`, in all parts."""
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        self._share()
        for optimizer in self.parts.values():
            optimizer.step()


class ByPart(SeveralAsOne):
    """Joins several of torch's optimizers, one for each part of a model. It holds them by the names of the parts."""

    key = PART


class ByPartWithModes(ByPart):
    """A `ByPart` in which some optimizers evaluate other weights than they train."""

    def train(self) -> None:
        """Put the weights at which gradients are taken into the parameters."""
        self._switch("train")

    def eval(self) -> None:
        """Put the weights for evaluation into the parameters."""
        self._switch("eval")

    def _switch(self, mode: str) -> None:
        self._share()
        for optimizer in self.parts.values():
            if has_modes(optimizer):
                getattr(optimizer, mode)()


def by_part(parts: Mapping[str, torch.optim.Optimizer]) -> ByPart:
    """Join the optimizers of all parts into one, which has `train()` and `eval()` if one of them has."""
    return (ByPartWithModes if any(map(has_modes, parts.values())) else ByPart)(parts)


def keep_averages(optimizer: torch.optim.Optimizer, before: Sequence[Mapping[str, Any]]) -> None:
    """Call `keep_average` for a Schedule-Free optimizer, or for each Schedule-Free optimizer in a `ByPart`.

    Args:
        before: The earlier parameter groups of all these optimizers.
    """
    parts = optimizer.parts if isinstance(optimizer, ByPart) else {"": optimizer}
    for part, own in parts.items():
        if isinstance(own, ScheduleFree):
            keep_average(own, [group for group in before if group.get(PART, "") == part])
