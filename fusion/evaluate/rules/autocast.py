"""Autocast for functions that torch takes apart under `vmap` before autocast sees them.

Without these casts, a convolution or `prelu` would get inputs of two dtypes, which is an error. A loss would be
computed in half precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from fusion.evaluate.rules.kernel_inputs import cast


def autocast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a function in the precision in which autocast computes it."""
    convert = _CONVERSIONS.get(func)
    return (args, kwargs) if convert is None else tree_map(convert, (args, kwargs))


def _to_half(x: Any) -> Any:
    return cast(x) if isinstance(x, Tensor) and x.is_floating_point() else x


def _to_float32(x: Any) -> Any:
    is_half = isinstance(x, Tensor) and x.dtype in (torch.float16, torch.bfloat16)
    return x.float() if is_half and torch.is_autocast_enabled(x.device.type) else x


def _to_float32_on_cpu(x: Any) -> Any:
    return _to_float32(x) if isinstance(x, Tensor) and x.device.type == "cpu" else x


_TRANSFORMS = [f for name, f in vars(torch.fft).items() if name.rstrip("2n").endswith("fft")]

_CONVERSIONS: dict[Any, Callable[[Any], Any]] = {
    **dict.fromkeys([F.conv1d, F.conv2d, F.conv3d, F.prelu], _to_half),
    **dict.fromkeys([F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d], _to_half),
    **dict.fromkeys(
        [
            *(F.binary_cross_entropy_with_logits, F.cosine_embedding_loss, F.cross_entropy, F.ctc_loss),
            *(F.hinge_embedding_loss, F.huber_loss, F.kl_div, F.l1_loss, F.margin_ranking_loss, F.mse_loss),
            *(F.multi_margin_loss, F.multilabel_margin_loss, F.nll_loss, F.poisson_nll_loss, F.smooth_l1_loss),
            *(F.soft_margin_loss, F.triplet_margin_loss, torch.cdist),
        ],
        _to_float32,
    ),
    **dict.fromkeys(_TRANSFORMS, _to_float32_on_cpu),
}
"""Maps functions to the conversion of their arguments under autocast.

It is the same on CPUs and on CUDA devices, except for Fourier transforms.
"""
