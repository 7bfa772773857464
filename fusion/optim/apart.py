"""Members whose optimizer is none that this package can vectorize: torch's own updates each by itself, in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fusion.optim.hyper import Hyperparameters
from fusion.optim.single import torch_optimizer


class Apart:
    """One member's optimizer, on views of its part of the stacked parameters.

    Args:
        hp: Its hyperparameters.
        views: Its part of each parameter, by name.
        lr: Multipliers of learning rates, by name.
        decay: Likewise, of weight decays.
    """

    def __init__(
        self, hp: Hyperparameters, views: Mapping[str, Tensor], lr: Mapping[str, float], decay: Mapping[str, float]
    ) -> None:
        self._parameters = {name: nn.Parameter(view.detach()) for name, view in views.items()}
        self._optimizer = torch_optimizer(self._parameters, hp, lr, decay)
        self._base_lrs = [group["lr"] for group in self._optimizer.param_groups]

    def update(self, views: Mapping[str, Tensor], gradients: Mapping[str, Tensor], factor: float) -> None:
        """Take a step, in place.

        Args:
            views: Where its part of each parameter lies now.
            gradients: Of those that have one.
            factor: The schedule's, of the learning rates.
        """
        moved = {p.device for p in self._parameters.values()} != {view.device for view in views.values()}
        for name, parameter in self._parameters.items():
            parameter.data, parameter.grad = views[name].detach(), gradients.get(name)
        if moved:
            self._optimizer.load_state_dict(self._optimizer.state_dict())
        for group, base in zip(self._optimizer.param_groups, self._base_lrs):
            group["lr"] = base * factor
        self._optimizer.step()
        for parameter in self._parameters.values():
            parameter.grad = None

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """What the optimizer keeps of each parameter, by its name: copies."""
        return {name: _copied(self._optimizer.state[p]) for name, p in self._parameters.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Go on from what `state_dict` gave."""
        for name, of in state.items():
            if of:
                self._optimizer.state[self._parameters[name]] = _copied(of)
        # Through torch's own checks, which also put each tensor where this kind of optimizer wants it.
        self._optimizer.load_state_dict(self._optimizer.state_dict())


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    copied: dict[str, Any] = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, dict(state))
    return copied
