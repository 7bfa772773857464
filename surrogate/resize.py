"""A copy of a module with other sizes: its tensors replaced, its integer attributes with them."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import sympy  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from surrogate.sizes import evaluate
from surrogate.slices import take_part
from surrogate.tracing import SizeTrace


def resize(module: nn.Module, trace: SizeTrace, values: Mapping[sympy.Symbol, int]) -> nn.Module:
    """Rebuild `module` at the sizes that `values` gives its symbols; ties between tensors are kept.

    Buffers are random parts of the module's own. Parameters are uninitialized memory, for the caller to fill.
    """
    shapes = {name: evaluate(sizes, values) for name, sizes in trace.tensors.items()}
    narrow = copy.deepcopy(module)
    _replace_tensors(narrow, shapes)
    for (name, attribute), sizes in trace.attributes.items():
        layer, new = narrow.get_submodule(name), evaluate(sizes, values)
        setattr(layer, attribute, new if isinstance(getattr(layer, attribute), tuple) else new[0])
    for layer in narrow.modules():
        _update_torch_attributes(layer)
    return narrow


def _replace_tensors(module: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
    replaced: dict[int, Tensor] = {}
    for prefix, layer in module.named_modules():
        for table in (layer._parameters, layer._buffers):
            for key, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in replaced:
                    replaced[id(tensor)] = _resized(tensor, shapes[f"{prefix}.{key}" if prefix else key])
                table[key] = replaced[id(tensor)]


def _resized(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach().new_empty(shape), requires_grad=tensor.requires_grad)
    return take_part(tensor, shape)


def _update_torch_attributes(layer: nn.Module) -> None:
    """Sizes that torch's layers state without using them when they run, or that follow from others."""
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    elif isinstance(layer, _ConvTransposeNd):
        layer.in_channels, layer.out_channels = layer.weight.shape[0], layer.weight.shape[1] * layer.groups
    elif isinstance(layer, _ConvNd):
        layer.out_channels, layer.in_channels = layer.weight.shape[0], layer.weight.shape[1] * layer.groups
    elif isinstance(layer, nn.Embedding):
        layer.embedding_dim = layer.weight.shape[1]
    elif isinstance(layer, _NormBase) and layer.running_mean is not None:
        layer.num_features = layer.running_mean.shape[0]
    elif isinstance(layer, nn.GroupNorm) and layer.affine:
        layer.num_groups, layer.num_channels = _groups(layer), layer.weight.shape[0]
    elif isinstance(layer, nn.MultiheadAttention):
        layer.head_dim = layer.embed_dim // layer.num_heads
        if layer._qkv_same_embed_dim:
            layer.kdim = layer.vdim = layer.embed_dim


def _groups(layer: nn.GroupNorm) -> int:
    """As many channels to a group as before; where they do not divide, the next smaller number of groups."""
    channels = layer.weight.shape[0]
    wanted = max(1, layer.num_groups * channels // layer.num_channels)
    return next(groups for groups in range(wanted, 0, -1) if channels % groups == 0)
