"""Hooks on parameters (`torch.Tensor.register_hook` and the like), which a copy of a module would lose.

A fused model runs each member's hooks on the member's part of the stacked gradient. While they run, the member's module
holds the member's tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fusion.structure.module_parts import HOOKS, Hooks, bound, tensor_slots


def run_hooks(fused: Any) -> None:
    """Make backward passes of a `FusedModel` run its members' hooks. Skip parameters that are prepared already."""
    for name in vars(fused.template).get(HOOKS, ()):
        parameter = fused.own.get(name)
        if parameter is None or not parameter.requires_grad:
            continue
        there = (parameter._backward_hooks or {}).values()
        if not any(isinstance(hook, _OnGradient) and hook.fused is fused for hook in there):
            parameter.register_hook(_OnGradient(fused, name))
            parameter.register_post_accumulate_grad_hook(_Accumulated(fused, name))


class _Running:
    def __init__(self, fused: Any, name: str) -> None:
        self.fused, self.name = fused, name

    def members(self) -> Iterator[tuple[int, Hooks]]:
        """Yield the index and hooks of each member that got a gradient.

        Until the next member is yielded, this member's module holds the member's tensors.
        """
        fused, unreached = self.fused, self.fused.unreached().get(self.name, [])
        for k, member in enumerate(fused._members):
            if k in unreached:
                continue
            slots = tensor_slots(member.skeleton)
            with bound(slots, {slot.name: fused._per_member(slot.name)[k] for slot in slots}):
                yield k, vars(member.skeleton)[HOOKS][self.name]


class _OnGradient(_Running):
    def __call__(self, grad_K: Tensor) -> Tensor:
        grads = list(grad_K.unbind())
        for k, hooks in self.members():
            for hook in hooks.on_gradient:
                new = hook(grads[k])
                grads[k] = grads[k] if new is None else new
        return torch.stack(grads)


class _Accumulated(_Running):
    def __call__(self, parameter_K: Tensor) -> None:
        grad_K = parameter_K.grad
        assert grad_K is not None
        for k, hooks in self.members():
            row = parameter_K.detach()[k]
            own = nn.Parameter(row)
            own.grad = grad_K[k]
            for hook in hooks.accumulated:
                hook(own)
            if own.grad is None:
                raise RuntimeError(f"a fused model cannot follow a hook that takes the gradient of {self.name} away")
            for now, then in ((own.grad, grad_K[k]), (own.detach(), row)):
                if now.data_ptr() != then.data_ptr():
                    then.copy_(now)
