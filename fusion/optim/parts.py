"""Several optimizers as one, such as one for each part of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fusion.optim.schedule_free import ScheduleFree, has_modes, keep_average

PART = "part"
"""Key of a group of parameters that names the part of the model."""


class SeveralAsOne(torch.optim.Optimizer):
    """Optimizers of torch's that update from the groups and the state of this one; a step is one of each.

    Args:
        parts: By the value that the groups of each get under `key`.
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
        """Have copies keep the parts, which torch's own would lose."""
        return {**super().__getstate__(), "parts": self.parts}

    def _share(self) -> None:
        """Have all parts update from this optimizer's groups and state."""
        for name, optimizer in self.parts.items():
            optimizer.state = self.state
            optimizer.param_groups = [group for group in self.param_groups if group[self.key] == name]

    def load_state_dict(self, state_dict: Any) -> None:
        """Restore the result of `state_dict` in all parts."""
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        self._share()
        for optimizer in self.parts.values():
            optimizer.step()


class ByPart(SeveralAsOne):
    """One optimizer of torch's for each part of a model, by its name."""

    key = PART


class ByPartWithModes(ByPart):
    """The same, if some of the optimizers train other weights than those to evaluate."""

    def train(self) -> None:
        """Have the parameters hold the weights at which gradients are taken."""
        self._switch("train")

    def eval(self) -> None:
        """Have the parameters hold the weights to evaluate."""
        self._switch("eval")

    def _switch(self, mode: str) -> None:
        self._share()
        for optimizer in self.parts.values():
            if has_modes(optimizer):
                getattr(optimizer, mode)()


def by_part(parts: Mapping[str, torch.optim.Optimizer]) -> ByPart:
    """Make one optimizer of those of the parts; it has modes if one of them has."""
    return (ByPartWithModes if any(map(has_modes, parts.values())) else ByPart)(parts)


def keep_averages(optimizer: torch.optim.Optimizer, before: Sequence[Mapping[str, Any]]) -> None:
    """Do as `keep_average` for each Schedule-Free optimizer among those of parts, or for the only one.

    Args:
        before: The groups of all of them with the settings until now.
    """
    parts = optimizer.parts if isinstance(optimizer, ByPart) else {"": optimizer}
    for part, own in parts.items():
        if isinstance(own, ScheduleFree):
            keep_average(own, [group for group in before if group.get(PART, "") == part])
