"""Operators that a user derives from `torch.autograd.Function`, for which `vmap` has no rule: member by member.

A straight-through estimator and a reversal of gradients are examples. The rest of the model runs at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, local
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.utils._pytree import tree_leaves

from fusion.evaluate.rules.drawing import member_by_member
from fusion.evaluate.rules.member import fold
from fusion.streams import Streams


class _Drawing(local):
    """The members' random numbers, in a thread that evaluates members at once."""

    streams: Streams | None = None


_here, _lock = _Drawing(), Lock()
_torchs: Callable[..., Any] = vars(Function)["apply"].__func__
_users: list[None] = []
"""One entry for each block that any thread is in: the last one that ends puts torch's own back."""


@contextmanager
def functions_member_by_member(streams: Streams) -> Iterator[None]:
    """Inside, in this thread, apply functions without a rule for `vmap` to each member, and stack their results.

    If a function sees members' tensors other than its arguments, or is handed a function, torch refuses it as before.
    """
    with _lock:
        if not _users:
            Function.apply = classmethod(_apply)  # type: ignore[method-assign, assignment]
        _users.append(None)
    before, _here.streams = _here.streams, streams
    try:
        yield
    finally:
        _here.streams = before
        with _lock:
            _users.pop()
            if not _users:
                Function.apply = classmethod(_torchs)  # type: ignore[method-assign, assignment]


def _apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    """Stand for `Function.apply`."""
    has_rule = cls.generate_vmap_rule or cls.vmap is not Function.vmap
    follows = has_rule and cls.setup_context is not Function.setup_context
    calls = any(callable(x) and not isinstance(x, Tensor) for x in tree_leaves((args, kwargs)))
    result = NotImplemented
    if _here.streams is not None and not follows and not calls:

        def apply(*args: Any, **kwargs: Any) -> Any:
            return _torchs(cls, *args, **kwargs)

        result = fold(member_by_member(apply, _here.streams), args, kwargs, draws=True)
    return _torchs(cls, *args, **kwargs) if result is NotImplemented else result
