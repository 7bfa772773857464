"""Attention logits: muP divides them by the head size, not by its root, wherever the head size is a width.

Relative to the target (head size D), a surrogate with head size d scales its logits by sqrt(D) / d. The target's own
code, with d in the place of D, scales by 1 / sqrt(d): an extra factor of sqrt(D / d). If the number of heads shrinks
instead and the head size stays, nothing changes. This is the better choice (Tensor Programs V, appendix D.4).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

_SCALE_ATTRIBUTES = ("scaling", "scale", "softmax_scale")


@dataclass(frozen=True)
class ScaleQuery:
    """Forward-pre-hook that multiplies an `nn.MultiheadAttention`'s query by sqrt(target head size / head size)."""

    factor: float

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs with the query multiplied, whether it came by position or by name."""
        if args:
            return (args[0] * self.factor, *args[1:]), kwargs
        return args, {**kwargs, "query": kwargs["query"] * self.factor}


def head_sizes(module: nn.Module) -> dict[str, int]:
    """Module name -> size of an attention head, for every module that states one."""
    sizes = {name: getattr(layer, "head_dim", None) for name, layer in module.named_modules()}
    return {name: size for name, size in sizes.items() if isinstance(size, int)}


def find_logit_scales(module: nn.Module, target_heads: Mapping[str, int]) -> dict[str, float]:
    """Module name -> extra factor on its attention logits, where its head size differs from the target's."""
    changed = {}
    for name, size in head_sizes(module).items():
        full = target_heads.get(name, size)
        layer = module.get_submodule(name)
        if full != size and (isinstance(layer, nn.MultiheadAttention) or _scale_attribute(layer, size)):
            changed[name] = math.sqrt(full / size)
    return changed


def scale_logits(module: nn.Module, logits: Mapping[str, float]) -> None:
    """Apply the factors, in place."""
    for name, factor in logits.items():
        layer = module.get_submodule(name)
        attribute = _scale_attribute(layer, layer.head_dim)  # type: ignore[arg-type]
        if attribute:
            setattr(layer, attribute, getattr(layer, attribute) * factor)
        else:
            layer.register_forward_pre_hook(ScaleQuery(factor), with_kwargs=True)


def _scale_attribute(layer: nn.Module, head_size: int) -> str | None:
    """The attribute in which a layer keeps 1 / sqrt(head size), if it keeps it in one."""
    for attribute in _SCALE_ATTRIBUTES:
        value = getattr(layer, attribute, None)
        if isinstance(value, float) and math.isclose(value, head_size**-0.5):
            return attribute
    return None
