"""Members whose optimizer this package cannot vectorize: a `torch.optim` optimizer updates each of them separately."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from fusion.optim.optimizer_config import Hyperparameters
from fusion.optim.schedule_free import evaluating
from fusion.optim.torch_optimizer import torch_optimizer
from fusion.structure.module_parts import copied


class Apart:
    """The `torch.optim` optimizer of one member, which updates the member's part of the stacked parameters in place.

    Args:
        views: Parameter name -> the member's view of the stacked parameter.
        lr: Parameter name -> multiplier of the learning rate.
        decay: Parameter name -> multiplier of the weight decay.
    """

    def __init__(
        self, hp: Hyperparameters, views: Mapping[str, Tensor], lr: Mapping[str, float], decay: Mapping[str, float]
    ) -> None:
        self._parameters = {name: nn.Parameter(view.detach()) for name, view in views.items()}
        self._optimizer = torch_optimizer(self._parameters, hp, lr, decay)
        self._base_lrs = [group["lr"] for group in self._optimizer.param_groups]

    def __getstate__(self) -> dict[str, Any]:
        """Keep all attributes of the optimizer in copies; torch would leave out attributes of a user's own class."""
        # Leave out a scheduler's wrapper of `step`, because in a copy it would update the original.
        kept = {name: value for name, value in vars(self._optimizer).items() if name != "step"}
        return {**vars(self), "_optimizer": (type(self._optimizer), kept)}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        kind, kept = state["_optimizer"]
        optimizer = object.__new__(kind)
        vars(optimizer).update(kept)
        vars(self).update({**state, "_optimizer": optimizer})

    def update(self, views: Mapping[str, Tensor], gradients: Mapping[str, Tensor], factor: float) -> None:
        """Update the member's parameters, in place.

        Args:
            views: Parameter name -> the member's present view of the stacked parameter.
            gradients: Parameter name -> gradient; a parameter without one is not updated.
            factor: The schedule's factor of the learning rates.
        """
        self._take(views)
        for name, parameter in self._parameters.items():
            parameter.grad = gradients.get(name)
        for group, base in zip(self._optimizer.param_groups, self._base_lrs):
            group["lr"] = base * factor
        self._optimizer.step()
        for parameter in self._parameters.values():
            parameter.grad = None

    @contextmanager
    def evaluating(self, views: Mapping[str, Tensor]) -> Iterator[None]:
        """Within this context, the tensors `views` of a member hold the weights for evaluation, such as averages."""
        self._take(views)
        with evaluating(self._optimizer):
            yield

    def _take(self, views: Mapping[str, Tensor]) -> None:
        moved = any((p.device, p.dtype) != (views[n].device, views[n].dtype) for n, p in self._parameters.items())
        for name, parameter in self._parameters.items():
            parameter.data = views[name].detach()
        if moved:
            self._optimizer.load_state_dict(self._optimizer.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the optimizer state and of the groups; names of parameters stand for the parameters."""
        kept = {name: self._optimizer.state[p] for name, p in self._parameters.items() if p in self._optimizer.state}
        groups = [{k: v for k, v in group.items() if k not in _OWN} for group in self._optimizer.param_groups]
        names = _names(self._optimizer, self._parameters)
        state: dict[str, Any] = copied({"state": kept, "groups": groups, "names": names})
        return state

    def load_state_dict(self, state: Mapping[str, Any], but: Collection[str] = ()) -> None:
        """Restore the result of `state_dict`, but do not change the keys `but` of the parameter groups."""
        groups = [{key: value for key, value in group.items() if key not in but} for group in state["groups"]]
        go_on(self._optimizer, self._parameters, copied({**state, "groups": groups}))

    def hand_over(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        """Copy the state to `optimizer`, a new optimizer of the same kind for copies of the parameters.

        The attributes of a user's own class are copied, too, unless they cannot be copied.
        """
        go_on(optimizer, parameters, self.state_dict())
        of_torch = {"step", *vars(torch.optim.SGD([nn.Parameter(torch.empty(0))]))}
        copies: dict[int, Any] = {id(own): parameters[name] for name, own in self._parameters.items()}
        copies[id(self._optimizer)] = optimizer
        for name in vars(self._optimizer).keys() - of_torch:
            with suppress(Exception):
                setattr(optimizer, name, copy.deepcopy(vars(self._optimizer)[name], copies))


def changed_options(before: Hyperparameters, after: Hyperparameters) -> list[str]:
    """Return the names of the optimizer options whose values differ between `before` and `after`."""
    was, now = dict(before.options), dict(after.options)
    return [name for name in {**was, **now} if was.get(name) != now.get(name)]


_OWN = ("params", "lr")
"""Keys of a parameter group that are neither saved nor restored."""


def go_on(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], state: Mapping[str, Any]) -> None:
    """Restore the result of `Apart.state_dict` in `optimizer`, which then goes on from this state.

    Multipliers may differ, and with them the groups. A group continues with the values of its first parameter's group.

    Args:
        optimizer: An optimizer made from the same hyperparameters.
        parameters: The parameters that it updates, by name.
        state: The result of `Apart.state_dict`, with the same names. Its tensors become the optimizer's.
    """
    names = _names(optimizer, parameters)
    before = {
        name: group for group, own in zip(state["groups"], state.get("names", names), strict=True) for name in own
    }
    groups = [
        {**group, **before[own[0]], "params": own, "lr": group["lr"]}
        for group, own in zip(optimizer.param_groups, names)
    ]
    optimizer.load_state_dict({"state": state["state"], "param_groups": groups})


def _names(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """Return the names of the parameters in each of an optimizer's groups."""
    named = {id(p): name for name, p in parameters.items()}
    return [[named[id(p)] for p in group["params"]] for group in optimizer.param_groups]
