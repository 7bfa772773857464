"""The parts of a value that `copy` uses besides its attributes, and digests of long values."""

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

# Texts longer than this are described by a digest.
_LONGEST = 256


def slots_of(value: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, the descriptor and the value of each attribute in `__slots__` that has a value."""
    for name, place in _declared_slots(type(value)):  # type: ignore[arg-type]  # a class can be hashed
        try:
            # Read by the descriptor, because a derived class may have a property with the attribute's name.
            item = place.__get__(value)
        except AttributeError:
            continue
        yield name, place, item


@functools.cache
def _declared_slots(cls: Hashable) -> list[tuple[str, Any]]:
    """Return the attributes that a class and its bases declare in `__slots__`, with mangled names if private."""
    assert isinstance(cls, type)
    declared = [item for base in cls.__mro__ if "__slots__" in vars(base) for item in vars(base).items()]
    return [(name, item) for name, item in declared if isinstance(item, types.MemberDescriptorType)]


def parts_of_copy(value: Any) -> dict[str, Any]:
    """Return the parts that a value's `__reduce_ex__` gives to `copy`.

    Attributes, and the items of a list or a dict, are left out, because they are described separately.

    Raises:
        TypeError: if the value cannot be copied, or `__reduce_ex__` returns a name that does not lead to the value.
        Exception: any other error of its `__reduce_ex__`.
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
    """Return a plain value as it is, or a digest of a long text."""
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
