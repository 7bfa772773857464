"""Narrower models of the `transformers` library, from their configuration: fewer heads of the same size."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn


def narrow_by_config(module: nn.Module, width_ratio: float) -> nn.Module | None:
    """Build `type(module)` from a narrower copy of `module.config`.

    Returns:
        None where the module has no such configuration, is not built from it alone, or was changed since.
    """
    config = getattr(module, "config", None)
    if not hasattr(config, "to_dict") or not (hasattr(config, "hidden_size") or hasattr(config, "hidden_sizes")):
        return None
    try:
        with torch.random.fork_rng(devices=[]):
            narrow: nn.Module = type(module)(narrow_config(config, width_ratio))
    except Exception:  # a wrapper that shows its base model's configuration, or sizes that this family ties otherwise
        return None
    if dict(narrow.named_parameters()).keys() != dict(module.named_parameters()).keys():
        return None
    first = next(module.parameters())
    return narrow.to(device=first.device, dtype=first.dtype).train(module.training)


def narrow_config(config: Any, width_ratio: float) -> Any:
    """A copy with fewer heads of the same size, a hidden size of that many heads and a narrower MLP.

    If the ratio leaves no whole number of heads, it is rounded up, and the MLP follows the hidden size. Key-value
    heads are rounded up to a number that divides the heads.

    Args:
        config: A `transformers` configuration (GPT-2, Llama, BERT, ViT, ResNet, or another with attributes of the same
            names).
        width_ratio: In (0, 1].
    """
    narrow = copy.deepcopy(config)
    if hasattr(config, "hidden_sizes"):
        narrow.hidden_sizes = [_ceil(size * width_ratio) for size in config.hidden_sizes]
        narrow.embedding_size = _ceil(config.embedding_size * width_ratio)
        return narrow
    heads = _ceil(config.num_attention_heads * width_ratio)
    narrow.num_attention_heads = heads
    narrow.hidden_size = heads * (config.hidden_size // config.num_attention_heads)
    actual = heads / config.num_attention_heads
    if getattr(config, "num_key_value_heads", None):
        wanted = _ceil(config.num_key_value_heads * actual)
        narrow.num_key_value_heads = next(n for n in range(wanted, heads + 1) if heads % n == 0)
    for name in ("intermediate_size", "n_inner", "ffn_dim", "hidden_dim", "d_ff"):
        if getattr(config, name, None):
            setattr(narrow, name, _ceil(getattr(config, name) * actual))
    return narrow


def _ceil(size: float) -> int:
    return max(1, math.ceil(size - 1e-9))
