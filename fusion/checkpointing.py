"""Activation checkpointing in fused models: activations are kept, as for them nothing could compute them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint


class _KeptReentrant:
    """Stands for torch's function of `use_reentrant=True`, which records nothing unless an argument needs gradients."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        needs = any(isinstance(x, Tensor) and x.requires_grad for x in args)
        with torch.set_grad_enabled(needs and torch.is_grad_enabled()):
            return function(*args)


def _kept(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Stand for torch's way of `use_reentrant=False`, around the function's call."""
    yield


@contextmanager
def activations_kept() -> Iterator[None]:
    """Have `torch.utils.checkpoint` compute what it would without recomputing it in the backward pass.

    The backward pass of a fused model runs after its members' tensors have left the module.
    """
    names = {"CheckpointFunction": _KeptReentrant, "_checkpoint_without_reentrant_generator": _kept}
    before = {name: getattr(checkpoint, name) for name in names}
    for name, stand_in in names.items():
        setattr(checkpoint, name, stand_in)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(checkpoint, name, function)
