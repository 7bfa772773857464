"""Tensors in memory: they lie on the device, and batches are picked there."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hydro_rasda.checks import require
from hydro_rasda.data.batch_splits import IndexedBatches, Rows, check_length
from hydro_rasda.data.batches import Batch


class TensorBatches(IndexedBatches):
    """Tensors of as many examples each; a batch is a tuple of as many, be it of one."""

    def __init__(self, tensors: tuple[Tensor, ...], argument: str, device: torch.device, seed: int) -> None:
        lengths = [len(t) if t.ndim else 0 for t in tensors]
        if len(set(lengths)) != 1:
            raise ValueError(f"`{argument}` has tensors of {lengths} examples, but must have as many of each")
        check_length(lengths[0], argument)
        for i, tensor in enumerate(tensors):
            require(not tensor.is_meta, f"{argument}[{i}].device", "meta", "one where a tensor has data")
        self._tensors = tuple(t.to(device) for t in tensors)
        self._length, self._seed, self._device = lengths[0], seed, device

    def _order(self, epoch: int) -> Tensor:
        return super()._order(epoch).to(self._tensors[0].device)

    def _load(self, parts: Sequence[Rows], seed: int) -> Iterator[Batch]:
        return map(self._take, parts)

    def _take(self, rows: Rows) -> Batch:
        at = rows if isinstance(rows, Tensor) else slice(rows.start, rows.stop, rows.step)
        # A slice shares memory with the whole: with the user's tensor, or with what Ray has mapped read-only.
        return tuple(t[at] if isinstance(rows, Tensor) else t[at].clone() for t in self._tensors)

    def on(self, device: torch.device) -> TensorBatches:
        moved = copy.copy(self)
        moved._tensors = tuple(t.to(device) for t in self._tensors)
        moved._device = device
        return moved

    def __getstate__(self) -> dict[str, Any]:
        """Tensors as bytes in arrays, which pickle's protocol 5, and so Ray, shares instead of copying them."""
        return {**self.__dict__, "_tensors": [to_bytes(t) for t in self._tensors]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        packed: list[Bytes] = state["_tensors"]
        self.__dict__.update(state, _tensors=tuple(from_bytes(p) for p in packed))

    def describe(self) -> str:
        return "tensors " + ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in self._tensors)


class Bytes(NamedTuple):
    """A tensor as pickle's protocol 5 shares it; see `to_bytes`."""

    content: np.ndarray[Any, np.dtype[np.uint8]]
    dtype: torch.dtype
    shape: tuple[int, ...]


def to_bytes(tensor: Tensor) -> Bytes:
    """A tensor's values, as bytes in an array; on the CPU, in the tensor's own memory where this is contiguous."""
    plain = tensor.detach().cpu().contiguous()
    return Bytes(plain.reshape(-1).view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape))


def from_bytes(packed: Bytes) -> Tensor:
    """The tensor that `to_bytes` packed, in the memory of those bytes."""
    with warnings.catch_warnings():
        # Torch warns of memory that must not be written to; nothing here does.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(packed.content).view(packed.dtype).reshape(packed.shape)
