"""Tensors of K members side by side in memory: row k of a [K, N] holds all values of member k.

A computation over all of a model's parameters takes one operation for each parameter; on rows, it takes one in all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusion.members.bounded_cache import kept
from fusion.members.member_indices import copy_rows, member_rows

LARGE = 2**14
"""A tensor with at least this many elements in a member has rows of its own on a CPU.

If a tensor shares a row with others, there are gaps between its members. An operator that takes them as one matrix,
such as a first layer whose input all share, copies them first. For large tensors, a few more operations cost less.
"""


class Block(NamedTuple):
    """The content of one [K, N]: tensors of one type, or of one part of the model, or one that is `alone`."""

    dtype: torch.dtype
    alone: str = ""
    part: str = ""


Layout = Mapping[Block, Mapping[str, torch.Size]]
"""Content of the rows of each block, in order: name -> shape of one member's tensor."""


def layout_of(tensors: Mapping[str, Tensor], parts: Mapping[str, str] = {}) -> Layout:
    """Return the layout of tensors [K, ...]; those of different parts of the model have rows of their own.

    >>> layout_of({"weight": torch.zeros(5, 4, 3), "bias": torch.zeros(5, 4)})
    {Block(dtype=torch.float32, alone='', part=''): {'weight': torch.Size([4, 3]), 'bias': torch.Size([4])}}
    """
    layout: dict[Block, dict[str, torch.Size]] = {}
    for name, tensor in tensors.items():
        shape = tensor.shape[1:]
        # A tensor of pairs can be viewed as complex numbers; none of these may begin inside a pair.
        alone = (tensor.device.type == "cpu" and shape.numel() >= LARGE) or shape[-1:] == (2,)
        layout.setdefault(Block(tensor.dtype, name if alone else "", parts.get(name, "")), {})[name] = shape
    return layout


def make_dense(parameters: Iterable[Tensor]) -> None:
    """Replace gradients that are sparse, which do not fit in rows, by dense ones."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            parameter.grad = parameter.grad.to_dense()


class Rows:
    """Tensors by name that lie side by side, those of one block in one [K, N].

    Attributes:
        blocks: Block -> [K, N].
        parts: Name -> [K, ...], a view.
    """

    def __init__(self, layout: Layout, blocks: Mapping[Block, Tensor]) -> None:
        self.layout, self.blocks = layout, dict(blocks)
        self.parts: dict[str, Tensor] = {}
        for block, shapes in layout.items():
            columns = self.blocks[block].split([shape.numel() for shape in shapes.values()], 1)
            for (name, shape), part in zip(shapes.items(), columns, strict=True):
                self.parts[name] = part.view(len(part), *shape)

    def __reduce__(self) -> Any:
        """Have `pickle` make the views anew; it would copy each by itself."""
        return Rows, (self.layout, self.blocks)

    @classmethod
    def zeros(cls, layout: Layout, K: int, device: torch.device) -> Rows:
        widths = {block: sum(shape.numel() for shape in shapes.values()) for block, shapes in layout.items()}
        return cls(layout, {block: torch.zeros(K, N, dtype=block.dtype, device=device) for block, N in widths.items()})

    @classmethod
    def of(cls, layout: Layout, tensors: Mapping[str, Tensor]) -> Rows:
        """Copy tensors [K, ...] into rows."""
        return cls(layout, {block: torch.cat([_flat(tensors[name]) for name in of], 1) for block, of in layout.items()})

    def keep(self, chosen: Sequence[int]) -> Rows:
        """Return a copy with these members alone, in this order."""
        return Rows(self.layout, {block: member_rows(rows, chosen) for block, rows in self.blocks.items()})

    def overwrite(self, targets: Sequence[int], sources: Sequence[int]) -> None:
        """Write members' rows over those of others, in place."""
        for rows in self.blocks.values():
            copy_rows(rows, targets, sources)

    def concat(self, other: Rows) -> Rows:
        """Return a copy with another's members after its own."""
        joined = {n: torch.cat([part, other.parts[n].to(part.device)]) for n, part in self.parts.items()}
        return Rows.of(self.layout, joined)


class FlatParameters:
    """Stacked parameters and their gradients in rows.

    The parameters become views of the rows: a change of one changes the other. Parameters that are replaced later (by
    `FusedModel.keep`, `.to(device)`, copying) leave the rows. `holds` tells whether all are still there.

    Attributes:
        gradients: Their gradients, as of the last `gather`.
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
        """Return whether these parameters, and no others, are views of the rows."""
        return parameters.keys() == self._places.keys() and all(
            parameter.data_ptr() == self._places[name] for name, parameter in parameters.items()
        )

    def gather(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Copy the gradients into the rows and make them views of these; a missing gradient becomes zeros there.

        Args:
            parameters: All, or all of some parts of the model.
        """
        for block, names in self.gradients.layout.items():
            if not names.keys() <= parameters.keys():
                continue
            parts = [self.gradients.parts[name] for name in names]
            grads = [parameters[name].grad for name in names]
            if all(grad is part for grad, part in zip(grads, parts)):
                continue
            there = [grad for grad in grads if grad is not None and grad.numel()]
            if len(there) == len(grads) and all(grad.is_contiguous() for grad in there):
                # On a GPU this is one kernel; copies into columns are one kernel each.
                rows = self.gradients.blocks[block]
                torch._chunk_cat(there, 0, len(rows), out=rows)
            else:
                _copy_those_there(parts, grads)
            for name, part, grad in zip(names, parts, grads):
                if grad is not None:
                    parameters[name].grad = part

    def on_device(self, numbers: tuple[float, ...], dtype: torch.dtype) -> Tensor:
        """Return one number for each member as [K, 1], copied to the device once and then kept."""
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
