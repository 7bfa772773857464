"""Tensors of K members side by side in memory: row k of a matrix [K, N] holds all values of member k.

A computation over all parameters then takes one operation, instead of one for each parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusion.members.bounded_cache import kept
from fusion.members.member_indices import copy_rows, member_rows

LARGE = 2**14
"""On a CPU, a tensor with at least this many elements per member gets its own matrix [K, N].

If several tensors share a matrix, none of them is contiguous: other values lie between those of two members. If an
operator needs a contiguous tensor, such as a first layer whose input all members share, it copies the tensor first.
For a large tensor, operations on a matrix of its own cost less than such copies.
"""


class Block(NamedTuple):
    """Identifies one matrix [K, N]: tensors of one dtype and one part of the model, or a single tensor `alone`."""

    dtype: torch.dtype
    alone: str = ""
    part: str = ""


Layout = Mapping[Block, Mapping[str, torch.Size]]
"""The tensors in each block, in the order of columns: name -> shape of one member's tensor."""


def layout_of(tensors: Mapping[str, Tensor], parts: Mapping[str, str] = {}) -> Layout:
    """Return how tensors [K, ...] lie in matrices [K, N], the blocks. Each part of the model has its own blocks.

    >>> layout_of({"weight": torch.zeros(5, 4, 3), "bias": torch.zeros(5, 4)})
    {Block(dtype=torch.float32, alone='', part=''): {'weight': torch.Size([4, 3]), 'bias': torch.Size([4])}}
    """
    layout: dict[Block, dict[str, torch.Size]] = {}
    for name, tensor in tensors.items():
        shape = tensor.shape[1:]
        # A tensor of pairs gets its own matrix. Code may view it as complex numbers, which must begin at an even offset
        # in memory.
        alone = (tensor.device.type == "cpu" and shape.numel() >= LARGE) or shape[-1:] == (2,)
        layout.setdefault(Block(tensor.dtype, name if alone else "", parts.get(name, "")), {})[name] = shape
    return layout


def make_dense(parameters: Iterable[Tensor]) -> None:
    """Replace sparse gradients by dense ones, because sparse ones do not fit in rows."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            parameter.grad = parameter.grad.to_dense()


class Rows:
    """Named tensors of K members that lie side by side in memory: each block is one matrix [K, N].

    Attributes:
        blocks: Block -> its matrix [K, N].
        parts: Name of a tensor -> the tensor [K, ...], a view of its block.
    """

    def __init__(self, layout: Layout, blocks: Mapping[Block, Tensor]) -> None:
        self.layout, self.blocks = layout, dict(blocks)
        self.parts: dict[str, Tensor] = {}
        for block, shapes in layout.items():
            columns = self.blocks[block].split([shape.numel() for shape in shapes.values()], 1)
            for (name, shape), part in zip(shapes.items(), columns, strict=True):
                self.parts[name] = part.view(len(part), *shape)

    def __reduce__(self) -> Any:
        """Pickle only the blocks, and make the views again on loading. By default, `pickle` would copy each view."""
        return Rows, (self.layout, self.blocks)

    @classmethod
    def zeros(cls, layout: Layout, K: int, device: torch.device) -> Rows:
        widths = {block: sum(shape.numel() for shape in shapes.values()) for block, shapes in layout.items()}
        return cls(layout, {block: torch.zeros(K, N, dtype=block.dtype, device=device) for block, N in widths.items()})

    @classmethod
    def of(cls, layout: Layout, tensors: Mapping[str, Tensor]) -> Rows:
        """Copy tensors [K, ...] into new rows, one matrix for each block of `layout`."""
        return cls(layout, {block: torch.cat([_flat(tensors[name]) for name in of], 1) for block, of in layout.items()})

    def keep(self, chosen: Sequence[int]) -> Rows:
        """Return a copy with only the chosen members, in this order."""
        return Rows(self.layout, {block: member_rows(rows, chosen) for block, rows in self.blocks.items()})

    def overwrite(self, targets: Sequence[int], sources: Sequence[int]) -> None:
        """Copy the rows of the members `sources` to those of `targets`, in place."""
        for rows in self.blocks.values():
            copy_rows(rows, targets, sources)

    def concat(self, other: Rows) -> Rows:
        """Return a copy to which the members of `other` are appended."""
        joined = {n: torch.cat([part, other.parts[n].to(part.device)]) for n, part in self.parts.items()}
        return Rows.of(self.layout, joined)


class FlatParameters:
    """Stacked parameters and their gradients in rows.

    The parameters become views of the rows, so both always have the same values. If a parameter is replaced later (by
    `FusedModel.keep`, `.to(device)` or copying), it is no view any more. `holds` tells whether all still are views.

    Attributes:
        values: The parameters.
        gradients: Their gradients, as of the last call of `gather`.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], parts: Mapping[str, str] = {}) -> None:
        layout = layout_of(parameters, parts)
        self.values = Rows.of(layout, parameters)
        self.gradients = Rows(layout, {block: torch.zeros_like(rows) for block, rows in self.values.blocks.items()})
        for name, part in self.values.parts.items():
            parameters[name].data = part
        self._places = {name: part.data_ptr() for name, part in self.values.parts.items()}
        self._constants: dict[tuple[tuple[float, ...], torch.dtype], Tensor] = {}

    def holds(self, parameters: Mapping[str, nn.Parameter]) -> bool:
        """Return whether these parameters are still exactly the views of the rows: none is missing, new or replaced."""
        return parameters.keys() == self._places.keys() and all(
            parameter.data_ptr() == self._places[name] for name, parameter in parameters.items()
        )

    def gather(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Copy gradients into the rows, and make each `grad` a view of the rows. A missing gradient counts as zeros.

        Args:
            parameters: All parameters, or all parameters of some parts of the model.
        """
        for block, names in self.gradients.layout.items():
            if not names.keys() <= parameters.keys():
                continue
            parts = [self.gradients.parts[name] for name in names]
            grads = [parameters[name].grad for name in names]
            if all(grad is part for grad, part in zip(grads, parts)):
                continue
            there = [grad for grad in grads if grad is not None and grad.numel()]
            new = all(grad is not part for grad, part in zip(grads, parts))
            if new and len(there) == len(grads) and all(grad.is_contiguous() for grad in there):
                # On a GPU, `_chunk_cat` takes one kernel, while copies into the columns take one kernel each.
                rows = self.gradients.blocks[block]
                torch._chunk_cat(there, 0, len(rows), out=rows)
            else:
                _copy_those_there(parts, grads)
            for name, part, grad in zip(names, parts, grads):
                if grad is not None:
                    parameters[name].grad = part

    def on_device(self, numbers: tuple[float, ...], dtype: torch.dtype) -> Tensor:
        """Return `numbers`, one for each member, as a tensor [K, 1] on the rows' device. The tensor is cached."""
        device = next(iter(self.values.blocks.values())).device
        return kept(
            self._constants, (numbers, dtype), lambda: torch.tensor(numbers, dtype=dtype, device=device)[:, None]
        )


def _flat(parameter: Tensor) -> Tensor:
    """Flatten [K, ...] to [K, N]."""
    return parameter.detach().reshape(len(parameter), parameter[0].numel())


def _copy_those_there(parts: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    if without := [part for part, grad in zip(parts, grads) if grad is None]:
        torch._foreach_zero_(without)
    if pairs := [(part, grad) for part, grad in zip(parts, grads) if grad is not None and grad is not part]:
        torch._foreach_copy_([part for part, _ in pairs], [grad for _, grad in pairs])
