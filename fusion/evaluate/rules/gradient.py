"""Gradients inside an objective: `torch.autograd.grad`, and the tensors by which it differentiates.

Members are independent of each other. So the gradient of all members' outputs by all members' inputs, [K, ...] each, is
that of each member by its own. An input that members share becomes one for each, as its gradient differs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fusion.evaluate.rules.member import Member


class BackwardInside(RuntimeError):
    """An objective calls `backward()`, which would add its gradients to those of the loss that it returns."""


class FreezesInside(RuntimeError):
    """Forward or an objective freezes a parameter, whose members' part cannot be frozen by itself."""

    def __init__(self) -> None:
        super().__init__(
            "forward or the objective sets `requires_grad` of a parameter to False, which a fused model does not "
            "follow: use `torch.no_grad()` or `.detach()` there, or freeze it when the model is made"
        )


def backward(*args: Any, **kwargs: Any) -> Any:
    """Refuse `Tensor.backward` inside an objective (BackwardInside)."""
    raise BackwardInside(
        "the objective calls `backward()`: return the loss instead, of which training computes the gradients, and use "
        "`torch.autograd.grad(..., create_graph=True)` for gradients that the loss needs"
    )


def gradient(
    K: int,
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> Any:
    """`torch.autograd.grad`; the graph stays, as the loss of all members is differentiated later."""
    to, of = (x if isinstance(x, list) else [x] for x in (inputs, outputs))
    if is_grads_batched or any(x.dim is None for x in to):
        return NotImplemented
    given = grad_outputs if isinstance(grad_outputs, list) else [grad_outputs] * len(of)
    if any(g is None and y.value.dim() > (y.dim is not None) for y, g in zip(of, given, strict=True)):
        return NotImplemented  # torch says that only scalars have a gradient by default
    of_K = [y.lead(K) for y in of]
    given_K = [torch.ones_like(y) if g is None else g.lead(K) for y, g in zip(of_K, given, strict=True)]
    found = torch.autograd.grad(
        of_K,
        [x.value for x in to],
        given_K,
        retain_graph=True,
        create_graph=create_graph,
        allow_unused=allow_unused,
        materialize_grads=materialize_grads,
    )
    return tuple(None if g is None else Member(g, x.dim) for g, x in zip(found, to, strict=True))


def needs_grad(K: int, tensor: Member) -> Any:
    """`Tensor.requires_grad`, of which `vmap` says False."""
    return tensor.value.requires_grad


def data(K: int, tensor: Member) -> Any:
    """`Tensor.data`, for writes in place."""
    return Member(tensor.value.data, tensor.dim)


def requires_grad(K: int, tensor: Member, requires_grad: bool = True) -> Any:
    """`Tensor.requires_grad_`, and the same of a tensor that members share, which becomes one for each."""
    if not requires_grad:
        if isinstance(tensor.value, nn.Parameter) and tensor.value.requires_grad:
            raise FreezesInside
        return NotImplemented if tensor.value.requires_grad else tensor
    if tensor.dim is None:
        return Member(tensor.lead(K).clone().requires_grad_(), 0)
    return Member(tensor.value.requires_grad_(), tensor.dim)
