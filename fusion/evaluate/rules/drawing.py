"""Operators that draw random numbers: each member draws from its own stream, and gets the same numbers as alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_batchedtensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from fusion.evaluate.rules.member import Member, Rule
from fusion.streams import Streams

Draws = Callable[..., bool]
"""A function of a call's arguments that returns whether the call draws from a global generator, not a given one."""


def member_by_member(function: Callable[..., Any], streams: Streams, *, plain_scalars: bool = False) -> Rule:
    """Make a rule that calls an operator once per member, drawing from that member's stream, and stacks the results.

    Args:
        plain_scalars: If True, each member's 0-dimensional floating-point tensors become plain numbers for the call. If
            False, only those become plain numbers that stand for floats of modules.
    """

    def rule(K: int, *args: Any, **kwargs: Any) -> Any:
        # An in-place operator gets a copy of each member's part. With views of one tensor, autograd would take a write
        # to one view for a write to all.
        in_place = _is_in_place(function, args, kwargs)
        if in_place and args[0].dim is None:
            return NotImplemented
        leaves, spec = tree_flatten((args, kwargs), is_leaf=lambda x: isinstance(x, Member))
        parted = [_part(x, K, in_place, plain_scalars) for x in leaves]
        results = []
        for k in range(K):
            own_args, own_kwargs = tree_unflatten([x[k] if isinstance(x, _Parts) else x for x in parted], spec)
            with streams[k].drawn_from(beyond_torch=False):
                results.append(function(*own_args, **own_kwargs))
        if in_place:
            args[0].lead(K).copy_(torch.stack(results))
            return args[0]
        if isinstance(results[0], tuple):
            return tuple(_joined(column) for column in zip(*results, strict=True))
        return _joined(results)

    return rule


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def strides_alone(x_K: Tensor) -> tuple[int, ...]:
    """Return the strides that one member's part of [K, ...] would have if the member ran alone.

    The strides have no gaps and keep the order of axes in memory, except that channels last becomes channels first. The
    rules of convolutions use channels last, but a member alone does not. The order matters, because torch draws random
    numbers in the order of memory.
    """
    dense = torch.empty_like(x_K[0], device="meta")
    last = _CHANNELS_LAST.get(dense.dim())
    if last is not None and dense.is_contiguous(memory_format=last):
        dense = dense.contiguous()
    return dense.stride()


class ChannelsFirst(TorchFunctionMode):
    """Makes a module that runs alone draw random numbers in the order of fused members: see `strides_alone`.

    This matters if the module's own activations have channels-last strides, for example in a transformer before a
    convolution.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DRAWING and args and isinstance(args[0], Tensor) and not _is_in_place(func, args, kwargs):
            last = None if is_batchedtensor(args[0]) else _CHANNELS_LAST.get(args[0].dim())
            if last is not None and args[0].is_contiguous(memory_format=last):
                args = (args[0].contiguous(), *args[1:])
        return func(*args, **kwargs)


def laid_out(x_K: Tensor) -> Tensor:
    """Return `x_K` with each member's part in the memory layout that it would have alone."""
    strides = strides_alone(x_K)
    if x_K.stride()[1:] == strides:
        return x_K
    dense = torch.empty_strided(x_K.shape, (x_K[0].numel(), *strides), dtype=x_K.dtype, device=x_K.device)
    return dense.copy_(x_K)


class _Parts(list[Any]):
    """K values, one for each member."""


def _part(x: Any, K: int, in_place: bool, plain_scalars: bool) -> Any:
    if not isinstance(x, Member):
        return x
    if x.dim is None:
        return x.value
    if x.value.ndim == 1 and x.value.is_floating_point() and (plain_scalars or "numbers" in vars(x.value)):
        return _Parts(x.numbers())
    x_K = laid_out(x.lead(K))
    return _Parts(part.clone() for part in x_K.unbind()) if in_place else _Parts(x_K.unbind())


def _is_in_place(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call writes to its first argument: its name ends with "_", or `inplace` is True."""
    code = getattr(function, "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code else ()
    return function.__name__.endswith("_") or {**dict(zip(names, args)), **kwargs}.get("inplace") is True


def _joined(results: Any) -> Any:
    return Member(torch.stack(list(results)), 0) if isinstance(results[0], Tensor) else results[0]


def _always(*args: Any, generator: Any = None, out: Any = None, **kwargs: Any) -> bool:
    return generator is None and out is None


def _in_training(*args: Any, training: bool = True, **kwargs: Any) -> bool:
    return training


def _in_attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = 0.0, *args: Any, **kwargs: Any
) -> bool:
    return isinstance(dropout_p, Tensor) or dropout_p > 0


def _in_multi_head_attention(*args: Any, training: bool = True, **kwargs: Any) -> bool:
    return training and (isinstance(args[10], Tensor) or args[10] > 0)


DRAWING: dict[Any, Draws] = {
    **dict.fromkeys(
        [F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, F.rrelu],
        _in_training,
    ),
    F.scaled_dot_product_attention: _in_attention,
    F.multi_head_attention_forward: _in_multi_head_attention,
    **dict.fromkeys([torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu], _always),
    **dict.fromkeys(
        [
            F.gumbel_softmax,
            *(getattr(F, f"fractional_max_pool{d}d{form}") for d in (2, 3) for form in ("", "_with_indices")),
            *(
                getattr(torch, f"{kind}dropout{form}")
                for kind in ("", "alpha_", "feature_", "feature_alpha_")
                for form in ("", "_")
            ),
            *(torch.native_dropout, torch.rrelu, torch.rrelu_),
            *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal),
            *(torch.rand_like, torch.randn_like, torch.randint_like),
            *(torch.bernoulli, torch.multinomial, torch.poisson, torch.binomial),
            *(torch._standard_gamma, torch._sample_dirichlet),  # torch.distributions draws with these
            *(Tensor.bernoulli, Tensor.multinomial, Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_),
            *(Tensor.exponential_, Tensor.random_, Tensor.geometric_, Tensor.cauchy_, Tensor.log_normal_),
        ],
        _always,
    ),
}
"""Maps operators that draw random numbers to functions that tell whether a call draws.

Operators that are missing here raise an error under `vmap`.
"""
