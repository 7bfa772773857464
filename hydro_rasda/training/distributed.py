"""Train one full-size model on several ranks: let them meet, split its parameters, and average BatchNorm statistics.

Ranks meet through a file on their machine, or through a store on the network. If a model is split (FSDP2,
`torch.distributed.fsdp.fully_shard`), each rank holds a shard of every parameter, gradient and optimizer state. While a
layer computes, its parameters are gathered. A saved state is whole, so that it loads on any number of ranks.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
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
"""A store of torch.distributed; torch exports no type for it."""

ARRIVAL = timedelta(minutes=5)
"""How long the first ranks wait for the last one to start."""


def file_store(path: Path, world: int) -> Store:
    """Return a store in a file, by which ranks of one machine find each other.

    No other user should be able to enter the file's folder.
    """
    # Let gloo listen on the loopback interface only. By default, it listens on all interfaces, and anyone who reaches
    # the machine could write into the training.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    return dist.FileStore(str(path), world)  # type: ignore[attr-defined]  # not exported


def listening_store(host: str) -> Store:
    """Return the store by which ranks find each other, for rank 0: it listens at the address `host` of its machine."""
    listener = _listener(host)
    if listener is None:
        return _tcp_store(host, 0, is_master=True)
    # Give the store a socket that listens at `host` only. By default, it listens on all interfaces, and anyone who
    # reaches the machine could write to it.
    return _tcp_store(host, listener.getsockname()[1], is_master=True, master_listen_fd=listener.detach())


def reached_store(host: str, port: int) -> Store:
    """Return the store by which ranks find each other, for other ranks: it connects to rank 0's at this address."""
    return _tcp_store(host, port, is_master=False)


def await_ranks(store: Store, rank: int, world: int, event: str = "here") -> None:
    """Announce that this rank has come to `event`, and wait up to `ARRIVAL` for the other ranks.

    The timeout of the process group is longer, and is meant for ranks that have started.
    """
    store.set(f"{event}{rank}", "")
    store.wait([f"{event}{other}" for other in range(world)], ARRIVAL)


def await_joined(store: Store, rank: int, world: int) -> None:
    """Wait until all ranks have joined the default process group; each rank calls it after it has joined.

    Without this wait, a training function that returns at once could end its process while another rank still connects
    to it.
    """
    # The other ranks ignore that the store is gone, because rank 0 holds it. Rank 0 has then seen all ranks join and is
    # done, or its failure is reported elsewhere.
    with suppress(dist.DistError) if rank else nullcontext():
        await_ranks(store, rank, world, "joined")


def _tcp_store(host: str, port: int, is_master: bool, master_listen_fd: int | None = None) -> Store:
    return dist.TCPStore(  # type: ignore[attr-defined]  # not exported
        host, port, is_master=is_master, timeout=ARRIVAL, wait_for_workers=False, master_listen_fd=master_listen_fd
    )


def _listener(host: str) -> socket.socket | None:
    """Return a socket that listens at this address only; None if this machine lacks the address, as behind a NAT."""
    try:
        return socket.create_server((host, 0), backlog=1024)
    except OSError:
        return None


# The functions below import FSDP when they run, because importing FSDP takes longer than importing this package.


def split(module: nn.Module, world: int, device: torch.device) -> None:
    """Split a module's parameters over the ranks of the default process group, in place; each rank calls it.

    The parameters of an entry of an `nn.ModuleList`, such as a transformer's layer, are gathered while the entry
    computes. All other parameters stay gathered while the module computes.

    Args:
        module: A module on its device, with the same weights on all ranks. Only its `forward` may use its parameters.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = init_device_mesh(device.type, (world,))
    for lists in [part for part in reversed([*module.modules()]) if isinstance(part, nn.ModuleList)]:
        for block in lists:
            if next(block.parameters(), None) is not None and not isinstance(block, FSDPModule):  # it may come twice
                fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(module, mesh=mesh, reshard_after_forward=True)


@contextmanager
def apart(module: nn.Module) -> Iterator[None]:
    """Within this context, gradients of a split module add up on each rank without averaging, as in DDP's `no_sync`."""
    from torch.distributed.fsdp import FSDPModule

    assert isinstance(module, FSDPModule)
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


def whole(state: Any, keep: bool) -> Any:
    """Return a state on the CPU, with split tensors gathered; each rank calls it.

    Tensors are gathered one at a time. If `keep` is false, the rank gets None for each tensor.
    """
    from torch.distributed.tensor import DTensor

    def of(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tensor = leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
        return tensor.detach().cpu() if keep else None

    return tree_map(of, state)


def split_like(values: Mapping[Any, Any], tensors: Mapping[Any, Tensor]) -> dict[Any, Any]:
    """Split each whole tensor in `values` over the ranks, as the tensor of the same name in `tensors` is split.

    A value stays whole if `tensors` has no split tensor of its name and shape.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor

    def of(name: Any, value: Any) -> Any:
        like = tensors.get(name)
        if not isinstance(like, DTensor) or not isinstance(value, Tensor) or value.shape != like.shape:
            return value
        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)

    return {name: of(name, value) for name, value in values.items()}


def average_statistics(joint: nn.Module, weight: Callable[[], float] = lambda: 1.0) -> None:
    """Average the running statistics of BatchNorm over the ranks after each forward pass in training.

    DDP alone keeps the statistics of rank 0, which has seen only its own batches. Each rank still normalizes by its own
    batch, because the learning rate was tuned for a batch of that size. (`nn.SyncBatchNorm` normalizes by the global
    batch.) The resulting mean equals that of one process with the global batch. The variance omits the variance between
    the ranks' means; for shuffled examples, Bessel's correction makes up for this.

    Args:
        joint: The module that every rank calls, under DDP or FSDP. Within DDP's `no_sync`, nothing is averaged until
            the first forward pass afterwards.
        weight: Returns this rank's weight in the mean. Over all ranks, weights average to 1 (`data.Part`).
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
            # Write through `.data`, so that autograd's version counter does not count the change. The backward pass
            # does not need these values.
            tensor.data.copy_(mean.view_as(tensor))

    joint.register_forward_hook(average)


class Joint(nn.Module):
    """Model and objective as one module, because DDP prepares gradients only in the forward pass of its module."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self._objective, self._turns = objective, turns(objective)
        some = next(p for p in model.parameters() if p.requires_grad)
        # DDP warns if it looks for unused parameters and finds none. So this parameter exists, which no step uses.
        self.unused = nn.Parameter(torch.zeros(1, dtype=some.dtype, device=some.device))

    def forward(self, batch: Batch, whole: bool = False, part: str | None = None) -> dict[str, Tensor]:
        """Return the metrics of the objective, or of its part `part`; with outputs and targets if `whole` is true."""
        metrics = (self._objective if part is None else self._turns[part])(self.model, batch)
        return dict(metrics) if whole else scalars(metrics)  # DDP finds tensors in a dict, not in other mappings
