"""Places in a module that hold floats. Members may differ in these floats."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

from torch import nn

_PROBABILITIES = ((nn.modules.dropout._DropoutNd, "p"), (nn.MultiheadAttention, "dropout"))
"""Classes of layers, and the attribute in which each keeps a dropout probability as it was given."""


@dataclass(frozen=True)
class FloatSlot:
    """A place inside a module that holds a float and can be written to.

    Attributes:
        owner: The object that holds the float as an attribute or an item.
        key: The name of the attribute, or its descriptor if it is in `__slots__`. If `item` is True, the key or index.
        item: True if the owner is a dict or a list that holds the float as an item.
    """

    owner: Any
    key: Any
    item: bool = False

    def get(self) -> Any:
        if isinstance(self.key, types.MemberDescriptorType):
            return self.key.__get__(self.owner)
        return self._type().__getitem__(self._items(), self.key)

    def set(self, value: Any) -> None:
        """Write `value` directly, without calling a `__setattr__` or `__setitem__` of the owner."""
        if isinstance(self.key, types.MemberDescriptorType):
            self.key.__set__(self.owner, value)
        else:
            self._type().__setitem__(self._items(), self.key, value)

    def _items(self) -> Any:
        return self.owner if self.item else vars(self.owner)

    def _type(self) -> Any:
        return list if self.item and isinstance(self.owner, list) else dict


def is_number(value: Any, cls: type) -> bool:
    """Return whether a value is a float of Python or NumPy. A user's subclass is not, as it may behave differently."""
    return cls is float or (isinstance(value, float) and cls.__module__ == "numpy")


def is_probability(value: Any, slot: FloatSlot | None) -> bool:
    """Return whether a value is an int that is a dropout probability, as in `nn.Dropout(0)`. It counts as a float."""
    if type(value) is not int or slot is None:
        return False
    return any(slot.key == name and isinstance(slot.owner, kind) for kind, name in _PROBABILITIES)
