"""Parts of a value besides its attributes, from which a copy would be made, in short and stable form."""

from __future__ import annotations

import copyreg
import functools
import hashlib
import sys
import types
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

# Longer text is kept as a digest.
_LONGEST = 256


def slots_of(value: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, the place and the content of each attribute in `__slots__` that was ever assigned."""
    for name, place in _declared_slots(type(value)):  # type: ignore[arg-type]  # a class can be hashed
        try:
            # Not by its name, because a derived class may have a property of that name.
            item = place.__get__(value)
        except AttributeError:
            continue
        yield name, place, item


@functools.cache
def _declared_slots(cls: Hashable) -> list[tuple[str, Any]]:
    """Return the attributes that a class declares in `__slots__`; names of private ones are mangled."""
    assert isinstance(cls, type)
    declared = [item for base in cls.__mro__ if "__slots__" in vars(base) for item in vars(base).items()]
    return [(name, item) for name, item in declared if isinstance(item, types.MemberDescriptorType)]


def parts_of_copy(value: Any) -> dict[str, Any]:
    """Return the parts that `copy` asks a value for, without its attributes and the items of a list or a dict.

    Raises:
        TypeError: if the value cannot be copied, or is not found under the name that it gives.
        Exception: any other error of its `__reduce__`.
    """
    reduce = copyreg.dispatch_table.get(type(value))
    reduced: Any = reduce(value) if reduce else value.__reduce_ex__(4)
    if isinstance(reduced, str):
        owner = sys.modules.get(getattr(value, "__module__", None) or type(value).__module__)
        if getattr(owner, reduced, None) is not value:
            raise TypeError(f"{reduced} is not found under this name")
        return {"found as": reduced}
    function, args, state, items, pairs = (*reduced, None, None, None)[:5]
    parts = {"made by": function, "made of": tuple(args)}
    if function is not copyreg.__dict__["__newobj__"] or _has_own_state(type(value)):
        parts["state"] = state
    if items is not None and not isinstance(value, list):
        parts["items"] = tuple(items)
    if pairs is not None and not isinstance(value, dict):
        parts["pairs"] = tuple(pairs)
    return parts


def _has_own_state(cls: type) -> bool:
    return getattr(cls, "__getstate__", None) is not getattr(object, "__getstate__", None)


def short(value: Any) -> Hashable:
    """Return a plain value as it is, but long text as a digest."""
    if isinstance(value, str | bytes) and len(value) > _LONGEST:
        data = value if isinstance(value, bytes) else value.encode(errors="surrogatepass")
        return hashlib.sha256(data).hexdigest()
    plain: Hashable = value
    return plain


def memory(tensor: Tensor) -> int:
    """Return the address of a tensor's data; 0 if it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def digest(tensor: Tensor) -> str:
    """Return a digest of a tensor's data."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().flatten()
    return hashlib.sha256(plain.view(torch.uint8).numpy().tobytes()).hexdigest()
