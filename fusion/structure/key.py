"""The structure that modules must share to train as one, in plain values: they compare, hash, and name differences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable

from torch import nn

from fusion.checks import refusal, require
from fusion.structure.signature import describe

FusionKey = tuple[tuple[str, Hashable], ...]


def fusion_key(module: nn.Module, *extra: Hashable) -> FusionKey:
    """Return the hashable key that `module` must share with another module for the two to be fused.

    Args:
        *extra: Further values that must agree, e.g. the batch size.

    Returns:
        `((path, value), ...)`; equal for modules that `fuse` accepts together, in any process. Float attributes
        (dropout probability, label smoothing, a multiplier) are not part of it: they may differ from member to member.
        All else is, whatever its name: a module that keeps a configuration with `"optimizer": "sgd"` differs from one
        with `"adam"`. A value that cannot be looked into (a generator, an open file) is equal to nothing.

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


def check_module(module: object) -> None:
    """Refuse a value that is no module.

    Raises:
        ValueError: if `module` is something else.
    """
    require(isinstance(module, nn.Module), "module", module, "an nn.Module")


def differences(key: FusionKey, other: FusionKey) -> list[str]:
    """Return each path at which two keys differ, with both values, in the order of the modules."""
    here, there = _numbered(key), _numbered(other)
    found = [
        f"{place[0]}: {here.get(place, 'absent')} against {there.get(place, 'absent')}"
        for place in dict.fromkeys((*here, *there))
        if here.get(place, _ABSENT) != there.get(place, _ABSENT)
    ]
    moved = (path for (path, _), (theirs, _) in zip(key, other) if path != theirs)
    return found or [f"{path}: in another order" for path in moved][:1]


def _numbered(key: FusionKey) -> dict[tuple[str, int], Hashable]:
    """Return the entries by path and number of earlier entries with the same path."""
    times: Counter[str] = Counter()
    found = {}
    for path, value in key:
        found[path, times[path]] = value
        times[path] += 1
    return found


def check_same(keys: Iterable[FusionKey], what: str) -> FusionKey:
    """Return the key that all are equal to.

    Args:
        keys: At least one; each is compared as it comes, because keys of large models are large.
        what: Name for them in an error, e.g. "modules".

    Raises:
        ValueError: if one differs from the first. The message names it and the differences.
    """
    keys = iter(keys)
    first = next(keys)
    for k, key in enumerate(keys, start=1):
        if key != first:
            found = differences(first, key)
            listed = "; ".join(found[:5]) + ("; ..." if len(found) > 5 else "")
            raise ValueError(f"{what}[{k}] cannot be fused with {what}[0], they differ in {listed}")
    return first


_ABSENT = object()
