"""Floats inside modules (dropout probability, label smoothing, multipliers) that differ from member to member."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fusion.structure import describe


class Settings:
    """The floats in which members differ; those that all have in common stay plain numbers in the module.

    Args:
        template: the module that computes for all members.
        floats: for each of the K members, path -> value, as `Structure.float_values` lists them.

    Attributes:
        values_K: path -> [K], float64 on the CPU.
    """

    def __init__(self, template: nn.Module, floats: Sequence[Mapping[str, float]]) -> None:
        slots = describe(template).floats
        differing = [path for path in slots if len({member[path] for member in floats}) > 1]
        self._slots = {path: slots[path] for path in differing}
        self.values_K = {
            path: torch.tensor([member[path] for member in floats], dtype=torch.float64) for path in differing
        }

    def on(self, device: torch.device) -> dict[str, Tensor]:
        """The values, [K] each, on a device."""
        self.values_K = {path: value.to(device) for path, value in self.values_K.items()}
        return self.values_K

    @contextmanager
    def bound(self, values: Mapping[str, Any]) -> Iterator[None]:
        """Put one member's values, numbers or 0-dimensional tensors, in their places for a while."""
        before = {path: slot.get() for path, slot in self._slots.items()}
        for path, slot in self._slots.items():
            slot.set(values[path])
        try:
            yield
        finally:
            for path, slot in self._slots.items():
                slot.set(before[path])
