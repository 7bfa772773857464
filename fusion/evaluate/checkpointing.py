"""Activation checkpointing in fused models is switched off: activations are kept, because they cannot be recomputed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import local
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

from fusion.evaluate.replaced import Replaced

_NEW, _OLD = "_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator"
_WITHOUT_REENTRANT = _NEW if hasattr(checkpoint, _NEW) else _OLD
"""Name of torch's generator for `use_reentrant=False`: `_NEW` from torch 2.14 on, `_OLD` before.

If a later torch has neither name, checkpointing stays on, and the dry run of a fused model with checkpointing says so.
"""


class _KeptReentrant:
    """Replaces torch's autograd function for checkpointing with `use_reentrant=True`, to keep activations.

    Like torch's function, it records gradients only if an argument needs them.
    """

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if not _here.depth:
            return _replaced.originals[checkpoint]["CheckpointFunction"].apply(function, preserve, *args)
        needs = any(isinstance(x, Tensor) and x.requires_grad for x in args)
        with torch.set_grad_enabled(needs and torch.is_grad_enabled()):
            return function(*args)


def _kept(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Keep activations with `use_reentrant=False`: replace torch's generator around the checkpointed function."""
    if _here.depth:
        return iter([None])
    found: Iterator[None] = _replaced.originals[checkpoint][_WITHOUT_REENTRANT](*args, **kwargs)
    return found


class _Depth(local):
    """Holds the number of `activations_kept` blocks that this thread has entered."""

    depth = 0


_here = _Depth()
_replaced = Replaced({checkpoint: {"CheckpointFunction": _KeptReentrant, _WITHOUT_REENTRANT: _kept}})


@contextmanager
def activations_kept() -> Iterator[None]:
    """Make `torch.utils.checkpoint` keep activations instead of recomputing them, inside this context and thread.

    Recomputing would fail, because in the backward pass of a fused model the module no longer holds members' tensors.
    """
    with _replaced:
        _here.depth += 1
        try:
            yield
        finally:
            _here.depth -= 1
