"""Copy a module at other sizes: its integer attributes, its buffers, and its initial weights.

Initial weights are random parts of the target's weights, so they have the standard deviation of the model's own
initializer. Parts of hidden weights are multiplied by 1 / sqrt(width_mult), as muP asks. Other weights, constants and
identity matrices are not multiplied. Dimensions of the same size keep the same units in all tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from surrogate.widths import ParamWidth, Shape

_FIRST = 16
Units = dict[tuple[int, int], Tensor]
"""(Full size, narrow size) -> the indices of the units that were drawn."""


def take_part(tensor: Tensor, shape: Shape, units: Units, gates: int = 1) -> Tensor:
    """Return a copy of `tensor` that is cut to `shape`: random rows, columns and so on stay, in their order.

    Torch's global generator draws the indices that stay along each shortened dimension (the units).

    Args:
        shape: Shape of the result; no dimension is larger than in `tensor`.
        units: (Full size, cut size) -> the indices that stay. A missing pair is drawn and added in place. Calls with
            the same `units` cut alike, so that equal tensors stay equal, and the masks of an autoregressive network's
            layers (MADE) still fit each other.
        gates: Number of equal blocks of rows, such as the gates of a GRU. The same rows stay in each block.

    >>> take_part(torch.arange(6.0), (6,), {})
    tensor([0., 1., 2., 3., 4., 5.])
    """
    if gates > 1 and shape[0] < len(tensor):
        each = shape[0] // gates
        return take_part(tensor.unflatten(0, (gates, -1)), (gates, each, *shape[1:]), units).flatten(0, 1)
    for dim, (full, size) in enumerate(zip(tensor.shape, shape)):
        if size < full:
            if (full, size) not in units:
                units[full, size] = torch.randperm(full)[:size].sort().values
            tensor = tensor.index_select(dim, units[full, size].to(tensor.device))
    return tensor.clone()


def fill_from_target(narrow: nn.Module, target: nn.Module, params: Mapping[str, ParamWidth]) -> None:
    """Fill the parameters of `narrow` with scaled parts of the target's, in place."""
    wide, gates, units = dict(target.named_parameters()), _gates(target), Units()
    with torch.no_grad():
        for name, parameter in narrow.named_parameters():
            full = wide[name].detach()
            part = take_part(full, tuple(parameter.shape), units, gates.get(name, 1))
            if _is_pattern(full):
                parameter.copy_(_first(full, tuple(parameter.shape), gates.get(name, 1)))
            else:
                parameter.copy_(part * params[name].spread)


