"""Gradients inside an objective: `torch.autograd.grad`, and the tensors with respect to which it differentiates.

Members do not depend on each other. One gradient of all outputs [K, ...] with respect to all inputs [K, ...] therefore
gives each member its own gradient. If members share an input, each gets a copy, because their gradients differ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fusion.evaluate.rules.member import Member


class BackwardInside(RuntimeError):
    """Raised if an objective calls `backward()`, because its gradients would add to the returned loss's gradients."""


class FreezesInside(RuntimeError):
    """Raised if forward or an objective freezes a parameter, because one member's part of it cannot be frozen alone."""

    def __init__(self) -> None:
        super().__init__(
            "forward or the objective sets `requires_grad` of a parameter to False, which a fused model does not "
            "follow: use `torch.no_grad()` or `.detach()` there, or freeze it when the model is made"
        )


def backward(*args: Any, **kwargs: Any) -> Any:
    """Replace `Tensor.backward` inside an objective: raise `BackwardInside`."""
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
    """Compute `torch.autograd.grad` for K members. The graph is kept, because their loss is differentiated later."""
    to, of = (x if isinstance(x, list) else [x] for x in (inputs, outputs))
    if is_grads_batched or any(x.dim is None for x in to):
        return NotImplemented
    given = grad_outputs if isinstance(grad_outputs, list) else [grad_outputs] * len(of)
    if any(g is None and y.value.dim() > (y.dim is not None) for y, g in zip(of, given, strict=True)):
        return NotImplemented  # torch's own function raises an error: only a scalar needs no `grad_outputs`
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
    """Return `Tensor.requires_grad` of K members' tensor. Under `vmap`, torch would return False for each member."""
    return tensor.value.requires_grad


def data(K: int, tensor: Member) -> Any:
    """Return `Tensor.data` of K members' tensor, with the same memory, so that in-place writes reach the tensor."""
    return Member(tensor.value.data, tensor.dim)


def requires_grad(K: int, tensor: Member, requires_grad: bool = True) -> Any:
    """Call `Tensor.requires_grad_` for K members. If members share the tensor, each gets its own copy."""
    if not requires_grad:
        if isinstance(tensor.value, nn.Parameter) and tensor.value.requires_grad:
            raise FreezesInside
        return NotImplemented if tensor.value.requires_grad else tensor
    if tensor.dim is None:
        return Member(tensor.lead(K).clone().requires_grad_(), 0)
    return Member(tensor.value.requires_grad_(), tensor.dim)
