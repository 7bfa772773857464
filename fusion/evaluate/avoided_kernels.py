"""Switches off kernels of torch that fail on views, because a member's parameters are views of stacked ones."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn


@contextmanager
def avoiding_kernels(template: nn.Module, tensors: Iterable[Tensor], vmapped: bool = False) -> Iterator[None]:
    """Let `template` run with parameters that are views, inside this context, if one of `tensors` is on a GPU.

    Recurrent layers do not copy their weights into one chunk, because vmapped weights have no address to copy from. In
    addition, a recorded CUDA graph would read the first copy forever. Attention does not use torch's kernels for
    inference, because they read 16 aligned bytes at once. On an unaligned view they fail with "misaligned address", and
    the process can no longer use the GPU.

    If `vmapped` is True, the attention kernels are off on a CPU, too. `nn.TransformerEncoder` then does not pack
    padded sequences in evaluation, because vmap cannot follow that.
    """
    on_gpu = any(tensor.is_cuda for tensor in tensors)
    if not (on_gpu or vmapped):
        yield
        return
    layers = [module for module in template.modules() if isinstance(module, nn.RNNBase)] if on_gpu else []
    for layer in layers:
        vars(layer)["flatten_parameters"] = _leave
    try:
        with without_fast_attention(), warnings.catch_warnings() if layers else nullcontext():
            if layers:
                warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
            yield
    finally:
        for layer in layers:
            vars(layer).pop("flatten_parameters", None)


_LOCK = threading.Lock()
# One entry for each open `without_fast_attention` block of any thread: torch's setting before the first of them.
_were_on: list[bool] = []


@contextmanager
def without_fast_attention() -> Iterator[None]:
    """Switch off torch's attention kernels for inference, inside this context. Several threads may enter it at once."""
    with _LOCK:
        _were_on.append(_were_on[0] if _were_on else torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        with _LOCK:
            before = _were_on.pop()
            if not _were_on:
                torch.backends.mha.set_fastpath_enabled(before)


def _leave() -> None:
    """Do nothing. This function replaces `flatten_parameters`, so that weights stay where they are."""