def _first(tensor: Tensor, shape: Shape, gates: int) -> Tensor:
    if gates > 1:
        return _first(tensor.unflatten(0, (gates, -1)), (gates, shape[0] // gates, *shape[1:]), 1).flatten(0, 1)
    if tensor.dim() == 1:  # evenly spaced elements, because the gates of a bias may have different constants
        return tensor[torch.arange(*shape, device=tensor.device) * len(tensor) // shape[0]]
    return tensor[tuple(slice(size) for size in shape)]


def _gates(module: nn.Module) -> dict[str, int]:
    """Map parameters to the number of equal parts of their rows: a recurrent layer's gates, or query, key and value."""
    found = {}
    for path, layer in module.named_modules():
        for own, parameter in layer.named_parameters(recurse=False):
            if isinstance(layer, nn.RNNBase | nn.RNNCellBase) and not own.startswith("weight_hr"):
                found[f"{path}.{own}" if path else own] = len(parameter) // layer.hidden_size
            elif isinstance(layer, nn.MultiheadAttention) and own.startswith("in_proj"):
                found[f"{path}.{own}" if path else own] = 3
    return found


def _is_pattern(tensor: Tensor) -> bool:
    """Return whether a tensor has at most two different values, such as a constant or an identity.

    Signs, such as those of a weight that starts as plus or minus one number at random, are no pattern.
    """
    if not tensor.numel():
        return True
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if len(tensor.flatten()[:_FIRST].unique()) > 2:  # most tensors return here, and their other elements are not read
        return False
    least, most = tensor.min(), tensor.max()
    if least == -most and most > 0:
        return False
    return bool(((tensor == least) | (tensor == most)).all())


AttributeKey = tuple[str, str]
"""Module name, attribute name."""


@dataclass(frozen=True)
class NarrowSizes:
    """Sizes of the copy of a module, as plain numbers.

    Attributes:
        tensors: Parameter or buffer name -> its shape in the copy.
        attributes: (Module name, attribute name) -> its numbers in the module, and those in the copy. An attribute is
            an integer or a tuple of sizes.
        kept: One line for each size that stays, with the reason.
    """

    tensors: Mapping[str, Shape]
    attributes: Mapping[AttributeKey, tuple[Shape, Shape]]
    kept: tuple[str, ...] = ()


def resize(module: nn.Module, sizes: NarrowSizes) -> nn.Module:
    """Rebuild `module` at other sizes; ties between tensors are kept.

    Buffers are random parts of the module's buffers. Parameters are uninitialized memory, which the caller must fill.
    """
    parameters, buffers, units = module.named_parameters(), module.named_buffers(), Units()
    memo: dict[int, Any] = {id(tensor): _like(tensor, sizes.tensors[name]) for name, tensor in parameters}
    parts = {name: take_part(tensor, sizes.tensors[name], units) for name, tensor in buffers}
    memo |= {id(module.get_buffer(name)): part.clone() for name, part in parts.items()}
    # With this memo, `deepcopy` puts the narrow tensors in place of the wide ones, wherever the module holds them.
    narrow = copy.deepcopy(module, memo)
    for (name, attribute), (_, new) in sizes.attributes.items():
        layer = narrow.get_submodule(name)
        if isinstance(layer, nn.GroupNorm) and attribute == "num_channels":
            layer.num_groups = _groups(layer, new[0])
        setattr(layer, attribute, new if isinstance(getattr(layer, attribute), tuple) else new[0])
    for layer in narrow.modules():
        _update_torch_attributes(layer)
    # Restore the buffers. The calls above read weights, and reading the weight of a spectral norm changes its buffers.
    # The weights are not filled yet, so the changed buffers are wrong.
    for name, buffer in narrow.named_buffers():
        buffer.copy_(parts[name])
    return narrow


def _like(parameter: Tensor, shape: Shape) -> nn.Parameter:
    narrow = nn.Parameter(parameter.detach().new_empty(shape), requires_grad=parameter.requires_grad)
    vars(narrow).update(vars(parameter))  # attributes, such as marks by which an optimizer selects parameters
    return narrow


def size_of(layer: nn.Module, attribute: str) -> Shape:
    """Return the sizes that an attribute holds, as a tuple."""
    value = getattr(layer, attribute)
    return tuple(value) if isinstance(value, tuple) else (value,)


def _update_torch_attributes(layer: nn.Module) -> None:
    """Update size attributes of torch's layers that the forward pass does not use, or that follow from other sizes."""
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    elif isinstance(layer, _ConvTransposeNd):
        layer.in_channels, layer.out_channels = layer.weight.shape[0], layer.weight.shape[1] * layer.groups
    elif isinstance(layer, _ConvNd):
        layer.out_channels, layer.in_channels = layer.weight.shape[0], layer.weight.shape[1] * layer.groups
    elif isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        layer.embedding_dim = layer.weight.shape[1]
    elif isinstance(layer, _NormBase) and layer.running_mean is not None:
        layer.num_features = layer.running_mean.shape[0]
    elif isinstance(layer, nn.GroupNorm) and layer.affine:
        layer.num_groups, layer.num_channels = _groups(layer, len(layer.weight)), len(layer.weight)
    elif isinstance(layer, nn.MultiheadAttention):
        layer.head_dim = layer.embed_dim // layer.num_heads
        if layer._qkv_same_embed_dim:
            layer.kdim = layer.vdim = layer.embed_dim
    elif isinstance(layer, nn.Bilinear):
        layer.out_features, layer.in1_features, layer.in2_features = layer.weight.shape
    elif isinstance(layer, nn.Transformer):
        layer.nhead = next((m.num_heads for m in layer.modules() if isinstance(m, nn.MultiheadAttention)), layer.nhead)


def _groups(layer: nn.GroupNorm, channels: int) -> int:
    """Return the number of groups that keeps the size of a group, or the next smaller divisor of `channels`."""
    wanted = max(1, layer.num_groups * channels // layer.num_channels)
    return next(groups for groups in range(wanted, 0, -1) if channels % groups == 0)
