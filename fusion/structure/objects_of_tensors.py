"""Batches that are objects, such as dataclasses: registers their classes with torch's pytrees if fields hold tensors.

Torch's pytree functions (`tree_map` and others) know tuples, lists, dicts and named tuples. Any other object is a leaf
for them. Without registration, its tensors are not moved to a device, split or copied.
"""

from __future__ import annotations

import copyreg
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import GetAttrKey, register_pytree_node, tree_leaves

LOOKED_INTO: set[type] = set()
"""The classes that `look_into` has registered."""

_CONTENT = ""
"""Name of the field for an object's items, if its class is derived from dict, list or tuple."""

_MADE_IN_PYTHON = 1 << 9
"""Python's flag for classes that are not static types in C (Py_TPFLAGS_HEAPTYPE)."""

_DEEPEST = 32
"""Largest depth of nested objects. Pytree functions recurse for each level, and Python allows about 1000 calls."""

Names = tuple[str, ...]


def look_into(batch: Any) -> Any:
    """Register with torch's pytrees the classes of all objects in a batch that hold tensors; return the batch.

    An object may have any class: a dataclass, a class of attrs, one with slots, or one derived from dict. Pytree
    functions copy it field by field, without a call of `__init__`. Some objects stay leaves: modules, torch's own
    objects, objects with weak references, objects that contain themselves, and chains longer than `_DEEPEST`.
    """
    if not isinstance(batch, Tensor):
        search = _Search()
        for leaf in [leaf for leaf in tree_leaves(batch) if not isinstance(leaf, Tensor) and search.finds_in(leaf)]:
            if type(leaf) not in search.endless:
                _register(type(leaf))
                look_into([*fields(leaf).values()])
    return batch


def fields(thing: Any) -> dict[str, Any]:
    """Return an object's attributes by name, including those in `__slots__`, and its items if it is a container."""
    found = dict(getattr(thing, "__dict__", {}))
    found |= {name: getattr(thing, name) for name in copyreg._slotnames(type(thing)) if hasattr(thing, name)}  # type: ignore[attr-defined]
    for kind in (dict, list, tuple):
        if isinstance(thing, kind):
            found[_CONTENT] = kind(thing)
    return found


def with_fields(kind: type, found: Mapping[str, Any]) -> Any:
    """Make an object of the class `kind` with these fields, without a call of `__init__`."""
    content = found.get(_CONTENT, ())
    # Find the first class that is written in C, such as `dict` or `object`.
    base: Any = next(each for each in kind.__mro__ if each.__flags__ & _MADE_IN_PYTHON == 0)
    thing = base.__new__(kind, content) if issubclass(kind, tuple) else base.__new__(kind)
    if issubclass(kind, dict):
        for key, value in content.items():
            base.__setitem__(thing, key, value)
    elif issubclass(kind, list):
        list.extend(thing, content)
    slots = {*copyreg._slotnames(kind)}  # type: ignore[attr-defined]
    for name, value in found.items():
        if name in slots:
            object.__setattr__(thing, name, value)  # works even if the class is frozen
        elif name != _CONTENT:
            vars(thing)[name] = value
    return thing


class _Search:
    """A search for tensors in objects that are leaves for torch's pytrees.

    Attributes:
        endless: Classes of objects that contain themselves or form a chain that is too long.
    """

    def __init__(self) -> None:
        self.endless: set[type] = set()
        self._above: list[Any] = []
        self._known: dict[int, tuple[Any, bool]] = {}  # id -> the object, whose id is then not reused, and the answer

    def finds_in(self, thing: Any) -> bool:
        """Return whether an object holds a tensor, directly or in other objects."""
        kind = type(thing)
        if isinstance(thing, (nn.Module, type)) or kind.__module__.split(".")[0] in ("builtins", "numpy", "torch"):
            return False
        for place, other in enumerate(self._above):
            if other is thing:
                self.endless.update(map(type, self._above[place:]))
                return False
        if len(self._above) == _DEEPEST:
            times = Counter(map(type, [*self._above, thing]))
            self.endless.update(each for each, count in times.items() if count > 1)
            return False
        if id(thing) not in self._known:
            leaves = tree_leaves([*fields(thing).values()])
            if any(isinstance(leaf, weakref.ReferenceType) for leaf in leaves):
                leaves = []
            self._above.append(thing)
            # Search all leaves, even after a tensor is found, because a later leaf may begin a chain that is too long.
            there = [isinstance(leaf, Tensor) or self.finds_in(leaf) for leaf in leaves]
            self._above.pop()
            self._known[id(thing)] = thing, any(there)
        return self._known[id(thing)][1]


def _register(kind: type) -> None:
    LOOKED_INTO.add(kind)
    register_pytree_node(kind, _taken_apart, partial(_put_together, kind), flatten_with_keys_fn=_with_keys)


def _taken_apart(thing: Any) -> tuple[list[Any], Names]:
    found = fields(thing)
    return [*found.values()], (*found,)


def _with_keys(thing: Any) -> tuple[list[tuple[Any, Any]], Names]:
    values, names = _taken_apart(thing)
    return [(GetAttrKey(name), value) for name, value in zip(names, values)], names


def _put_together(kind: type, values: Iterable[Any], names: Names) -> Any:
    return with_fields(kind, dict(zip(names, values, strict=True)))
