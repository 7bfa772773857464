"""Places of a module that hold a float that may differ from member to member."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

from torch import nn

_DROPOUTS = nn.modules.dropout._DropoutNd


@dataclass(frozen=True)
class FloatSlot:
    """A place inside a module that holds a float and can hold another.

    Attributes:
        key: The name of an attribute, or the descriptor of one in `__slots__`; if `item`, the key of the item.
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
        """Write `value`, past any `__setattr__` or `__setitem__` that the owner may have."""
        if isinstance(self.key, types.MemberDescriptorType):
            self.key.__set__(self.owner, value)
        else:
            self._type().__setitem__(self._items(), self.key, value)

    def _items(self) -> Any:
        return self.owner if self.item else vars(self.owner)

    def _type(self) -> Any:
        return list if self.item and isinstance(self.owner, list) else dict


def is_number(value: Any, cls: type) -> bool:
    """Return whether a value is a float or numpy's; a user's own kind of float may do anything."""
    return cls is float or (isinstance(value, float) and cls.__module__ == "numpy")


def is_probability(value: Any, slot: FloatSlot | None) -> bool:
    """Return whether an int is a dropout's probability: `nn.Dropout(0)` holds an int, `nn.Dropout(0.1)` a float."""
    return type(value) is int and slot is not None and slot.key == "p" and isinstance(slot.owner, _DROPOUTS)
