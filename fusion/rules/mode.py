"""The mode that sends operators to the rules."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from fusion.rules.drawing import DRAWING, member_by_member
from fusion.rules.member import Member, fold, innermost_vmap
from fusion.rules.table import COMPOSITES, DRAWING_RULES, REQUIRING, RULES, UNFILLED
from fusion.streams import Streams


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

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._own:
            args, kwargs = tree_map(self._of_each, (args, kwargs))
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
        return func(*args, **kwargs) if result is NotImplemented else result

    def _of_each(self, x: Any) -> Any:
        """Return each member's own tensor in place of one that they share; see `REQUIRING`."""
        known, own = self._own.get(id(x), (None, None)) if isinstance(x, Tensor) else (None, None)
        return x if known is not x or known is None else own


def _unfilled(func: Any, K: int, *args: Any, **kwargs: Any) -> Any:
    """Make one empty tensor for each member, because `vmap` would make one for all."""
    if any(isinstance(x, Member) and x.dim is not None for x in args) or kwargs.get("out") is not None:
        return NotImplemented
    one = func(*(x.value if isinstance(x, Member) else x for x in args), **kwargs)
    return Member(one.new_empty((K, *one.shape)), 0)


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return func in DRAWING and DRAWING[func](*args, **kwargs)
