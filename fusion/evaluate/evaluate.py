"""Ways to evaluate one function for K members: all at once under vmap, in turn, or directly if there is only one.

They take `one(tensors, settings, rows) -> (result, rebound)`. Its arguments are one member's tensors by name, its own
floats by path, and its rows of data that members have of their own. It returns a result and the buffers that it
replaced. The ways return the same with a leading K.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from fusion.argument_checks import require
from fusion.evaluate.per_member_floats import PlainFloats, Settings
from fusion.evaluate.rules import folded, functions_member_by_member, no_warnings_of_loops, readable
from fusion.streams import Streams
from fusion.structure.objects_of_tensors import look_into

One = Callable[[Mapping[str, Tensor], Mapping[str, Any], Sequence[Tensor]], tuple[Any, Mapping[str, Tensor]]]


def own_rows(batch: Any, K: int) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """Return the tensors of a batch (ValueError without a leading K) and a function that puts in one member's rows."""
    leaves, spec = tree_flatten(look_into(batch))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for i in places:
        told = f"tensors with {K} rows first, one for each member, with `own_data=True`"
        require(leaves[i].ndim > 0 and len(leaves[i]) == K, "batch", tuple(leaves[i].shape), told)

    def batch_of(rows: Sequence[Tensor]) -> Any:
        own = dict(zip(places, rows, strict=True))
        return tree_unflatten([own.get(i, leaf) for i, leaf in enumerate(leaves)], spec)

    return [leaves[i] for i in places], batch_of


def at_once(
    one: One, tensors: Mapping[str, Tensor], settings: Settings, streams: Streams, K: int, rows_K: Sequence[Tensor] = ()
) -> tuple[Any, Mapping[str, Tensor]]:
    """Evaluate by one vmapped call; of a single member, by a plain one.

    Writes of `one` into buffers go to `tensors`, [K, ...] each.
    """
    if K == 1:
        return _alone(one, tensors, streams, rows_K)
    scalars_K = settings.like(tensors.values())
    values = [value.tolist() for value in settings.values_K.values()]
    # vmap needs something to run over, and a module without tensors has nothing.
    index_K = torch.arange(K)
    mode = folded(streams)

    def each(tensors: Mapping[str, Tensor], scalars: Mapping[str, Tensor], _: Tensor, rows: list[Tensor]) -> Any:
        with PlainFloats(scalars.values(), values, streams) if scalars else nullcontext():
            result, rebound = one(tensors, scalars, rows)
        # A new tensor that members wrote to stands for one of each.
        result, rebound = tree_map(mode.of_each, (result, dict(rebound)))
        return tree_map(_as_tensor, result), rebound

    with mode, functions_member_by_member(streams), no_warnings_of_loops():
        result, rebound = torch.func.vmap(each, randomness="error")(readable(tensors), scalars_K, index_K, [*rows_K])
    return result, rebound


def _alone(
    one: One, tensors: Mapping[str, Tensor], streams: Streams, rows_K: Sequence[Tensor]
) -> tuple[Any, Mapping[str, Tensor]]:
    """Evaluate by one plain call on views, for K = 1. Writes of `one` into buffers go to `tensors`, [1, ...] each."""
    with streams.drawn_from(0):
        own = {name: tensor.squeeze(0) for name, tensor in tensors.items()}
        result, rebound = one(own, {}, [row.squeeze(0) for row in rows_K])
        _take_data(tensors, own, 0, hooks=0)
    return tree_map(_lift, result), tree_map(_lift, rebound)


def in_turn(
    one: One,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    settings: Settings,
    streams: Streams,
    K: int,
    on_gradient: Callable[[str, int], None],
    rows_K: Sequence[Tensor] = (),
) -> tuple[Any, Mapping[str, Tensor]]:
    """Evaluate by K calls, one after another.

    Args:
        parameters: [K, ...] each.
        buffers: [K, ...] each; they are copied, and all are among those replaced.
        on_gradient: Called in the backward pass with the name of a parameter and the member in which it gets a
            gradient.
    """
    parts = {name: _Rows.apply(parameter) for name, parameter in parameters.items()}  # type: ignore[no-untyped-call]
    results, written = [], []
    for k in range(K):
        own = {name: members[k] for name, members in parts.items()}
        for name, parameter in own.items():
            if parameter.requires_grad:
                parameter.register_hook(partial(_reached, on_gradient, name, k))
        # Copies, because a write of one member must not invalidate tensors that another's backward pass needs.
        copies = {name: buffer[k].clone() for name, buffer in buffers.items()}
        scalars = {path: value.tolist()[k] for path, value in settings.values_K.items()}
        with streams.drawn_from(k):
            result, rebound = one({**own, **copies}, scalars, [row[k] for row in rows_K])
        _take_data(parameters, own, k, hooks=1)
        results.append(tree_map(_as_tensor, result))
        written.append({name: rebound.get(name, copy).detach() for name, copy in copies.items()})
    return tree_map(_stack, *results), tree_map(_stack, *written)


class _Rows(torch.autograd.Function):
    """[K, ...] as K tensors in the same memory, with one backward node: indexing would make a gradient of K for each.

    They are no views, because a module may not write into views. An embedding with `max_norm` writes into its weight,
    and so does a layer that sets its scale by the first batch.
    """

    @staticmethod
    def forward(ctx: Any, parameter_K: Tensor) -> tuple[Tensor, ...]:
        rows = parameter_K.detach().unbind()
        memory = parameter_K.untyped_storage()
        return tuple(row.new_empty(0).set_(memory, row.storage_offset(), row.shape, row.stride()) for row in rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.stack(gradients)


def _take_data(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], k: int, hooks: int) -> None:
    """Write the data that code gave to a member's tensors (`p.data = ...`) to the tensors [K, ...].

    Raises:
        RuntimeError: if code gave a tensor more hooks than it had, which would be lost.
    """
    for name, tensor in tensors.items():
        if len(own[name]._backward_hooks or ()) > hooks:
            raise RuntimeError(
                f"forward registers a hook on {name}: register it when the module is made, before it is fused"
            )
        if own[name].untyped_storage()._cdata != tensor.untyped_storage()._cdata:
            tensor.data[k].copy_(own[name].detach())


def _reached(on_gradient: Callable[[str, int], None], name: str, k: int, grad: Tensor | None) -> None:
    """Report a gradient of member `k`'s parameter; if none arrives, torch calls a hook with None."""
    if grad is not None:
        on_gradient(name, k)


def _lift(value: Any) -> Tensor:
    return _as_tensor(value).unsqueeze(0)


def _stack(*tensors: Tensor) -> Tensor:
    return torch.stack(tensors)


def _as_tensor(value: Any) -> Tensor:
    """Return a result of an objective as a tensor; numbers, such as a count of samples, are allowed."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, bool | int | float):
        return torch.tensor(value)
    raise ValueError(f"`objective` returns a {type(value).__name__}, but must return tensors or numbers")
