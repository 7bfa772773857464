"""A module in plain values: the attributes that steer its computation, and the floats that may differ.

Types, kernel settings, activations, names and shapes of tensors, what is tied to what, what hooks hold. A float in a
place that can be written to (an attribute, a dict, a list) is listed apart, because every member of a fused model may
have its own; elsewhere (a tuple, a closure) it counts as structure.
"""

import functools
import hashlib
import types
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

# Walked apart; a mode, which train() and eval() set all the time; caches that forward rebuilds; notes of peft's.
_NOT_STRUCTURE = {"_parameters", "_buffers", "_modules", "training"}
_NOT_STRUCTURE |= {"_flat_weights", "_flat_weight_refs", "_compiled_call_impl", "peft_config"}
# How peft made an adapter; what forward reads of it, `scaling`, is a float.
_NOTES = {"peft": {"lora_alpha", "r"}}
# How a model is trained, where it keeps its configuration: no module computes with these.
_TRAINING = {"optimizer", "lr", "momentum", "nesterov", "dampening", "weight_decay", "beta1", "beta2", "eps"}
_TRAINING |= {"independent_weight_decay", "schedule", "gamma", "step_size", "warmup_epochs", "grad_clip"}
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
        self._class(_join(path, "type"), type(module))
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

    def _class(self, path: str, cls: type) -> None:
        """A class by name; one defined inside a function also by its methods, since each call makes it anew."""
        self.structure.entries[path] = _name(cls)
        for base in cls.__mro__:
            if "<locals>" in base.__qualname__ and id(base) not in self.seen:
                self.seen[id(base)] = (path, base)
                for name, method in vars(base).items():
                    method = method.fget if isinstance(method, property) else getattr(method, "__func__", method)
                    if isinstance(method, types.FunctionType):
                        self._value(f"{path}.{name}", method, None)

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
            self._class(path, value)
        elif isinstance(value, Tensor):
            self.structure.entries[path] = self.tensors.get(id(value)) or _digest(value)
        elif id(value) in self.seen:
            self.structure.entries[path] = ("same as", self.seen[id(value)][0])
        else:
            self.seen[id(value)] = (path, value)
            self._compound(path, value)

    def _compound(self, path: str, value: Any) -> None:
        self.structure.entries[path] = _name(type(value))
        if isinstance(value, dict | OrderedDict):
            for key, item in value.items():
                if key not in _TRAINING or isinstance(item, float):
                    self._value(f"{path}[{key!r}]", item, FloatSlot(value, key))
        elif isinstance(value, set | frozenset):
            self.structure.entries[path] = _steady(frozenset(value))
        elif isinstance(value, list | tuple | deque):
            self.structure.entries[path] = (_name(type(value)), len(value))
            for i, item in enumerate(value):
                self._value(f"{path}[{i}]", item, FloatSlot(value, i) if isinstance(value, list) else None)
        elif isinstance(value, _FUNCTIONS):
            self._function(path, value)
        elif callable(getattr(value, "tobytes", None)):
            self.structure.entries[path] = (_name(type(value)), hashlib.sha256(value.tobytes()).hexdigest())
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


_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)


def _captured(function: Any) -> Iterator[Any]:
    """What decides a Python function's result besides its arguments: code, defaults, and closure."""
    if not hasattr(function, "__code__"):
        return
    yield _code(function.__code__)
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from (cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType())


def _code(code: types.CodeType) -> bytes:
    """A digest of what a function does, inner functions included, wherever it stands."""
    constants = [_code(c) if isinstance(c, types.CodeType) else _steady(c) for c in code.co_consts]
    return hashlib.sha256(repr((code.co_code, code.co_names, constants)).encode()).digest()


def _steady(constant: Any) -> str:
    """The same text in every process; a set has an order of its own in each."""
    return repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _is_probability(value: Any, slot: FloatSlot | None) -> bool:
    """`nn.Dropout(0)` holds an int where `nn.Dropout(0.1)` holds a float."""
    return slot is not None and type(value) is int and isinstance(slot.owner, nn.modules.dropout._DropoutNd)


def _digest(tensor: Tensor) -> Hashable:
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return (tuple(tensor.shape), str(tensor.dtype), hashlib.sha256(data).hexdigest())


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
