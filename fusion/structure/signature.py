"""Description of a module by plain values: all that affects its computation, and the floats that may differ.

The values are types, kernel settings, activations, names and shapes of tensors, ties between tensors, and contents of
hooks. A float in a place that can be written to (an attribute, a dict, a list) is listed separately, because members of
a fused model may differ in it. A float in any other place (a tuple, a closure) is part of the structure. Only the
attributes in `ignored_attributes` are left out: if a module keeps a configuration, all of it counts. A value that
cannot be inspected counts as different from every other value.
"""

from __future__ import annotations

import functools
import logging
import sys
import types
import uuid
import weakref
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fusion.structure.float_slots import FloatSlot, is_number, is_probability
from fusion.structure.functions_and_classes import (
    BUILTINS,
    CLASS_NOTES,
    WRAPPERS,
    captured,
    found_by_name,
    name_of,
    own_globals,
    wrapped,
)
from fusion.structure.ignored_attributes import HOOK_ATTRIBUTES, PLAIN, STATELESS, TEXTS, skipped_of, skipped_of_module
from fusion.structure.module_parts import hooks_on, named_tensors
from fusion.structure.reduced_values import digest, memory, parts_of_copy, short, slots_of

UNKNOWN = "unlike all others"
"""First part of the entry for a value that cannot be inspected."""

HOOK = ".hooks."
"""In the path of a hook, this text stands between the path of the parameter and the kind of the hook."""


@dataclass
class Structure:
    """One module, described by plain values.

    Attributes:
        entries: (path, value) in the order of the walk: all that two modules must share to be fused. Paths are for
            error messages; different places may have the same path.
        floats: Path -> slot of each float in which modules may differ.
    """

    entries: list[tuple[str, Hashable]] = field(default_factory=list)
    floats: dict[str, FloatSlot] = field(default_factory=dict)


def describe(module: nn.Module) -> Structure:
    """Describe a module by plain values (a `Structure`), by walking through it once."""
    return _Walk(module).structure


