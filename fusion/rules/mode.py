"""The mode that sends operators to the rules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.overrides import TorchFunctionMode

from fusion.rules.member import fold, innermost_vmap
from fusion.rules.table import COMPOSITES, RULES


class folded(TorchFunctionMode):  # noqa: N801 - used as a context manager
    """Inside this context, `torch.func.vmap` over members folds K into each operator that has a rule.

    Results and gradients are those of `vmap`; only the way there is shorter. Operators without a rule, unusual
    arguments, and transforms nested in one another (`vmap` of `grad`) run as torch runs them.

    Example:
        >>> import torch
        >>> weight_KOI, x_NI = torch.randn(3, 5, 4), torch.randn(2, 4)
        >>> with folded():
        ...     out_KNO = torch.func.vmap(lambda w: torch.nn.functional.linear(x_NI, w))(weight_KOI)
        >>> out_KNO.shape
        torch.Size([3, 2, 5])
    """

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in RULES:
            result = fold(RULES[func], args, kwargs)
        elif func in COMPOSITES and innermost_vmap() is not None:
            with self:
                result = COMPOSITES[func](*args, **kwargs)
        else:
            return func(*args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result
