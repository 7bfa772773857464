"""Runs a user's `torch.autograd.Function` member by member if `vmap` has no rule for it.

A straight-through estimator and a gradient reversal are examples. All other operators still run for all members at
once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import local
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.utils._pytree import tree_leaves

from fusion.evaluate.replaced import Replaced
from fusion.evaluate.rules.drawing import member_by_member
from fusion.evaluate.rules.member import fold
from fusion.streams import Streams


class _Drawing(local):
    """The random number streams of the members that this thread evaluates now; None outside of an evaluation."""

    streams: Streams | None = None


_here = _Drawing()


def _apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    """Replace `Function.apply`; see `functions_member_by_member`."""
    has_rule = cls.generate_vmap_rule or cls.vmap is not Function.vmap
    follows = has_rule and cls.setup_context is not Function.setup_context
    calls = any(callable(x) and not isinstance(x, Tensor) for x in tree_leaves((args, kwargs)))
    # Torch's classmethod is written in Python up to torch 2.13, in C from torch 2.14 on.
    result, own = NotImplemented, _replaced.originals[Function]["apply"].__get__(None, cls)
    if _here.streams is not None and not follows and not calls:
        result = fold(member_by_member(own, _here.streams), args, kwargs, draws=True)
    return own(*args, **kwargs) if result is NotImplemented else result


_replaced = Replaced({Function: {"apply": classmethod(_apply)}})


@contextmanager
def functions_member_by_member(streams: Streams) -> Iterator[None]:
    """Apply functions without a `vmap` rule to each member, and stack the results, inside this context and thread.

    Torch still raises an error if a function uses members' tensors that are not arguments, or if an argument is a
    function.
    """
    with _replaced:
        before, _here.streams = _here.streams, streams
        try:
            yield
        finally:
            _here.streams = before
