"""What modules must share to train as one, in plain values: they compare, hash, and can be named in an error.

A module is described by the attributes that steer its computation: types, kernel settings, activations, names
and shapes of its tensors, what is tied to what, what its hooks hold. A float in a place that can be written
to (an attribute, a dict, a list) is left out of the key, because every member of a fused model may have its
own; elsewhere (a tuple, a closure) it counts.
"""

import functools
import hashlib
import types
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

FusionKey = tuple[tuple[str, Hashable], ...]

_TENSOR_ATTRIBUTES = {"_parameters", "_buffers", "_modules"}
# The mode is set by train() and eval() all the time, and the rest are caches that forward rebuilds.
_NOT_STRUCTURE = _TENSOR_ATTRIBUTES | {
    "training",
    "_flat_weights",
    "_flat_weight_refs",
    "_compiled_call_impl",
}
# Notes that peft keeps of how an adapter was made; what forward reads, `scaling`, is a float apart.
_NOT_STRUCTURE |= {"peft_config"}
_NOTES = {"peft": {"lora_alpha", "r"}}
_PLAIN = (bool, int, str, bytes, complex, type(None), torch.dtype, torch.device, torch.memory_format, Enum)


@dataclass(frozen=True)
class FloatSlot:
    """A place inside a module that holds a float and can hold another: `owner[key]`, or `owner.key`."""

    owner: Any
    key: Any

    def get(self) -> Any:
        """The value now in the slot."""
        return self._items()[self.key]

    def set(self, value: Any) -> None:
        """Write `value`, past any `__setattr__` that the owner may have."""
        self._items()[self.key] = value

    def _items(self) -> Any:
        return self.owner if isinstance(self.owner, dict | list) else vars(self.owner)


@dataclass
class Structure:
    """One module in plain values.

    Attributes:
        entries: path -> value, for all that two modules must share to be fused.
        floats: path -> slot, for the floats that may differ between them.
    """

    entries: dict[str, Hashable] = field(default_factory=dict)
    floats: dict[str, FloatSlot] = field(default_factory=dict)

    def float_values(self) -> dict[str, float]:
        """The floats as they are now, by path."""
        return {path: float(slot.get()) for path, slot in self.floats.items()}


def fusion_key(module: nn.Module, *extra: Hashable) -> FusionKey:
    """What `module` must share with another module for the two to be fused, hashable.

    Args:
        module: any module.
        *extra: further values that must agree, e.g. the batch size.

    Returns:
        `((path, value), ...)`; equal for modules that `fuse` accepts together. Float attributes (dropout
        probability, label smoothing, a multiplier) are not part of it: they may differ from member to member.

    >>> fusion_key(nn.Linear(2, 3), 64) == fusion_key(nn.Linear(2, 3), 64)
    True
    >>> fusion_key(nn.Linear(2, 3), 64) == fusion_key(nn.Linear(2, 3), 32)
    False
    >>> fusion_key(nn.Dropout(0.1)) == fusion_key(nn.Dropout(0.2))
    True
    """
    entries = describe(module).entries
    return (*entries.items(), *((f"extra[{i}]", value) for i, value in enumerate(extra)))


def differences(key: FusionKey, other: FusionKey) -> list[str]:
    """Each path at which two keys differ, with both values, in the order of the modules."""
    here, there = dict(key), dict(other)
    paths = list(dict.fromkeys((*here, *there)))
    return [
        f"{path}: {here.get(path, 'absent')} against {there.get(path, 'absent')}"
        for path in paths
        if here.get(path, _ABSENT) != there.get(path, _ABSENT)
    ]


def check_same_structure(keys: Sequence[FusionKey]) -> None:
    """Raise ValueError where a key differs from the first one, naming the member and what differs."""
    for k, key in enumerate(keys):
        if key != keys[0]:
            found = differences(keys[0], key)
            listed = "; ".join(found[:5]) + ("; ..." if len(found) > 5 else "")
            raise ValueError(f"modules[{k}] cannot be fused with modules[0], they differ in {listed}")


def describe(module: nn.Module) -> Structure:
    """Walk `module` once."""
    return _Walk(module).structure


