"""The mode that sends operators to the rules."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from fusion.rules.drawing import DRAWING, member_by_member
from fusion.rules.member import Member, fold, innermost_vmap
from fusion.rules.table import COMPOSITES, DRAWING_RULES, FRESH, REQUIRING, RULES, UNFILLED
from fusion.streams import Streams
from fusion.tensors import is_batched


class folded(TorchFunctionMode):  # noqa: N801 - used as a context manager
    """Inside this context, `torch.func.vmap` over members folds K into each operator that has a rule.

    Results and gradients are those of `vmap`; only the way there is shorter. Operators without a rule, unusual
    arguments, and transforms nested in one another (`vmap` of `grad`) run as torch runs them. Known operators that draw
    random numbers draw each member's from its own stream; unknown ones raise under `vmap(randomness="error")`.

    Example:
        >>> import torch
        >>> weight_KOI, x_NI = torch.randn(3, 5, 4), torch.randn(2, 4)
        >>> with folded(Streams(3)):
        ...     out_KNO = torch.func.vmap(lambda w: torch.nn.functional.linear(x_NI, w))(weight_KOI)
        >>> out_KNO.shape
        torch.Size([3, 2, 5])
    """

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self._streams = streams
        self._own: dict[int, tuple[Tensor, Any]] = {}
        self._fresh: dict[int, ref[Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._own:
            args, kwargs = tree_map(self._of_each, (args, kwargs))
        first: Any = args[0] if args else None
        fresh = bool(self._fresh) and (known := self._fresh.get(id(first))) is not None and known() is first
        if fresh and _writes(func):
            own = fold(_one_for_each, args, kwargs)
            if own is not NotImplemented:
                self._own[id(first)] = first, own
                args = (own, *args[1:])
        result = NotImplemented
        if func in RULES:
            result = fold(RULES[func], args, kwargs)
        elif func in DRAWING_RULES:
            rule = partial(DRAWING_RULES[func], streams=self._streams)
            result = fold(rule, args, kwargs, draws=_draws(func, args, kwargs))
        elif func in REQUIRING:
            result = fold(REQUIRING[func], args, kwargs, draws=True)
            if result is not NotImplemented:
                self._own[id(args[0])] = args[0], result
        elif func in UNFILLED:
            result = fold(partial(_unfilled, func), args, kwargs, draws=True)
        elif func in COMPOSITES and innermost_vmap() is not None:
            with self:
                result = COMPOSITES[func](*args, **kwargs)
        if result is NotImplemented and _draws(func, args, kwargs):
            result = fold(member_by_member(func, self._streams), args, kwargs, draws=True)
        result = func(*args, **kwargs) if result is NotImplemented else result
        if func in FRESH and isinstance(result, Tensor):
            self._fresh[id(result)] = ref(result)
        elif fresh and _views(result, first):
            del self._fresh[id(first)]  # a view would not see what is written to each member's own
        return result

    def _of_each(self, x: Any) -> Any:
        """Return each member's own tensor in place of one that they share; see `REQUIRING`."""
        known, own = self._own.get(id(x), (None, None)) if isinstance(x, Tensor) else (None, None)
        return x if known is not x or known is None else own


def _one_for_each(K: int, x: Member, *args: Any, **kwargs: Any) -> Any:
    """Make one of each member's of a tensor that they share, before members write different values to it."""
    return NotImplemented if x.dim is not None else Member(x.lead(K).clone(), 0)


def _views(result: Any, tensor: Tensor) -> bool:
    """Return whether a result may have a tensor in the memory of another one, which has no K axis."""
    plain = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x is not tensor and not is_batched(x)]
    if not plain or is_batched(tensor):
        return False
    if any(map(torch._C._functorch.is_functorch_wrapped_tensor, [tensor, *plain])):
        return True  # inside another transform, whose tensors do not say where they are
    place = tensor.untyped_storage().data_ptr()
    return any(x.untyped_storage().data_ptr() == place for x in plain)


def _writes(func: Any) -> bool:
    """Return whether a method writes to its tensor, such as `add_` and `__setitem__`."""
    name = func.__name__
    return name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__") or (
        name.endswith("_") and not name.endswith("__")
    )


def _unfilled(func: Any, K: int, *args: Any, **kwargs: Any) -> Any:
    """Make one empty tensor for each member, because `vmap` would make one for all."""
    if any(isinstance(x, Member) and x.dim is not None for x in args) or kwargs.get("out") is not None:
        return NotImplemented
    one = func(*(x.value if isinstance(x, Member) else x for x in args), **kwargs)
    return Member(one.new_empty((K, *one.shape)), 0)


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return func in DRAWING and DRAWING[func](*args, **kwargs)
