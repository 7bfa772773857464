"""Ways to evaluate one function for K members: all at once under vmap, in turn, or directly if there is only one.

Each way takes a function `one(tensors, settings, rows) -> (result, rebound)` that computes for one member:

- `tensors` are the member's parameters and buffers, by name.
- `settings` are the floats in which members differ, by path.
- `rows` are the member's rows of the batch, if each member has its own batch.
- `rebound` has the buffers that the function replaced.

The ways return the results and buffers of all members, each with a leading axis of length K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from fusion.argument_checks import require
from fusion.evaluate.parameter_lists import parameter_lists
from fusion.evaluate.per_member_floats import PlainFloats, Settings
from fusion.evaluate.rules import folded, functions_member_by_member, no_warnings_of_loops, readable
from fusion.streams import Streams
from fusion.structure.objects_of_tensors import look_into

One = Callable[[Mapping[str, Tensor], Mapping[str, Any], Sequence[Tensor]], tuple[Any, Mapping[str, Tensor]]]


def own_rows(batch: Any, K: int) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """Return the tensors of a batch, and a function that builds one member's batch from its rows of these tensors.

    Raises:
        ValueError: if a tensor has no leading axis of length K.
    """
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
    one: One,
    tensors: Mapping[str, Tensor],
    settings: Settings,
    streams: Streams,
    K: int,
    rows_K: Sequence[Tensor],
    hold: Callable[[Callable[[Any], Any]], None],
) -> tuple[Any, Mapping[str, Tensor]]:
    """Evaluate the function `one` for all members by one call under vmap; for a single member, by a plain call.

    If `one` writes into buffers, the writes reach `tensors`, which are [K, ...] each.

    Args:
        hold: Called after `one` if members wrote different values into a new tensor. Its argument is a function that
            returns the members' own copies of such a tensor, and any other value as it is.
    """
    if K == 1:
        return _alone(one, tensors, streams, rows_K)
    scalars_K = settings.like(tensors.values())
    values = [value.tolist() for value in settings.values_K.values()]
    # Let vmap also run over an index, because it needs at least one tensor, and a module may have none.
    index_K = torch.arange(K)
    mode = folded(streams)

    def each(tensors: Mapping[str, Tensor], scalars: Mapping[str, Tensor], _: Tensor, rows: list[Tensor]) -> Any:
        with PlainFloats(scalars.values(), values, streams) if scalars else nullcontext():
            result, rebound = one(tensors, scalars, rows)
        # If members wrote different values into a tensor that they created together, return each member's own values.
        result, rebound = tree_map(mode.of_each, (result, dict(rebound)))
        if mode.copied:
            hold(mode.of_each)
        return tree_map(_as_tensor, result), rebound

    over_members = torch.func.vmap(each, randomness="error")
    try:
        with mode, functions_member_by_member(streams), no_warnings_of_loops(), _own_tensors():
            result, rebound = over_members(readable(tensors), scalars_K, index_K, [*rows_K])
    except RuntimeError as error:
        error.add_note("If one module alone runs, vmap cannot follow it: call `fusion.dry_run`, which finds a way.")
        raise
    return result, rebound


def _alone(
    one: One, tensors: Mapping[str, Tensor], streams: Streams, rows_K: Sequence[Tensor]
) -> tuple[Any, Mapping[str, Tensor]]:
    """Call `one` for a single member on views of `tensors`, [1, ...] each, so that writes into buffers reach them."""
    with streams.drawn_from(0), _own_tensors():
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
    """Evaluate the function `one` by K calls, one member after another.

    Args:
        parameters: [K, ...] each.
        buffers: [K, ...] each. Each call works on copies. The returned buffers are stacked from these copies, or from
            the tensors by which a call replaced them.
        on_gradient: Called in the backward pass as `on_gradient(name, k)` when a parameter of member k gets a gradient.
    """
    parts = {name: _Rows.apply(parameter) for name, parameter in parameters.items()}  # type: ignore[no-untyped-call]
    results, written = [], []
    for k in range(K):
        own = {name: members[k] for name, members in parts.items()}
        for name, parameter in own.items():
            if parameter.requires_grad:
                parameter.register_hook(partial(_reached, on_gradient, name, k))
        # Copy the buffers. Otherwise, autograd would take a member's write for a write to all members, and refuse the
        # backward passes of the others.
        copies = {name: buffer[k].clone() for name, buffer in buffers.items()}
        scalars = {path: value.tolist()[k] for path, value in settings.values_K.items()}
        with streams.drawn_from(k), _own_tensors():
            result, rebound = one({**own, **copies}, scalars, [row[k] for row in rows_K])
        _take_data(parameters, own, k, hooks=1)
        results.append(tree_map(_as_tensor, result))
        written.append({name: rebound.get(name, copy).detach() for name, copy in copies.items()})
    return tree_map(_stack, *results), tree_map(_stack, *written)


@contextmanager
def _own_tensors() -> Iterator[None]:
    """Let a module use its member's own tensors, also in slices of an `nn.ParameterList` and in `parametrize.cached`.

    In the cache, all copies of a module would share their weights. So it is emptied before and after.
    """
    parametrize._cache.clear()
    try:
        with parameter_lists:
            yield
    finally:
        parametrize._cache.clear()


class _Rows(torch.autograd.Function):
    """Splits [K, ...] into K tensors that share its memory, with one backward node.

    Indexing would instead make a gradient of size [K, ...] for each member. The K tensors are made so that autograd
    does not take them for views, because it forbids writes into such views. A module may write, for example an
    embedding with `max_norm`.
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
    """Copy data that forward assigned to member `k`'s tensors (`p.data = ...`) into the stacked tensors [K, ...].

    Args:
        hooks: Number of hooks that each tensor had before forward.

    Raises:
        RuntimeError: if forward registered a hook on a tensor, because the hook would be lost.
    """
    for name, tensor in tensors.items():
        if len(own[name]._backward_hooks or ()) > hooks:
            raise RuntimeError(
                f"forward registers a hook on {name}: register it when the module is made, before it is fused"
            )
        if own[name].untyped_storage()._cdata != tensor.untyped_storage()._cdata:
            tensor.data[k].copy_(own[name].detach())


def _reached(on_gradient: Callable[[str, int], None], name: str, k: int, grad: Tensor | None) -> None:
    """Call `on_gradient(name, k)` unless `grad` is None: torch also calls this hook if there is no gradient."""
    if grad is not None:
        on_gradient(name, k)


def _lift(value: Any) -> Tensor:
    return _as_tensor(value).unsqueeze(0)


def _stack(*tensors: Tensor) -> Tensor:
    return torch.stack(tensors)


def _as_tensor(value: Any) -> Tensor:
    """Return an objective's result as a tensor. A number, such as a count of samples, is converted."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, bool | int | float):
        return torch.tensor(value)
    raise ValueError(f"`objective` returns a {type(value).__name__}, but must return tensors or numbers")