class _Walk:
    def __init__(self, module: nn.Module) -> None:
        self.structure = Structure()
        # id of a visited object -> its path, and the object itself, because the id of a freed object may be reused.
        self._seen: dict[int, tuple[str, Any]] = {}
        # True while no float may differ between members, not even one in a place that can be written to.
        self._fixed = False
        # `_with_others` is True while the walk visits objects that the module would share with its copies, such as the
        # closure of a function. `_of_others` are the ids of these objects.
        self._with_others, self._of_others = False, set[int]()
        self._root = module
        modules = list(module.named_modules())
        for path, child in modules:
            self._seen[id(child)] = (path, child)
        # An attribute may hold a parameter or a buffer of a part that is walked later.
        self._tensors = {id(tensor): name for name, tensor in named_tensors(module).items()}
        for path, child in modules:
            self._module(path, child)

    @functools.cached_property
    def _memory(self) -> set[int]:
        """Return the memory addresses of parameters and buffers.

        They are computed only if the walk finds another tensor, because few modules hold one.
        """
        return {memory(tensor) for tensor in (*self._root.parameters(), *self._root.buffers())} - {0}

    def _note(self, path: str, value: Hashable) -> None:
        self.structure.entries.append((path, value))

    def _unknown(self, path: str, why: str) -> None:
        """Add an entry that equals no other in any process, so that the module fuses with no other, and say `why`."""
        self._note(path, (UNKNOWN, why, uuid.uuid4().hex))

    @contextmanager
    def _no_slots(self) -> Iterator[None]:
        before, self._fixed = self._fixed, True
        try:
            yield
        finally:
            self._fixed = before

    def _module(self, path: str, module: nn.Module) -> None:
        self._class(_join(path, "type"), type(module))
        children = ((name, child is not None and self._place(child)) for name, child in module._modules.items())
        self._note(_join(path, "modules"), tuple(children))
        for kind in ("_parameters", "_buffers"):
            for name, tensor in getattr(module, kind).items():
                self._registered(_join(path, name), tensor, kind[1:-1])
        skipped = skipped_of_module(module)
        for name, value in vars(module).items():
            if name in HOOK_ATTRIBUTES and value is not None:
                if value:
                    self._hooks(_join(path, name), name, vars(module))
            elif name not in skipped:
                self._value(_join(path, name), value, FloatSlot(module, name))

    def _place(self, child: nn.Module) -> str:
        return self._seen[id(child)][0]

    def _registered(self, path: str, tensor: Tensor | None, kind: str) -> None:
        if tensor is None:
            self._note(path, (kind, None))
            return
        first = self._tensors[id(tensor)]
        if first != path:
            self._note(path, ("tied to", first))
            return
        self._note(path, (kind, name_of(type(tensor)), tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad))
        with self._no_slots():
            self._attributes(path, tensor)
            for kind, hooks in hooks_on(tensor)._asdict().items():
                for i, hook in enumerate(hooks):
                    self._hook(f"{path}{HOOK}{kind}[{i}]", hook)

    def _hook(self, path: str, hook: Any) -> None:
        """Describe a hook on a parameter. In a copy of the module, modules in the hook's closure are copied, too."""
        if not isinstance(hook, types.FunctionType) or found_by_name(hook):
            self._value(path, hook)
            return
        self._note(path, ("function", name_of(hook)))
        for i, item in enumerate(captured(hook)):
            followed = isinstance(getattr(item, "__self__", item), nn.Module)
            (self._value if followed else self._shared)(f"{path}.captured[{i}]", item)

    def _hooks(self, path: str, name: str, attributes: dict[str, Any]) -> None:
        # Name a hook by its position, because its number counts the hooks of the whole process.
        hooks = attributes[name]
        of_all = list(attributes[name.partition("_hooks")[0] + "_hooks"])
        for number, hook in hooks.items():
            self._value(f"{path}[{of_all.index(number)}]", hook)

    def _handle(self, path: str, handle: RemovableHandle) -> None:
        """Describe a hook's handle by the path of the module that has the hook, and the hook's position there."""
        hooks = handle.hooks_dict_ref() or {}
        named = ((f"{path}.{name}", of) for path, own in self._root.named_modules() for name, of in vars(own).items())
        where = next((place for place, own in named if own is hooks), None)
        self._note(path, ("handle", where, list(hooks).index(handle.id) if handle.id in hooks else None))

    def _value(self, path: str, value: Any, slot: FloatSlot | None = None) -> None:
        cls = type(value)
        if is_number(value, cls) or is_probability(value, slot):
            self._float(path, value, slot)
        elif cls in PLAIN:
            self._note(path, (cls.__name__, short(value)))
        elif cls in TEXTS:
            self._note(path, (cls.__name__, repr(value)))
        elif isinstance(value, Tensor):
            self._tensor(path, value)
        elif cls is tuple:
            self._items(path, value)
        elif id(value) in self._seen:
            self._note(path, ("same as", self._seen[id(value)][0]))
            if cls in (list, dict, set) and not value and (id(value) in self._of_others) != self._with_others:
                # The module and a function hold the same empty container. Probably the function fills it. A copy of the
                # module would not see this.
                self._unknown(path, "a list or dict that a function fills, which a copy does not follow")
        elif isinstance(value, type):
            self._class(path, value)
        else:
            self._seen[id(value)] = (path, value)
            if self._with_others:
                self._of_others.add(id(value))
            self._compound(path, value)

    def _float(self, path: str, value: Any, slot: FloatSlot | None) -> None:
        kind = "float" if type(value) is int else name_of(type(value)).removeprefix("builtins.")
        if slot is None or self._fixed:
            self._note(path, (kind, repr(value)))
            return
        self._note(path, kind)
        while path in self.structure.floats:
            path += "'"
        self.structure.floats[path] = slot

    def _tensor(self, path: str, tensor: Tensor) -> None:
        if id(tensor) in self._tensors:
            self._note(path, ("the tensor", self._tensors[id(tensor)]))
        elif memory(tensor) in self._memory:
            self._unknown(path, "a view of a parameter or buffer, which a copy does not follow")
        else:
            self._note(path, (name_of(type(tensor)), tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad))
            try:
                self._note(path, digest(tensor))
            except (RuntimeError, TypeError, NotImplementedError):
                self._unknown(path, "a tensor without plain data")

    def _compound(self, path: str, value: Any) -> None:
        if isinstance(value, types.FunctionType):
            self._function(path, value)
        elif isinstance(value, types.MethodType):
            self._note(path, "method")
            self._value(path, value.__func__)
            self._value(f"{path}.self", value.__self__)
        elif isinstance(value, BUILTINS):
            self._builtin(path, value)
        elif isinstance(value, WRAPPERS):
            self._note(path, name_of(type(value)))
            for function in wrapped(value):
                self._value(path, function)
        elif isinstance(value, types.ModuleType):
            named = sys.modules.get(value.__name__) is value
            self._note(path, ("module", value.__name__)) if named else self._unknown(path, "a module made by hand")
        elif isinstance(value, weakref.ReferenceType):
            self._note(path, name_of(type(value)))
            self._shared(path, value())
        elif isinstance(value, RemovableHandle):
            self._handle(path, value)
        elif isinstance(value, logging.Logger):  # loggers are shared by name: a copy of one is the same object
            self._note(path, (name_of(type(value)), value.name))
        elif type(value) in STATELESS:
            self._note(path, name_of(type(value)))
        else:
            self._object(path, value)

    def _function(self, path: str, function: types.FunctionType) -> None:
        self._note(path, ("function", name_of(function)))
        if found_by_name(function):
            return
        # Functions of torch's parametrizations capture their module only for its id, so leave the module out. In other
        # functions, a captured part of the model counts as unknown (`_shared`), and the model fuses with no other.
        of_torch = function.__module__ == nn.utils.parametrize.__name__
        for i, item in enumerate(captured(function)):
            if not (of_torch and isinstance(item, nn.Module)):
                self._shared(f"{path}.captured[{i}]", item)
        for name, item in vars(function).items():
            self._value(_join(path, name), item)
        with self._no_slots():
            for name, item in own_globals(function).items():
                self._value(f"{path}.globals[{name!r}]", item)

    def _shared(self, path: str, value: Any) -> None:
        """Describe an object that copies of the module would share with the module.

        A part of the module counts as unknown, because the copies would refer to the original's part.
        """
        if (isinstance(value, nn.Module) and id(value) in self._seen) or id(value) in self._tensors:
            self._unknown(path, "a reference to a part of the model, which a copy does not follow")
        else:
            before, self._with_others = self._with_others, True
            self._value(path, value)
            self._with_others = before

    def _builtin(self, path: str, function: Any) -> None:
        owner = getattr(function, "__self__", getattr(function, "__objclass__", None))
        self._note(path, (type(function).__name__, name_of(function), function.__name__))
        self._value(f"{path}.self", owner)

    def _class(self, path: str, cls: type) -> None:
        """Describe a class by its name, and also by its contents if the name does not lead to it.

        A class that a function makes is an example.
        """
        if id(cls) in self._seen:
            self._note(path, (name_of(cls), self._seen[id(cls)][0]))
            return
        self._note(path, name_of(cls))
        if found_by_name(cls):
            return
        self._seen[id(cls)] = (path, cls)
        for i, base in enumerate((type(cls), *cls.__bases__)):
            self._class(f"{path}.base[{i}]", base)
        for name, item in vars(cls).items():
            if name not in CLASS_NOTES:
                self._value(f"{path}.{name}", item)

    def _object(self, path: str, value: Any) -> None:
        """Walk any other object: its items if it is a container, its attributes, and other parts that `copy` uses."""
        cls = type(value)
        self._class(path, cls)
        fixed, self._fixed = self._fixed, self._fixed or isinstance(value, Enum)
        if isinstance(value, dict | types.MappingProxyType):
            self._mapping(path, value)
        elif isinstance(value, list | tuple):
            self._items(path, value)
        elif isinstance(value, set | frozenset):
            self._set(path, value)
        if cls not in (dict, list, set, frozenset, types.MappingProxyType):
            self._attributes(path, value)
            with self._no_slots():
                self._rest(path, value)
        self._fixed = fixed

    def _mapping(self, path: str, mapping: Any) -> None:
        items = list((dict if isinstance(mapping, dict) else type(mapping)).items(mapping))
        self._note(path, len(items))
        for i, (key, item) in enumerate(items):
            place = f"{path}[{key!r}]" if type(key) in PLAIN else f"{path}[key {i}]"
            self._value(f"{path}.key[{i}]", key)
            self._value(place, item, FloatSlot(mapping, key, item=True) if isinstance(mapping, dict) else None)

    def _items(self, path: str, items: list[Any] | tuple[Any, ...]) -> None:
        self._note(path, (name_of(type(items)), len(items)))
        for i, item in enumerate(items):
            self._value(f"{path}[{i}]", item, FloatSlot(items, i, item=True) if isinstance(items, list) else None)

    def _set(self, path: str, items: Iterable[Any]) -> None:
        """Describe a set. Numbers keep their order; other items are sorted, because their order differs by process."""
        walks = []
        for item in items:
            entries, self.structure.entries = self.structure.entries, []
            with self._no_slots():
                self._value(path, item)
            walks.append(tuple(self.structure.entries))
            self.structure.entries = entries
        if not all(type(item) in (bool, int, float) for item in items):
            walks.sort(key=repr)
        self._note(path, tuple(walks))

    def _attributes(self, path: str, value: Any) -> None:
        skipped = skipped_of(value)
        for name, item in getattr(value, "__dict__", {}).items():
            if name not in skipped:
                self._value(_join(path, name), item, FloatSlot(value, name))
        for name, place, item in slots_of(value):
            self._value(_join(path, name), item, FloatSlot(value, place))

    def _rest(self, path: str, value: Any) -> None:
        try:
            parts = parts_of_copy(value)
        except Exception:  # a `__reduce__` may raise any error
            self._unknown(path, "a value that cannot be copied")
        else:
            for name, part in parts.items():
                self._value(f"{path}.{name}", part)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
