"""The law of every rule: members folded into one operation equal a loop over them, results and gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusion.evaluate.rules import folded
from fusion.streams import Streams

K = 3
SHARED = (None, 0)
"""Where an input has its K axis: nowhere, or first."""


def member(*shape: int) -> Tensor:
    """A tensor [K, *shape], one slice for each member."""
    return torch.randn(K, *shape)


def tensor(dim: int | None, *shape: int) -> Tensor:
    """With the K axis at `dim`, or without."""
    return torch.randn(shape) if dim is None else torch.randn(K, *shape).movedim(0, dim)


def assert_folds(
    op: Callable[..., Any], *tensors: Tensor, dims: tuple[int | None, ...], rtol: float = 1e-4, atol: float = 1e-5
) -> None:
    """Compare `op` folded over `tensors` (their K axis at `dims`, or shared) with a loop over the members."""
    loop_inputs, folded_inputs = _leaves(tensors), _leaves(tensors)
    loop = [op(*(t if d is None else t.select(d, k) for t, d in zip(loop_inputs, dims))) for k in range(K)]
    with folded(Streams(K, range(K))):
        result = torch.func.vmap(op, in_dims=dims, randomness="error")(*folded_inputs)
    for ours, theirs in zip(_flat(result), zip(*map(_flat, loop)), strict=True):
        torch.testing.assert_close(ours, torch.stack(theirs), rtol=rtol, atol=atol)
    for grads in zip(
        _gradients(_flat(result), folded_inputs), _gradients(map(torch.stack, zip(*map(_flat, loop))), loop_inputs)
    ):
        torch.testing.assert_close(*grads, rtol=rtol, atol=atol)


def _leaves(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    return [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]


def _flat(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [t for item in result if item is not None for t in _flat(item)]


def _gradients(results: Any, inputs: list[Tensor]) -> list[Tensor]:
    """Gradients of a loss that weighs every element of every result differently."""
    loss = sum((t * torch.linspace(0.5, 1.5, t.numel()).view(t.shape)).sum() for t in results)
    assert isinstance(loss, Tensor)
    floats = [t for t in inputs if t.is_floating_point()]
    grads = torch.autograd.grad(loss, floats, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(floats, grads)]


def assert_modules_fold(make: Any, inputs: list[Tensor], options: dict[str, Any]) -> None:
    """K modules with their own parameters, on inputs that they share and on inputs of their own."""
    modules = [make() for _ in range(K)]
    names = [name for name, _ in modules[0].named_parameters()]
    params = [torch.stack([m.get_parameter(name).detach() for m in modules]) for name in names]

    def op(*tensors: Tensor) -> Any:
        params = dict(zip(names, tensors[len(inputs) :]))
        x = [tensors[0]] * len(inputs) if all(i is inputs[0] for i in inputs) else list(tensors[: len(inputs)])
        result = torch.func.functional_call(modules[0], params, tuple(x), options)
        return tuple(t for t in result if t is not None)

    for x in SHARED:
        values = inputs if x is None else [torch.stack([i, i + 1, i * 2]) for i in inputs]
        assert_folds(op, *values, *params, dims=(x,) * len(inputs) + (0,) * len(params))
