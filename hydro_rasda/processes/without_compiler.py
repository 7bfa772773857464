"""Torch's optimizers without torch's compiler, in a process that was made to train.

Torch imports its compiler with a process's first optimizer, to mark what is not to be compiled. That takes longer than
a small training. Nothing is compiled here as long as nothing else has imported the compiler.
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
    """Let torch's optimizers work without the compiler, in all of this process; once it is there, as torch has them.

    Methods that are not marked in the way that is known here stay as they are.
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
