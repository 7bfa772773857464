"""Find the weight of a mean loss, such as its number of targets, by recording the calls of torch's losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fusion.evaluate.microbatch import WEIGHT
from fusion.warn import warn

IGNORED = -100
"""The default of torch's `ignore_index`: cross-entropy ignores targets of this value."""

LOSS_WEIGHT = f"{WEIGHT}/loss"


def whole(target: Tensor) -> Tensor:
    """Convert a uint8 target to int64. In uint8, -100 would be class 156, and an index would be a boolean mask."""
    return target.long() if target.dtype == torch.uint8 else target


@dataclass(frozen=True, eq=False)
class _Call:
    """A call of cross-entropy or `nll_loss`.

    Attributes:
        ignored: The `ignore_index` of the call.
        weight: The divisor of the mean loss; None if the call does not return a mean.
    """

    target: Tensor
    class_weight: Tensor | None
    ignored: int
    weight: Tensor | None

    def leaves_out(self) -> bool:
        """Return whether some targets count less than others."""
        return self.class_weight is not None or bool((whole(self.target) == self.ignored).any())

    def like(self, other: _Call) -> bool:
        same = self.target is other.target and self.class_weight is other.class_weight
        return same and self.ignored == other.ignored


class LossCalls(TorchFunctionMode):
    """Within this mode, record each call of `F.cross_entropy` and `F.nll_loss`, also calls by modules or under `vmap`.

    A mean over no target, which is NaN in torch, becomes 0 with a gradient of 0.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[_Call] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy or func is F.nll_loss:
            return self._noted(func, *args, **kwargs)
        return func(*args, **kwargs)

    def _noted(
        self,
        func: Any,
        input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = IGNORED,
        reduce: bool | None = None,
        reduction: str = "mean",
        **more: Any,
    ) -> Tensor:
        more |= {"size_average": size_average, "ignore_index": ignore_index, "reduce": reduce}
        is_mean = reduction == "mean" and size_average is None and reduce is None
        total: Tensor | None = None
        loss: Tensor
        if not is_mean or target.is_floating_point():
            loss = func(input, target, weight, reduction=reduction, **more)
            if is_mean:  # probabilities: each vector of classes, along the second dimension, counts as one target
                total = torch.full((), target.numel() // target.shape[min(1, target.ndim - 1)], device=target.device)
        else:
            # Sum float16 losses in float32, because a sum over many tokens may exceed 65504, the limit of float16.
            wide = torch.float32 if input.dtype == torch.float16 else input.dtype
            of_class = None if weight is None else weight.to(wide)
            summed = func(input.to(wide), target, of_class, reduction="sum", **more)
            counted = (index := whole(target)) != ignore_index
            of_each = counted if of_class is None else of_class.detach()[index.where(counted, 0)] * counted
            total = of_each.sum()
            # If no target counts, divide by 1 and set the loss to 0. A division by 0 would give a NaN, whose gradient
            # would stay NaN even if multiplied by 0.
            loss = (summed / total.where(total > 0, 1)).where(total > 0, 0.0)
        self._calls.append(_Call(target, weight, ignore_index, total))
        return loss

    @property
    def ignored(self) -> int:
        """The target value that the last recorded call ignores."""
        return self._calls[-1].ignored if self._calls else IGNORED

    def weigh(self, metrics: dict[str, Tensor], target: Tensor | None, told: bool) -> None:
        """Add the loss's weight to `metrics` if it is missing there and all recorded means are over the same targets.

        Args:
            told: True to warn the user if targets are ignored or weighted, but the loss's weight is unknown.
        """
        if WEIGHT in metrics or LOSS_WEIGHT in metrics:
            return
        means = [call for call in self._calls if call.weight is not None]
        if means and means[0].weight is not None and all(means[0].like(call) for call in means):
            metrics[LOSS_WEIGHT] = means[0].weight
        elif told and (
            any(call.leaves_out() for call in self._calls)
            or (target is not None and bool((whole(target) == IGNORED).any()))
        ):
            warn(
                "some targets are ignored or weighted, but the loss does not tell how many of them it averages. Means "
                "over batches therefore count examples. To count targets, return their number, or the sum of their "
                f"weights, as {WEIGHT!r} from an objective"
            )
