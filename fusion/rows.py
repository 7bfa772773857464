"""Tensors of K members side by side in memory: row k of a [K, N] holds all that is member k's.

What touches each of a model's parameters takes as many operations as there are parameters; on rows, it takes one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fusion.kept import kept
from fusion.members import member_rows

Layout = Mapping[torch.dtype, Mapping[str, torch.Size]]
"""What stands in the rows of each type, in order: name -> shape of one member's."""


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """The layout of tensors [K, ...].

    >>> layout_of({"weight": torch.zeros(5, 2, 3), "bias": torch.zeros(5, 2)})
    {torch.float32: {'weight': torch.Size([2, 3]), 'bias': torch.Size([2])}}
    """
    layout: dict[torch.dtype, dict[str, torch.Size]] = {}
    for name, tensor in tensors.items():
        layout.setdefault(tensor.dtype, {})[name] = tensor.shape[1:]
    return layout


class Rows:
    """Tensors by name that lie side by side, those of one type in one [K, N].

    Attributes:
        layout: What is where.
        by_dtype: Type -> [K, N].
        parts: Name -> [K, ...], a view.
    """

    def __init__(self, layout: Layout, by_dtype: Mapping[torch.dtype, Tensor]) -> None:
        self.layout, self.by_dtype = layout, dict(by_dtype)
        self.parts: dict[str, Tensor] = {}
        for dtype, shapes in layout.items():
            columns = self.by_dtype[dtype].split([shape.numel() for shape in shapes.values()], 1)
            for (name, shape), part in zip(shapes.items(), columns, strict=True):
                self.parts[name] = part.view(len(part), *shape)

    @classmethod
    def zeros(cls, layout: Layout, K: int, device: torch.device) -> Rows:
        """Rows of zeros."""
        widths = {dtype: sum(shape.numel() for shape in shapes.values()) for dtype, shapes in layout.items()}
        return cls(layout, {dtype: torch.zeros(K, N, dtype=dtype, device=device) for dtype, N in widths.items()})

    def keep(self, chosen: Sequence[int]) -> Rows:
        """A copy with these members alone, in this order."""
        return Rows(self.layout, {dtype: member_rows(rows, chosen) for dtype, rows in self.by_dtype.items()})

    def concat(self, other: Rows) -> Rows:
        """A copy with another's members after its own."""
        joined = {dtype: torch.cat([a, other.by_dtype[dtype].to(a.device)]) for dtype, a in self.by_dtype.items()}
        return Rows(self.layout, joined)


class FlatParameters:
    """Stacked parameters and their gradients in rows.

    The parameters become views of the rows: what is done to one is done to the other. Parameters that are replaced
    later (by `FusedModel.keep`, `.to(device)`, copying) leave the rows, which `holds` tells.

    Args:
        parameters: Name -> [K, ...], on one device.

    Attributes:
        values: The parameters.
        gradients: Their gradients, as of the last `gather`.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        layout = layout_of(parameters)
        by_dtype = {dtype: torch.cat([_flat(parameters[name]) for name in names], 1) for dtype, names in layout.items()}
        self.values = Rows(layout, by_dtype)
        self.gradients = Rows(layout, {dtype: torch.zeros_like(rows) for dtype, rows in by_dtype.items()})
        for name, part in self.values.parts.items():
            parameters[name].data = part
        self._places = {name: part.data_ptr() for name, part in self.values.parts.items()}
        self._constants: dict[tuple[tuple[float, ...], torch.dtype], Tensor] = {}

    def __deepcopy__(self, memo: object) -> None:
        """None: a copy's parameters lie elsewhere."""

    def holds(self, parameters: Mapping[str, nn.Parameter]) -> bool:
        """Whether just these parameters are views of the rows."""
        return parameters.keys() == self._places.keys() and all(
            parameter.data_ptr() == self._places[name] for name, parameter in parameters.items()
        )

    def gather(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Bring the gradients into the rows, of which they then are views; without one, zeros stand in its place."""
        for dtype, names in self.gradients.layout.items():
            parts = [self.gradients.parts[name] for name in names]
            grads = [parameters[name].grad for name in names]
            if all(grad is part for grad, part in zip(grads, parts)):
                continue
            there = [grad for grad in grads if grad is not None and grad.numel()]
            if len(there) == len(grads) and all(grad.is_contiguous() for grad in there):
                # On a GPU one kernel, where copies into columns are one each.
                rows = self.gradients.by_dtype[dtype]
                torch._chunk_cat(there, 0, len(rows), out=rows)
            else:
                _copy_those_there(parts, grads)
            for name, part, grad in zip(names, parts, grads):
                if grad is not None:
                    parameters[name].grad = part

    def on_device(self, numbers: tuple[float, ...], dtype: torch.dtype) -> Tensor:
        """One number for each member as [K, 1], copied to the device once and then kept."""
        device = next(iter(self.values.by_dtype.values())).device
        return kept(
            self._constants, (numbers, dtype), lambda: torch.tensor(numbers, dtype=dtype, device=device)[:, None]
        )


def _flat(parameter: Tensor) -> Tensor:
    """[K, ...] as [K, N]."""
    return parameter.detach().reshape(len(parameter), parameter[0].numel())


def _copy_those_there(parts: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    if without := [part for part, grad in zip(parts, grads) if grad is None]:
        torch._foreach_zero_(without)
    if pairs := [(part, grad) for part, grad in zip(parts, grads) if grad is not None and grad is not part]:
        torch._foreach_copy_([part for part, _ in pairs], [grad for _, grad in pairs])
