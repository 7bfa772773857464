"""Activation checkpointing in fused models is switched off: activations are kept, because they cannot be recomputed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, local
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

_NEW, _OLD = "_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator"
_WITHOUT_REENTRANT = _NEW if hasattr(checkpoint, _NEW) else _OLD
"""Name of torch's generator for `use_reentrant=False`: `_NEW` from torch 2.14 on, `_OLD` before.

If a later torch has neither name, checkpointing stays on, and the dry run of a fused model with checkpointing says so.
"""


class _KeptReentrant:
    """Replaces the autograd function of `use_reentrant=True`.

    Like torch's function, it records gradients only if an argument needs them.
    """

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if not _here.depth:
            return _torchs["CheckpointFunction"].apply(function, preserve, *args)
        needs = any(isinstance(x, Tensor) and x.requires_grad for x in args)
        with torch.set_grad_enabled(needs and torch.is_grad_enabled()):
            return function(*args)


def _kept(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Replace the generator that torch runs around a checkpointed function if `use_reentrant` is False."""
    if _here.depth:
        return iter([None])
    found: Iterator[None] = _torchs[_WITHOUT_REENTRANT](*args, **kwargs)
    return found


class _Depth(local):
    """Holds the number of `activations_kept` blocks that this thread has entered."""

    depth = 0


_here, _lock = _Depth(), Lock()
_stand_ins = {"CheckpointFunction": _KeptReentrant, _WITHOUT_REENTRANT: _kept}
_torchs: dict[str, Any] = {}
_users: list[None] = []
"""One entry for each open `activations_kept` block of any thread. The last block to end restores torch's functions."""


@contextmanager
def activations_kept() -> Iterator[None]:
    """Make `torch.utils.checkpoint` keep activations instead of recomputing them, inside this context and thread.

    Recomputing would fail, because in the backward pass of a fused model the module no longer holds members' tensors.
    """
    with _lock:
        if not _users:
            _torchs.update({name: getattr(checkpoint, name) for name in _stand_ins if hasattr(checkpoint, name)})
            vars(checkpoint).update({name: _stand_ins[name] for name in _torchs})
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
