"""Activation checkpointing in fused models: activations are kept, as for them nothing could compute them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, local
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint


class _KeptReentrant:
    """Stands for torch's function of `use_reentrant=True`, which records nothing unless an argument needs gradients."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if not _here.depth:
            return _torchs["CheckpointFunction"].apply(function, preserve, *args)
        needs = any(isinstance(x, Tensor) and x.requires_grad for x in args)
        with torch.set_grad_enabled(needs and torch.is_grad_enabled()):
            return function(*args)


def _kept(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Stand for torch's way of `use_reentrant=False`, around the function's call."""
    if _here.depth:
        return iter([None])
    found: Iterator[None] = _torchs["_checkpoint_without_reentrant_generator"](*args, **kwargs)
    return found


class _Depth(local):
    """Number of blocks of `activations_kept` that this thread is in."""

    depth = 0


_here, _lock = _Depth(), Lock()
_stand_ins = {"CheckpointFunction": _KeptReentrant, "_checkpoint_without_reentrant_generator": _kept}
_torchs: dict[str, Any] = {}
_users: list[None] = []
"""One entry for each block that any thread is in: the last one that ends puts torch's own back."""


@contextmanager
def activations_kept() -> Iterator[None]:
    """Have `torch.utils.checkpoint` compute what it would, without recomputing it in the backward pass, in this thread.

    The backward pass of a fused model runs after its members' tensors have left the module.
    """
    with _lock:
        if not _users:
            _torchs.update({name: getattr(checkpoint, name) for name in _stand_ins})
            vars(checkpoint).update(_stand_ins)
        _users.append(None)
    _here.depth += 1
    try:
        yield
    finally:
        _here.depth -= 1
        with _lock:
            _users.pop()
            if not _users:
                vars(checkpoint).update(_torchs)
