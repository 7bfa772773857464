"""The computation of a model, as the sequence of torch's operators that it calls."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from surrogate.output_sizes import Shape, run_for_shapes


def run_for_operators(module: nn.Module, example_input: Any) -> tuple[dict[str, Shape], str]:
    """Run a copy of a module on one batch, as `run_for_shapes` does.

    Returns:
        The shapes of its outputs, and a digest of the operators that it called. The digest has their order, the shapes
        and types of tensors, and all other arguments but floating point numbers.
    """
    record = _Record()
    shapes = run_for_shapes(module, example_input, record)
    return shapes, record.digest.hexdigest()


class _Record(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch imports its compiler, which takes seconds, for every mode that does not say no here."""
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.digest = hashlib.sha256()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.digest.update(repr((str(func), pytree.tree_map(_counted, (args, kwargs)))).encode())
        return func(*args, **kwargs)


def _counted(value: Any) -> Any:
    """Return the part of an argument that counts: of a tensor its shape and type, of a float nothing."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    return float if isinstance(value, float | torch.Generator) else value
