"""What modules must share to train as one, in plain values: they compare, hash, and can be named in an error."""

from collections.abc import Hashable, Iterable

from torch import nn

from fusion.walk import describe

FusionKey = tuple[tuple[str, Hashable], ...]


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


def check_same(keys: Iterable[FusionKey], what: str) -> FusionKey:
    """The key that all are equal to.

    Args:
        keys: at least one; they are compared as they come, since those of large models are large.
        what: how to call them in an error, e.g. "modules".

    Raises:
        ValueError: where one differs from the first, naming it and what differs.
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
