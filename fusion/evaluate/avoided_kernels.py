"""Kernels that take a module's own parameters, but not a member's part of stacked ones, are avoided."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn


@contextmanager
def avoiding_kernels(template: nn.Module, tensors: Iterable[Tensor], vmapped: bool = False) -> Iterator[None]:
    """Inside, modules whose tensors are on a GPU take parameters that are views, at any place in memory.

    Recurrent layers would copy their weights into one chunk: under vmap these have no place in memory, and a recorded
    step would read the first copy for ever. Attention's kernels for inference read 16 bytes at once. A view that begins
    between two such places is a "misaligned address", after which the process can use the GPU no more.

    Under vmap, on a CPU too, `nn.TransformerEncoder` packs no padded sequences in evaluation: vmap cannot follow that.
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
_were_on: list[bool] = []  # one for each that is inside


@contextmanager
def without_fast_attention() -> Iterator[None]:
    """Inside, attention does without torch's kernels for inference; any number of threads may be inside at once."""
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
    """Leave weights where they are."""
