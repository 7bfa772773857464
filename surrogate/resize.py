"""A copy of a module with other sizes: its tensors replaced, its integer attributes with them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from surrogate.output_sizes import Shape
from surrogate.slices import take_part

AttributeKey = tuple[str, str]
"""Module name, attribute name."""


@dataclass(frozen=True)
class NarrowSizes:
    """Sizes of the copy of a module, as plain numbers.

    Attributes:
        tensors: Parameter or buffer name -> its shape in the copy.
        attributes: Integer attribute, or tuple of sizes -> its numbers in the module and in the copy.
        kept: Sizes that stay, and why, one line each.
    """

    tensors: Mapping[str, Shape]
    attributes: Mapping[AttributeKey, tuple[Shape, Shape]]
    kept: tuple[str, ...] = ()


def resize(module: nn.Module, sizes: NarrowSizes) -> nn.Module:
    """Rebuild `module` at other sizes; ties between tensors are kept.

    Buffers are random parts of the module's own. Parameters are uninitialized memory, for the caller to fill.
    """
    parameters, buffers = module.named_parameters(), module.named_buffers()
    memo: dict[int, Any] = {id(tensor): _like(tensor, sizes.tensors[name]) for name, tensor in parameters}
    memo |= {id(tensor): take_part(tensor, sizes.tensors[name]) for name, tensor in buffers}
    # The narrow tensors take the wide ones' places while the module is copied, wherever it holds them.
    narrow = copy.deepcopy(module, memo)
    for (name, attribute), (_, new) in sizes.attributes.items():
        layer = narrow.get_submodule(name)
        setattr(layer, attribute, new if isinstance(getattr(layer, attribute), tuple) else new[0])
    for layer in narrow.modules():
        _update_torch_attributes(layer)
    return narrow


def _like(parameter: Tensor, shape: Shape) -> nn.Parameter:
    narrow = nn.Parameter(parameter.detach().new_empty(shape), requires_grad=parameter.requires_grad)
    vars(narrow).update(vars(parameter))  # such as marks by which an optimizer chooses its parameters
    return narrow


def size_of(layer: nn.Module, attribute: str) -> Shape:
    """The number, or the numbers, that an attribute holds."""
    value = getattr(layer, attribute)
    return tuple(value) if isinstance(value, tuple) else (value,)


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
    elif isinstance(layer, nn.Bilinear):
        layer.out_features, layer.in1_features, layer.in2_features = layer.weight.shape
    elif isinstance(layer, nn.Transformer):
        layer.nhead = next((m.num_heads for m in layer.modules() if isinstance(m, nn.MultiheadAttention)), layer.nhead)


def _groups(layer: nn.GroupNorm) -> int:
    """As many channels to a group as before; where they do not divide, the next smaller number of groups."""
    channels = layer.weight.shape[0]
    wanted = max(1, layer.num_groups * channels // layer.num_channels)
    return next(groups for groups in range(wanted, 0, -1) if channels % groups == 0)
