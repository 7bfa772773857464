"""Reading of integer buffers as plain numbers, such as the count of batches in batch normalization."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fusion.evaluate.rules.member import Member, Rule


def readable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors; those of integers and booleans get a mark, so that the rules of `number` may read them."""
    return {name: _marked(tensor) if tensor.dtype in _WHOLE else tensor for name, tensor in tensors.items()}


def number(kind: Callable[[Any], Any]) -> Rule:
    """Make a rule for `float(tensor)` and the like, for tensors that `readable` has marked.

    The rule raises a `RuntimeError` unless all members hold the same number. If a tensor is not marked, torch raises an
    error, because members that agree on one batch may differ on the next.

    Args:
        kind: Converts the number to the result.
    """

    def rule(K: int, tensor: Member) -> Any:
        if tensor.dim is None or not vars(tensor.value).get("held") or tensor.value.numel() != K:
            return NotImplemented
        first = tensor.value.flatten()[0].item()
        if not bool((tensor.value == first).all()):
            raise RuntimeError(f"it makes a number of a counter, but members have counted {tensor.value.tolist()}")
        return kind(first)

    return rule


READING: dict[Any, Rule] = {
    Tensor.__float__: number(float),
    Tensor.__int__: number(int),
    Tensor.__bool__: number(bool),
    Tensor.item: number(lambda value: value),
}


_WHOLE = frozenset((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))


def _marked(tensor: Tensor) -> Tensor:
    alias = tensor.detach()
    vars(alias)["held"] = True
    return alias