class _Walk:
    def __init__(self, module: nn.Module) -> None:
        self.structure = Structure()
        self.seen: dict[int, tuple[str, Any]] = {}
        self.tensors: dict[int, str] = {}
        for path, child in module.named_modules():
            self.seen[id(child)] = (path, child)
        for path, child in module.named_modules():
            self._module(path, child)

    def _module(self, path: str, module: nn.Module) -> None:
        self.structure.entries[_join(path, "type")] = _type_token(type(module))
        children = {name: self.seen[id(child)][0] for name, child in module._modules.items() if child is not None}
        self.structure.entries[_join(path, "modules")] = tuple(children.items())
        for kind in ("_parameters", "_buffers"):
            for name, tensor in getattr(module, kind).items():
                if tensor is not None:
                    self._registered(_join(path, name), tensor, kind)
        notes = _NOTES.get(type(module).__module__.partition(".")[0], set())
        for name, value in vars(module).items():
            if name in notes:
                continue
            if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
                self._hooks(_join(path, name), value)
            elif name not in _NOT_STRUCTURE:
                self._value(_join(path, name), value, FloatSlot(module, name))

    def _registered(self, path: str, tensor: Tensor, kind: str) -> None:
        first = self.tensors.setdefault(id(tensor), path)
        token: Hashable = ("tied to", first)
        if first == path:
            token = (kind[1:-1], tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)
        self.structure.entries[path] = token

    def _hooks(self, path: str, hooks: Any) -> None:
        # Handles are numbered through the whole process: only their order means something.
        for i, hook in enumerate(hooks.values() if isinstance(hooks, dict) else hooks or ()):
            self._value(f"{path}[{i}]", hook, None)

    def _value(self, path: str, value: Any, slot: FloatSlot | None) -> None:
        if isinstance(value, float) or _is_probability(value, slot):
            if slot is None:
                self.structure.entries[path] = ("float", repr(value))
            else:
                self.structure.entries[path] = "float"
                self.structure.floats[path] = slot
        elif isinstance(value, _PLAIN):
            self.structure.entries[path] = (type(value).__name__, value)
        elif isinstance(value, type):
            self.structure.entries[path] = _type_token(value)
        elif isinstance(value, Tensor):
            self.structure.entries[path] = self.tensors.get(id(value)) or _digest(value)
        elif id(value) in self.seen:
            self.structure.entries[path] = ("same as", self.seen[id(value)][0])
        else:
            self.seen[id(value)] = (path, value)
            self._compound(path, value)

    def _compound(self, path: str, value: Any) -> None:
        self.structure.entries[path] = _type_token(type(value))
        if isinstance(value, dict | OrderedDict):
            for key, item in value.items():
                self._value(f"{path}[{key!r}]", item, FloatSlot(value, key))
        elif isinstance(value, set | frozenset):
            self.structure.entries[path] = tuple(sorted(map(repr, value)))
        elif isinstance(value, list | tuple | deque):
            self.structure.entries[path] = (_type_token(type(value)), len(value))
            for i, item in enumerate(value):
                self._value(f"{path}[{i}]", item, FloatSlot(value, i) if isinstance(value, list) else None)
        elif isinstance(value, _FUNCTIONS):
            self._function(path, value)
        else:
            for name, item in getattr(value, "__dict__", {}).items():
                self._value(_join(path, name), item, FloatSlot(value, name))

    def _function(self, path: str, value: Any) -> None:
        if isinstance(value, functools.partial):
            self._value(f"{path}.func", value.func, None)
            for i, item in enumerate((*value.args, *value.keywords.values())):
                self._value(f"{path}.args[{i}]", item, None)
            return
        self.structure.entries[path] = (getattr(value, "__module__", ""), getattr(value, "__qualname__", ""))
        if isinstance(value, types.MethodType):
            self._value(f"{path}.self", value.__self__, None)
            value = value.__func__
        for i, item in enumerate(_captured(value)):
            self._value(f"{path}.captured[{i}]", item, None)


_ABSENT = object()
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)


def _captured(function: Any) -> Iterator[Any]:
    """What decides a Python function's result besides its arguments: code, defaults, and closure."""
    code = getattr(function, "__code__", None)
    if code is None:
        return
    yield code.co_code
    yield from (const for const in code.co_consts if isinstance(const, (*_PLAIN, float, tuple)))
    yield code.co_names
    yield from function.__defaults__ or ()
    yield from (cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType())


def _type_token(cls: type) -> Hashable:
    """A class by name; one defined inside a function also by its code, since each call makes it anew."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    if "<locals>" not in name:
        return name
    methods = (value for value in vars(cls).values() if isinstance(value, types.FunctionType))
    return (name, *((m.__name__, m.__code__.co_code, _names(m.__code__.co_consts)) for m in methods))


def _names(constants: Iterable[Any]) -> tuple[str, ...]:
    return tuple(repr(c) for c in constants if isinstance(c, (*_PLAIN, float, tuple)))


def _is_probability(value: Any, slot: FloatSlot | None) -> bool:
    """`nn.Dropout(0)` holds an int where `nn.Dropout(0.1)` holds a float."""
    return slot is not None and type(value) is int and isinstance(slot.owner, nn.modules.dropout._DropoutNd)


def _digest(tensor: Tensor) -> Hashable:
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return (tuple(tensor.shape), str(tensor.dtype), hashlib.sha256(data).hexdigest())


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
