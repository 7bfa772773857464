"""Slices of an `nn.ParameterList` while a fused model is evaluated.

The list then holds members' tensors, which are no parameters. Torch would make parameters of the tensors in a slice, so
that no gradient would reach the members.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fusion.evaluate.replaced import Replaced


def _item(self: nn.ParameterList, at: Any) -> Any:
    get = parameter_lists.originals[nn.ParameterList]["__getitem__"]
    held = [get(self, i) for i in range(len(self))[at]] if isinstance(at, slice) else []
    if not any(isinstance(x, Tensor) and not isinstance(x, nn.Parameter) for x in held):
        return get(self, at)
    part: Any = type(self)()
    part._size = len(held)
    for i, x in enumerate(held):
        (part._parameters if isinstance(x, Tensor) else vars(part))[str(i)] = x
    return part


parameter_lists = Replaced({nn.ParameterList: {"__getitem__": _item}})
"""Context in which a slice of an `nn.ParameterList` holds the same tensors as the list."""
