"""Convolutions and poolings: K members are K groups of one convolution, in channels-last layout.

A grouped convolution in channels-last layout is 1.0 to 2.5 times as fast as one convolution per member. In
channels-first layout it is slower than one per member. This was measured on a CPU, forward and backward, with 8 members
of 8 to 64 channels each. Channels last also keeps the K*C channels of a pixel side by side, so that BatchNorm and
pooling over K*C channels stay vectorized.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion.evaluate.rules import kernel_inputs
from fusion.evaluate.rules.kernel_inputs import finite, of_finite_gradient
from fusion.evaluate.rules.member import Member, Rule

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def channels_last(x: Tensor) -> Tensor:
    """Return `x` in channels-last memory, if torch has that format for its number of dimensions."""
    x = x.contiguous(memory_format=_FORMATS.get(x.dim(), torch.contiguous_format))
    if x.dim() != 4 or x.shape[1] != 1 or x.requires_grad:
        return x
    # With one channel, both layouts are the same in memory, but torch returns channels last only for these strides.
    _, _, height, width = x.shape
    return x.as_strided(x.shape, (height * width, 1, width, 1))


def fold_channels(x: Member, K: int) -> Tensor:
    """Fold [N, C, ...] per member into [N, K*C, ...]; the result is a view if K and C are adjacent in memory."""
    return x.at(K, 1).flatten(1, 2)


def unfold_channels(x: Tensor, K: int) -> Member:
    """Unfold [N, K*C, ...] to a view of [N, C, ...] per member."""
    return Member(x.unflatten(1, (K, -1)), 1)


def convolution(function: Callable[..., Tensor], dims: int) -> Rule:
    """Make the rule that runs the convolution `function` over `dims` dimensions for K members.

    Each member has an input [N, C, ...] and a weight [O, C/groups, ...]. Members may share the input.
    """

    def fold(
        K: int,
        input: Member,
        weight: Member,
        bias: Member | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        batched = input.value.dim() - (input.dim is not None) == dims + 2
        shared = input.dim is None and (groups == 1 or not kernel_inputs.mixes_groups(input.value))
        if weight.dim is None or not batched or (shared and groups != 1):
            return NotImplemented
        x = channels_last(input.value if shared else fold_channels(input, K))
        flat_weight = channels_last(weight.lead(K).flatten(0, 1))
        flat_bias = None if bias is None else bias.lead(K).reshape(-1)
        convolve = function if shared else partial(_of_groups, function)
        out = convolve(x, flat_weight, flat_bias, stride, padding, dilation, groups if shared else K * groups)
        return unfold_channels(out, K)

    return fold


def transposed(function: Callable[..., Tensor], dims: int) -> Rule:
    """Make the rule that runs the transposed convolution `function` over `dims` dimensions for K members.

    Each member has an input [N, C, ...] and a weight [C, O/groups, ...]. Members may share the input.
    """

    def fold(
        K: int,
        input: Member,
        weight: Member,
        bias: Member | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Any:
        if weight.dim is None or input.value.dim() - (input.dim is not None) != dims + 2:
            return NotImplemented
        x = channels_last(fold_channels(input, K))
        flat_weight = weight.lead(K).flatten(0, 1)
        flat_bias = None if bias is None else bias.lead(K).reshape(-1)
        options = stride, padding, output_padding, K * groups, dilation
        return unfold_channels(_of_groups(function, x, flat_weight, flat_bias, *options), K)

    return fold


def _of_groups(
    function: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any
) -> Tensor:
    """Convolve the groups of K members, and keep a NaN or infinity of one member away from other members."""
    if not kernel_inputs.mixes_groups(x):
        return function(x, weight, bias, *options)
    return of_finite_gradient(function(finite(x), finite(weight), bias, *options))


def pooling(function: Callable[..., Any]) -> Rule:
    """Make the rule that runs the pooling `function` over height and width for K members, each with input [N, C, H, W].

    The rule folds K into the channels if K and C are adjacent in memory. Torch would fold K into the batch, and copy
    the input for that.
    """

    def fold(K: int, input: Member, *args: Any, **kwargs: Any) -> Any:
        if input.value.dim() != 5 or input.dim is None or not _side_by_side(input.at(K, 1)):
            return NotImplemented
        out = function(fold_channels(input, K), *args, **kwargs)
        return unfold_channels(out, K) if isinstance(out, Tensor) else NotImplemented

    return fold


def global_pooling(function: Callable[..., Any], dims: int) -> Rule:
    """Make the rule that runs adaptive average pooling over `dims` dimensions for K members.

    Pooling to size 1 becomes a mean, for any memory layout. Torch would loop over the members if the input is a
    channels-last view.
    """
    own = pooling(function) if dims == 2 else None

    def fold(K: int, input: Member, output_size: Any) -> Any:
        out = NotImplemented if own is None else own(K, input, output_size)
        if out is NotImplemented and input.dim is not None and output_size in (1, (1,) * dims, [1] * dims):
            return Member(input.lead(K).mean(tuple(range(-dims, 0)), keepdim=True), 0)
        return out

    return fold


def _side_by_side(x_NKCHW: Tensor) -> bool:
    return x_NKCHW.stride(1) == x_NKCHW.shape[2] * x_NKCHW.stride(2)


def view(K: int, x: Member, *sizes: Any, **kwargs: Any) -> Any:
    """Do `Tensor.view` for K members, by a copy if the layout of a fused convolution allows no view.

    A member alone would have a view, so a later write to one of the two tensors would reach the other one.
    """
    shape = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], Sequence) else sizes
    if x.dim is None or kwargs or not all(isinstance(size, int) for size in shape):
        return NotImplemented
    return Member(x.lead(K).reshape(K, *shape), 0)


def affine_grid(K: int, theta: Member, size: Any, align_corners: bool | None = None) -> Any:
    """Compute `F.affine_grid` for K members, each with theta [N, 2, 3] or [N, 3, 4]; K is folded into N."""
    theta_K = theta.lead(K)
    if theta_K.dim() != 4 or len(size) not in (4, 5) or theta_K.shape[1] != size[0]:
        return NotImplemented  # torch's own function raises the error
    grid = F.affine_grid(theta_K.flatten(0, 1), [K * size[0], *size[1:]], align_corners)
    return Member(grid.unflatten(0, (K, -1)), 0)
