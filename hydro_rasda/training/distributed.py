"""One full-size model on several ranks: how they find each other, split its parameters, and share BatchNorm statistics.

Ranks meet by a file of their machine, or by a store on the network. A split model (FSDP2,
`torch.distributed.fsdp.fully_shard`) holds a part of every parameter, its gradient and its optimizer state on each
rank. It gathers the parameters of a part while that part computes. A saved state is whole, so that it can be split over
any number of ranks, or none.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map

from hydro_rasda.data import Batch
from hydro_rasda.problem.objective import Objective, scalars
from hydro_rasda.problem.precision import turns

Store = Any
"""One of torch.distributed's, which shows them to no type checker."""

ARRIVAL = timedelta(minutes=5)
"""A rank that starts late is no dead one: so long the others wait until all are there."""


def file_store(path: Path, world: int) -> Store:
    """A file as a store, for ranks of one machine alone, in a folder that only their user can enter."""
    # Else gloo listens where anyone who reaches the machine could write into it.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    return dist.FileStore(str(path), world)  # type: ignore[attr-defined]  # not exported


def listening_store(host: str) -> Store:
    """The store of rank 0, which listens at this address of its machine."""
    listener = _listener(host)
    if listener is None:
        return _tcp_store(host, 0, is_master=True)
    # By itself it would listen on all interfaces: anyone who reaches the machine could write into it.
    return _tcp_store(host, listener.getsockname()[1], is_master=True, master_listen_fd=listener.detach())


def reached_store(host: str, port: int) -> Store:
    """The store of another rank, where rank 0's listens at this address."""
    return _tcp_store(host, port, is_master=False)


def await_ranks(store: Store, rank: int, world: int) -> None:
    """Say that a rank is there, and wait for the others: the limit of the process group is for those that are."""
    store.set(f"here{rank}", "")
    store.wait([f"here{other}" for other in range(world)], ARRIVAL)


def _tcp_store(host: str, port: int, is_master: bool, master_listen_fd: int | None = None) -> Store:
    return dist.TCPStore(  # type: ignore[attr-defined]  # not exported
        host, port, is_master=is_master, timeout=ARRIVAL, wait_for_workers=False, master_listen_fd=master_listen_fd
    )


def _listener(host: str) -> socket.socket | None:
    """A socket that listens at this address alone; None where it is none of this machine's own, as behind a NAT."""
    try:
        return socket.create_server((host, 0), backlog=1024)
    except OSError:
        return None


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


def average_statistics(joint: nn.Module, weight: Callable[[], float] = lambda: 1.0) -> None:
    """Make the running statistics of BatchNorm the mean over the ranks, after each forward pass in training.

    DDP alone keeps those of rank 0, which has seen one batch in `world_size`. Each rank still normalizes by its own
    batch, as the learning rate was tuned for a batch of that size; `nn.SyncBatchNorm` normalizes by the global one. The
    mean that results is that of one process with the global batch. The variance leaves out how far the ranks' means lie
    apart, which for shuffled examples is made up for by Bessel's correction.

    Args:
        joint: The module that every rank calls, under DDP or FSDP. Within DDP's `no_sync`, nothing is averaged until
            the first pass after it.
        weight: Gives this rank's share in the mean of the pass; over all ranks, shares average to 1 (`data.Part`).
    """
    layers = [
        layer
        for layer in joint.modules()
        if isinstance(layer, _NormBase) and layer.running_mean is not None and not isinstance(layer, nn.SyncBatchNorm)
    ]
    if not layers:
        return

    @torch.no_grad()
    def average(module: nn.Module, *_: Any) -> None:
        pairs = [(layer.running_mean, layer.running_var) for layer in layers if layer.training]
        tensors = [t for pair in pairs for t in pair if t is not None]
        if not tensors or not getattr(module, "require_backward_grad_sync", True):
            return
        wide = [t.to(torch.promote_types(t.dtype, torch.float32)).flatten() for t in tensors]
        means = torch.cat(wide) * (weight() / dist.get_world_size())
        dist.all_reduce(means)
        for tensor, mean in zip(tensors, means.split([t.numel() for t in tensors])):
            # Through `.data`: the backward pass of a training step has no use for them, but counts changes.
            tensor.data.copy_(mean.view_as(tensor))

    joint.register_forward_hook(average)


class Joint(nn.Module):
    """Model and objective as one module: DDP follows what happens in a forward pass, objectives included."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self._objective, self._turns = objective, turns(objective)
        some = next(p for p in model.parameters() if p.requires_grad)
        # DDP looks for unused parameters, and prints that it looked in vain where it finds none.
        self.unused = nn.Parameter(torch.zeros(1, dtype=some.dtype, device=some.device))

    def forward(self, batch: Batch, whole: bool = False, part: str | None = None) -> dict[str, Tensor]:
        """Return the metrics of the objective, or of one part, by default without outputs and targets."""
        metrics = (self._objective if part is None else self._turns[part])(self.model, batch)
        return dict(metrics) if whole else scalars(metrics)  # in other mappings, DDP sees no tensors
