"""Build narrower models of the `transformers` library from a changed configuration: fewer heads of the same size."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn

_WIDTHS = (
    *("intermediate_size", "n_inner", "ffn_dim", "hidden_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "d_inner", "ffn_hidden_size"),
    *("pooler_hidden_size", "word_embed_proj_dim"),
)
"""Names of sizes in configurations that shrink with the hidden size."""


def narrow_by_config(module: nn.Module, width_ratio: float) -> nn.Module | None:
    """Build `type(module)` from a narrower copy of `module.config`; None if the result would have other layers."""
    config = getattr(module, "config", None)
    if not (_has_widths(config) or _parts(config)):
        return None
    try:
        with torch.random.fork_rng(devices=[]):
            narrow: nn.Module = type(module)(narrow_config(config, width_ratio))
    except Exception:
        # The constructor fails, for example, if a wrapper has the configuration of its base model, or if a family of
        # models ties sizes in another way.
        return None
    if dict(narrow.named_parameters()).keys() != dict(module.named_parameters()).keys():
        return None
    if _kinds(narrow) != _kinds(module):  # a part of `module` was replaced, for example by `nn.Identity()`
        return None
    _keep_scales(narrow, module)
    first = next(module.parameters())
    narrow = narrow.to(device=first.device, dtype=first.dtype)
    _keep_marks(narrow, module)
    return narrow


def _has_widths(config: Any) -> bool:
    return hasattr(config, "to_dict") and (hasattr(config, "hidden_size") or hasattr(config, "hidden_sizes"))


def _parts(config: Any) -> dict[str, Any]:
    """Return the configurations inside a configuration, such as CLIP's for text and images."""
    inner = vars(config) if hasattr(config, "to_dict") else {}
    return {name: value for name, value in inner.items() if _has_widths(value)}


def _kinds(module: nn.Module) -> dict[str, str]:
    """Return each submodule's class name. Classes cannot be compared, because each parametrized layer has its own."""
    return {path: type(part).__name__ for path, part in module.named_modules()}


def _keep_marks(narrow: nn.Module, module: nn.Module) -> None:
    """Copy training modes, `requires_grad` and attributes of parameters from the target `module` to `narrow`."""
    parts, parameters = dict(module.named_modules()), dict(module.named_parameters())
    for path, part in narrow.named_modules():
        part.training = parts[path].training
    for name, parameter in narrow.named_parameters():
        parameter.requires_grad_(parameters[name].requires_grad)
        vars(parameter).update(vars(parameters[name]))  # such as marks by which an optimizer selects parameters


def _keep_scales(narrow: nn.Module, module: nn.Module) -> None:
    """Copy the factors of the forward pass from the target `module` to `narrow`, in place.

    Some factors are square roots of the hidden size, such as that of embeddings, so the narrow model has other ones.
    muP's multipliers assume the target's factors.
    """
    layers = dict(module.named_modules())
    for path, layer in narrow.named_modules():
        for name, value in vars(layer).items():
            full = getattr(layers[path], name, None)
            # T5 keeps its factor as an integer: it divides its last hidden states by the square root of `model_dim`.
            # T5 reads `model_dim` nowhere else.
            if (type(value) is float and type(full) is float) or (name == "model_dim" and type(full) is int):
                setattr(layer, name, full)
        for name, buffer in layer.named_buffers(recurse=False):
            if buffer.dim() == 0 and buffer.is_floating_point():
                buffer.copy_(layers[path].get_buffer(name))


def narrow_config(config: Any, width_ratio: float) -> Any:
    """Return a copy with fewer heads of the same size, the hidden size that these heads make up, and a narrower MLP.

    The number of heads is rounded up, and the MLP shrinks by the same ratio. The number of key-value heads is rounded
    up to one that divides the number of heads.

    Args:
        config: A `transformers` configuration (GPT-2, Llama, BERT, ViT, ResNet, T5, BART, CLIP, or another with
            attributes of the same names, or with such configurations inside).
    """
    narrow = copy.deepcopy(config)
    for name, part in _parts(config).items():
        setattr(narrow, name, narrow_config(part, width_ratio))
    if not _has_widths(config) or _parts(config):
        return narrow
    if hasattr(config, "hidden_sizes"):
        narrow.hidden_sizes = [_ceil(size * width_ratio) for size in config.hidden_sizes]
        narrow.embedding_size = _ceil(config.embedding_size * width_ratio)
        return narrow
    if isinstance(config.num_attention_heads, list | tuple):  # Swin, in which each stage doubles heads and width
        first = config.num_attention_heads[0]
        actual = _ceil(first * width_ratio) / first
        narrow.num_attention_heads = [_ceil(heads * actual) for heads in config.num_attention_heads]
        narrow.embed_dim, narrow.hidden_size = _ceil(config.embed_dim * actual), _ceil(config.hidden_size * actual)
        return narrow
    heads = _ceil(config.num_attention_heads * width_ratio)
    actual = heads / config.num_attention_heads
    narrow.hidden_size = _ceil(config.hidden_size * actual)
    narrow.num_attention_heads = heads
    for name in ("encoder_attention_heads", "decoder_attention_heads"):
        if hasattr(config, name):
            setattr(narrow, name, _ceil(getattr(config, name) * actual))
    if getattr(config, "num_key_value_heads", None):
        wanted = _ceil(config.num_key_value_heads * actual)
        narrow.num_key_value_heads = next(n for n in range(wanted, heads + 1) if heads % n == 0)
    for name in _WIDTHS:
        if getattr(config, name, None):
            setattr(narrow, name, _ceil(getattr(config, name) * actual))
    return narrow


def _ceil(size: float) -> int:
    return max(1, math.ceil(size - 1e-9))
