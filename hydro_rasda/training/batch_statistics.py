"""Running statistics of BatchNorm where several ranks train one model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase


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
