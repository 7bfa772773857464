"""Training steps that survive an out-of-memory error: each half of the members repeats the step from its beginning."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusion.backoff import back_off
from fusion.checks import check_function, require
from fusion.model import FusedModel, check_fused
from fusion.optim import FusedOptimizer

Step = Callable[[FusedModel, FusedOptimizer], Any]


class Group(NamedTuple):
    """Members that train as one, and their optimizer."""

    fused: FusedModel
    optimizer: FusedOptimizer


class OutOfMemoryGuard:
    """Runs training steps of a group of members; when memory runs out, halves the group and repeats the step.

    A step may change parameters, buffers, optimizer state and random number generators; all are put back before
    it is repeated, so every member takes each step once. Before the first step of a group all of this is copied;
    later steps copy buffers only, since an update allocates nothing that the first one did not.

    Args:
        fused: K members. The guard takes them over: after a split they are in `groups`.
        optimizer: Theirs.

    Attributes:
        groups: The members, in their order, in groups that fit.
    """

    def __init__(self, fused: FusedModel, optimizer: FusedOptimizer) -> None:
        check_fused(fused)
        require(isinstance(optimizer, FusedOptimizer), "optimizer", optimizer, "a FusedOptimizer")
        self.groups = [Group(fused, optimizer)]
        self._proven: set[int] = set()
        self._before: _Snapshot | None = None

    def step(self, step: Step) -> list[Any]:
        """Call `step(fused, optimizer)` for each group: forward, backward, update, on one batch.

        Returns:
            What `step` returned, for each of `groups`.

        Raises:
            RuntimeError: the out-of-memory error itself, where one member alone does not fit, or where memory ran out
                within an update after the first.
        """
        check_function("step", step)
        attempt = partial(self._attempt, step)
        return [
            result
            for group in tuple(self.groups)
            for result in back_off(attempt, group, self._can_be_halved, self._halved)
        ]

    def _attempt(self, step: Step, group: Group) -> Any:
        self._before = _Snapshot(group, complete=id(group.fused) not in self._proven)
        result = step(*group)
        self._before = None
        self._proven.add(id(group.fused))
        return result

    def _can_be_halved(self, group: Group) -> bool:
        return group.fused.K > 1 and self._before is not None and self._before.can_restore(group)

    def _halved(self, group: Group) -> list[Group]:
        """Both halves of a group, as it was before the step, which take its place in `groups`."""
        assert self._before is not None
        self._before.restore(group)
        self._before = None
        self._proven.discard(id(group.fused))
        at = self.groups.index(group)
        self.groups[at : at + 1] = halves = _halves(group)
        return halves


class _Snapshot:
    """What a step changes: the generators and buffers always, parameters and moments if `complete`."""

    def __init__(self, group: Group, *, complete: bool) -> None:
        fused, update = group
        tensors = {**fused.stacked_buffers, **(fused.stacked if complete else {})}
        self.tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self.state = update.state_dict() if complete else None
        self.steps = update.steps_KP.clone()
        self.device = next(iter(fused.stacked.values())).device
        self.streams = fused.streams.copy()
        self.cpu_generator = torch.get_rng_state()
        cuda = self.device.type == "cuda"
        self.cuda_generator: Tensor | None = torch.cuda.get_rng_state(self.device) if cuda else None

    def can_restore(self, group: Group) -> bool:
        return self.state is not None or torch.equal(self.steps, group.optimizer.steps_KP.to(self.steps.device))

    @torch.no_grad()
    def restore(self, group: Group) -> None:
        group.optimizer.zero_grad()
        live = {**group.fused.stacked, **group.fused.stacked_buffers}
        for name, tensor in self.tensors.items():
            live[name].copy_(tensor)
        if self.state is not None:
            group.optimizer.load_state_dict(self.state)
        group.fused.streams = self.streams
        torch.set_rng_state(self.cpu_generator)
        if self.cuda_generator is not None:
            torch.cuda.set_rng_state(self.cuda_generator, self.device)


def _halves(group: Group) -> list[Group]:
    second = Group(*copy.deepcopy((group.fused, group.optimizer)))
    middle = group.fused.K // 2
    for (fused, update), kept in ((group, range(middle)), (second, range(middle, group.fused.K))):
        chosen = list(kept)
        fused.keep(chosen)
        update.keep(chosen)
    return [group, second]
