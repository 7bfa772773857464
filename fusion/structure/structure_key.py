"""Hashable keys of the structure that modules must share to be fused, and messages that name their differences."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from fusion.argument_checks import refusal, require
from fusion.structure.signature import UNKNOWN, describe

FusionKey = tuple[tuple[str, Hashable], ...]


def fusion_key(module: nn.Module, *extra: Hashable) -> FusionKey:
    """Return the hashable key that `module` must share with another module for the two to be fused.

    Args:
        *extra: Further values that must agree, e.g. the batch size.

    Returns:
        `((path, value), ...)`. Keys are equal, in any process, for modules that `fuse` accepts together. Float
        attributes (dropout probability, label smoothing, a multiplier) are left out, because members may differ in
        them. Everything else counts: a module that keeps a configuration with `"optimizer": "sgd"` differs from one
        with `"adam"`. If a module holds a value that cannot be inspected (a generator, an open file), its key equals no
        other.

    >>> fusion_key(nn.Linear(2, 3), 64) == fusion_key(nn.Linear(2, 3), 64)
    True
    >>> fusion_key(nn.Linear(2, 3), 64) == fusion_key(nn.Linear(2, 3), 32)
    False
    >>> fusion_key(nn.Dropout(0.1)) == fusion_key(nn.Dropout(0.2))
    True
    """
    check_module(module)
    for i, value in enumerate(extra):
        try:
            hash(value)
        except TypeError:
            raise ValueError(refusal(f"extra[{i}]", value, "hashable, such as a number, a text or a tuple")) from None
    return (*describe(module).entries, *((f"extra[{i}]", value) for i, value in enumerate(extra)))


def of_present(key: FusionKey, tensors: Mapping[str, Tensor]) -> FusionKey:
    """Return `key` with the present dtype and `requires_grad` of each of the named `tensors`."""
    now = {name: (str(tensor.dtype), tensor.requires_grad) for name, tensor in tensors.items()}
    return tuple(
        (path, (*value[:3], *now[path]) if path in now and isinstance(value, tuple) and len(value) == 5 else value)
        for path, value in key
    )


def check_module(module: object) -> None:
    """Raise a `ValueError` if `module` is no `nn.Module`, or has a torch.jit part, because a copy would not train."""
    require(isinstance(module, nn.Module), "module", module, "an nn.Module")
    assert isinstance(module, nn.Module)
    scripted = (name for name, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule))
    if (name := next(scripted, None)) is not None:
        raise ValueError(f"module {name or 'itself'} {_WRAPPERS['torch.jit.']}")


def differences(key: FusionKey, other: FusionKey) -> list[str]:
    """Return a line for each path at which two keys differ, with both values, in the order of the keys."""
    here, there = _numbered(key), _numbered(other)
    found = [
        f"{place[0]}: {_told(here.get(place, 'absent'), there.get(place, 'absent'))}"
        for place in dict.fromkeys((*here, *there))
        if here.get(place, _ABSENT) != there.get(place, _ABSENT)
    ]
    moved = (path for (path, _), (theirs, _) in zip(key, other) if path != theirs)
    return found or [f"{path}: in another order" for path in moved][:1]


def _numbered(key: FusionKey) -> dict[tuple[str, int], Hashable]:
    """Map (path, n) to the value of each entry, where n is the number of earlier entries with the same path."""
    times: Counter[str] = Counter()
    found = {}
    for path, value in key:
        found[path, times[path]] = value
        times[path] += 1
    return found


def check_same(keys: Iterable[FusionKey], what: str) -> FusionKey:
    """Check that all keys are equal, and return this key.

    Args:
        keys: At least one key. They are compared one by one, because keys of large models take memory.
        what: Name for the described objects in an error message, e.g. "modules".

    Raises:
        ValueError: if a key differs from the first. The message names it and the differences.
    """
    keys = iter(keys)
    first = next(keys)
    for k, key in enumerate(keys, start=1):
        if key != first:
            found = differences(first, key)
            if cause := _cause(first, found) or _cause(key, found):
                raise ValueError(f"{what}[{k}] cannot be fused with {what}[0]: {cause}")
            listed = "; ".join(found[:5]) + ("; ..." if len(found) > 5 else "")
            raise ValueError(f"{what}[{k}] cannot be fused with {what}[0], they differ in {listed}")
    return first


def _told(here: Hashable, there: Hashable) -> str:
    """Describe how two values differ. Hashes are not shown, because they mean nothing to a reader."""
    for value in (here, there):
        if isinstance(value, tuple) and value[:1] == (UNKNOWN,):
            return str(value[1])
    if all(isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) for value in (here, there)):
        return "other values"
    if isinstance(here, tuple) and isinstance(there, tuple) and len(here) == len(there) and isinstance(here[-1], bool):
        both = zip(_OF_TENSOR[-len(here) :], here, there)
        return ", ".join(f"{name} {ours} against {theirs}" for name, ours, theirs in both if ours != theirs)
    return f"{here} against {there}"


def _cause(key: FusionKey, found: Sequence[str]) -> str | None:
    """Return a message if the differences `found` are due to a known wrapper of torch in a module; else None."""
    for path, value in key:
        for name, rule in _WRAPPERS.items():
            if isinstance(value, str) and value.startswith(name):
                module = re.split(r"\.?(?:_forward_pre_hooks|type$|_actual|_c$|_orig)", path)[0]
                if any(line.startswith(module) for line in found):
                    return f"module {module or 'itself'} {rule}"
    return None


def hidden_by_wrapper(module: nn.Module) -> str | None:
    """Return a message that names the first part of a module with a known wrapper of torch; None if there is none."""
    for name, part in module.named_modules():
        for found in (part, *part.__dict__.get("_forward_pre_hooks", {}).values()):
            named = f"{type(found).__module__}.{type(found).__qualname__}"
            for wrapper, rule in _WRAPPERS.items():
                if named.startswith(wrapper):
                    return f"module {name or 'itself'} {rule}"
    return None


_WRAPPERS = {
    "torch.nn.utils.weight_norm.WeightNorm": "has torch.nn.utils.weight_norm, whose weight is no parameter; use "
    "torch.nn.utils.parametrizations.weight_norm",
    "torch.nn.utils.spectral_norm.SpectralNorm": "has torch.nn.utils.spectral_norm, whose weight is no parameter; use "
    "torch.nn.utils.parametrizations.spectral_norm",
    "torch.nn.utils.prune.": "is pruned (torch.nn.utils.prune), so its weight is no parameter; call "
    "torch.nn.utils.prune.remove, or multiply by the mask in a parametrization",
    "torch.jit.": "is a program of torch.jit, which hides what it computes; pass the module from before",
    "torch._dynamo.": "comes from torch.compile, which hides what it computes; pass the module from before",
}
"""Beginning of a class's name -> the message about a module with such a class."""

_ABSENT = object()
_OF_TENSOR = ("kind", "type", "shape", "dtype", "requires_grad")
"""The parts of the value that describes a tensor in a key. Only parameters and buffers have the first one, the kind."""
