"""A full-size model split over its ranks: each holds a part of every parameter, its gradient and its optimizer state.

It uses FSDP2 (`torch.distributed.fsdp.fully_shard`), which gathers the parameters of a part while that part computes.
A saved state is whole, so that it can be split over any number of ranks, or none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

# FSDP takes longer to import than the rest of this package, so that only those who split a model import it.


def split(module: nn.Module, world: int, device: torch.device) -> None:
    """Split a module over the ranks of the default process group, in place; each calls it.

    The entries of its `nn.ModuleList`s, such as a transformer's layers, are put together one at a time, all else for as
    long as the module computes.

    Args:
        module: On its device, with the same weights on all ranks; what computes with them is its `forward`.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (world,))
    for lists in [part for part in reversed([*module.modules()]) if isinstance(part, nn.ModuleList)]:
        for block in lists:
            if next(block.parameters(), None) is not None:
                fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(module, mesh=mesh, reshard_after_forward=True)


@contextmanager
def apart(module: nn.Module) -> Iterator[None]:
    """Within it, gradients of a split module add up on each rank, and are averaged later, as in DDP's `no_sync`."""
    from torch.distributed.fsdp import FSDPModule

    assert isinstance(module, FSDPModule)
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


def whole(state: Any, keep: bool) -> Any:
    """Return a state with its split tensors whole, on the CPU; each rank calls it.

    Tensors are gathered one at a time. A rank that does not `keep` them gets None for each.
    """
    from torch.distributed.tensor import DTensor

    def of(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tensor = leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
        return tensor.detach().cpu() if keep else None

    return tree_map(of, state)


def split_like(values: Mapping[Any, Any], tensors: Mapping[Any, Tensor]) -> dict[Any, Any]:
    """Whole tensors, split as those of the same names are; what has no such namesake, or another shape, stays whole."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    def of(name: Any, value: Any) -> Any:
        like = tensors.get(name)
        if not isinstance(like, DTensor) or not isinstance(value, Tensor) or value.shape != like.shape:
            return value
        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)

    return {name: of(name, value) for name, value in values.items()}
