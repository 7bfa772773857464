"""Use torch's optimizers without importing torch's compiler, in a process that was started to train.

Torch imports its compiler with a process's first optimizer, to mark methods that must not be compiled. The import takes
longer than a small training. Without the import, no code can be compiled, so the marks are not needed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

COMPILER = "torch._dynamo"


def leave_out_compiler() -> None:
    """Let torch's optimizers work without importing the compiler, in this whole process.

    Once something else has imported the compiler, optimizers work as torch made them. Methods that torch marks in an
    unknown way stay as they are.
    """
    if COMPILER in sys.modules:
        return
    found = [cls for cls in vars(torch.optim).values() if isinstance(cls, type) and issubclass(cls, Optimizer)]
    for cls in (Optimizer, *[cls for cls in dict.fromkeys(found) if cls is not Optimizer]):
        for name, method in [*vars(cls).items()]:
            names = getattr(getattr(method, "__code__", None), "co_names", ())
            if COMPILER in names and hasattr(method, "__wrapped__"):
                setattr(cls, name, _unmarked(method, switches_gradients="set_grad_enabled" in names))


def _unmarked(method: Any, switches_gradients: bool) -> Callable[..., Any]:
    plain: Callable[..., Any] = method.__wrapped__

    @functools.wraps(method)
    def without_compiler(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if COMPILER in sys.modules:
            return method(self, *args, **kwargs)
        if not switches_gradients:
            return plain(self, *args, **kwargs)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return plain(self, *args, **kwargs)

    return without_compiler
