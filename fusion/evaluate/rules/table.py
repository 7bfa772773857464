"""Tables of operators and their rules, and the mode that applies the rules under `vmap`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from fusion.evaluate.rules.attention import attention, multi_head_attention
from fusion.evaluate.rules.autocast import autocast
from fusion.evaluate.rules.composite_losses import (
    gaussian_nll,
    kl_div,
    linear_cross_entropy,
    margin_ranking,
    triplet_margin,
)
from fusion.evaluate.rules.conv import affine_grid, convolution, global_pooling, pooling, transposed, view
from fusion.evaluate.rules.drawing import DRAWING, member_by_member
from fusion.evaluate.rules.dropout import dropout, leaky_relu, rrelu
from fusion.evaluate.rules.embedding import embedding, embedding_bag, index_fill, one_hot, torch_embedding
from fusion.evaluate.rules.gradient import backward, data, gradient, needs_grad, requires_grad
from fusion.evaluate.rules.linear import addmm, bilinear, linear, of_sparse
from fusion.evaluate.rules.loss import cross_entropy, ctc
from fusion.evaluate.rules.masked import select_scatter, set_item
from fusion.evaluate.rules.member import Member, Rule, fold, innermost_vmap
from fusion.evaluate.rules.norm import batch_norm, group_norm, normalize, weight_norm
from fusion.evaluate.rules.reading import READING
from fusion.evaluate.rules.recurrent_cells import GRU, LSTM, RNN_RELU, RNN_TANH
from fusion.evaluate.rules.recurrent_layers import pack, recurrent, recurrent_cell, scatter
from fusion.streams import Streams
from fusion.structure.module_parts import is_batched

RULES: dict[Any, Rule] = {
    F.linear: linear,
    torch.addmm: addmm,
    F.conv1d: convolution(F.conv1d, 1),
    F.conv2d: convolution(F.conv2d, 2),
    F.conv3d: convolution(F.conv3d, 3),
    F.conv_transpose1d: transposed(F.conv_transpose1d, 1),
    F.conv_transpose2d: transposed(F.conv_transpose2d, 2),
    F.conv_transpose3d: transposed(F.conv_transpose3d, 3),
    F.max_pool2d: pooling(F.max_pool2d),
    torch.max_pool2d: pooling(torch.max_pool2d),
    F.avg_pool2d: pooling(F.avg_pool2d),
    F.adaptive_avg_pool1d: global_pooling(F.adaptive_avg_pool1d, 1),
    F.adaptive_avg_pool2d: global_pooling(F.adaptive_avg_pool2d, 2),
    F.affine_grid: affine_grid,
    Tensor.view: view,
    F.batch_norm: batch_norm,
    F.group_norm: group_norm,
    F.embedding: embedding,
    torch.embedding: torch_embedding,
    F.embedding_bag: embedding_bag,
    F.one_hot: one_hot,
    **{f: index_fill(f) for f in (torch.index_fill, Tensor.index_fill, Tensor.index_fill_)},
    F.cross_entropy: cross_entropy,
    F.ctc_loss: ctc,
    torch.autograd.grad: gradient,
    Tensor.backward: backward,
    Tensor.requires_grad.__get__: needs_grad,  # type: ignore[attr-defined]
    Tensor.data.__get__: data,  # type: ignore[attr-defined]
    torch.lstm_cell: recurrent_cell(LSTM),
    torch.gru_cell: recurrent_cell(GRU),
    torch.rnn_tanh_cell: recurrent_cell(RNN_TANH),
    torch.rnn_relu_cell: recurrent_cell(RNN_RELU),
    torch._pack_padded_sequence: pack(torch._pack_padded_sequence),
    torch._pad_packed_sequence: pack(torch._pad_packed_sequence),
    Tensor.scatter_: scatter,
    Tensor.__setitem__: set_item,
    **READING,
}

# Rules of operators that draw random numbers. They also take the argument `streams`, one stream for each member.
DRAWING_RULES: dict[Any, Rule] = {
    F.dropout: dropout,
    F.scaled_dot_product_attention: attention,
    torch.lstm: recurrent(torch.lstm, LSTM),
    torch.gru: recurrent(torch.gru, GRU),
    torch.rnn_tanh: recurrent(torch.rnn_tanh, RNN_TANH),
    torch.rnn_relu: recurrent(torch.rnn_relu, RNN_RELU),
}

# If members share a tensor, these functions give each member its own copy, because the members' gradients will differ.
REQUIRING: dict[Any, Rule] = {Tensor.requires_grad_: requires_grad, Tensor.requires_grad.__set__: requires_grad}  # type: ignore[attr-defined]

# Functions that make empty tensors. Code may fill such a tensor in place later, so it must have room for each member.
UNFILLED = {torch.empty, torch.empty_like, Tensor.new_empty}

# Functions whose results may share memory with an object that is no tensor, such as a NumPy array. `_is_new` therefore
# returns False for their results.
HELD = {torch.as_tensor, torch.asarray, torch.from_numpy, torch.frombuffer, torch.utils.dlpack.from_dlpack}

# Functions written for one member. They run inside `vmap`, and call operators that have rules.
COMPOSITES: dict[Any, Rule] = {
    F.multi_head_attention_forward: multi_head_attention,
    F.normalize: normalize,
    torch._weight_norm: weight_norm,
    F.bilinear: bilinear,
    F.gaussian_nll_loss: gaussian_nll,
    F.kl_div: kl_div,
    getattr(F, "linear_cross_entropy", None): linear_cross_entropy,  # exists from torch 2.13 on
    F.margin_ranking_loss: margin_ranking,
    F.triplet_margin_loss: triplet_margin,
    F.leaky_relu: leaky_relu,
    F.rrelu: rrelu,
    torch.select_scatter: select_scatter,
    Tensor.select_scatter: select_scatter,
}

# Products whose first factor may be a sparse matrix.
PRODUCTS = {
    *(torch.mm, torch.matmul, torch.mv, torch.spmm, torch.sparse.mm),
    *(Tensor.mm, Tensor.matmul, Tensor.mv, Tensor.__matmul__),
}

# Operators of several tensors that `vmap` supports neither by a rule nor by a loop.
OF_SEVERAL = {torch.column_stack, torch._C._nn.pad_sequence}


class folded(TorchFunctionMode):  # noqa: N801 - used as a context manager
    """Inside this context, `torch.func.vmap` over members applies the rules: K is folded into each operator.

    Results and gradients equal those of `vmap`, but are computed faster. Torch handles operators without a rule,
    unusual arguments, and nested transforms (`vmap` of `grad`). Known operators that draw random numbers draw from each
    member's own stream. Unknown ones raise an error under `vmap(randomness="error")`.

    Example:
        >>> import torch
        >>> weight_KOI, x_NI = torch.randn(3, 5, 4), torch.randn(2, 4)
        >>> with folded(Streams(3)):
        ...     out_KNO = torch.func.vmap(lambda w: torch.nn.functional.linear(x_NI, w))(weight_KOI)
        >>> out_KNO.shape
        torch.Size([3, 2, 5])
    """

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self._streams = streams
        self._own: dict[int, tuple[Tensor, Any]] = {}
        self._fresh: dict[int, ref[Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._own:
            # Do not let `tree_map` make a tuple of a size: `x.new(torch.Size((2, 3)))` has this size, but
            # `x.new((2, 3))` has these elements.
            args, kwargs = tree_map(self.of_each, (args, kwargs), is_leaf=lambda x: isinstance(x, torch.Size))
        args, kwargs = autocast(func, args, kwargs)
        first: Any = args[0] if args else None
        if self._is_fresh(first) and _writes(func):
            own = fold(_one_for_each, args, kwargs, draws=_draws(func, args, kwargs))
            if own is not NotImplemented:
                self._own[id(first)] = first, own
                args = (own, *args[1:])
        result = NotImplemented
        if func in RULES:
            result = fold(RULES[func], args, kwargs)
        elif func in DRAWING_RULES:
            rule = partial(DRAWING_RULES[func], streams=self._streams)
            result = fold(rule, args, kwargs, draws=_draws(func, args, kwargs))
        elif func in REQUIRING:
            result = fold(REQUIRING[func], args, kwargs, draws=True)
            if result is not NotImplemented:
                self._own[id(args[0])] = args[0], result
        elif func in UNFILLED:
            result = fold(partial(_unfilled, func), args, kwargs, draws=True)
        elif func in PRODUCTS and args and args[0].layout is not torch.strided:
            result = fold(of_sparse, args, kwargs)
        elif func in OF_SEVERAL:
            result = fold(member_by_member(func, self._streams), args, kwargs)
        elif func in COMPOSITES and innermost_vmap() is not None:
            with self:
                result = COMPOSITES[func](*args, **kwargs)
        if result is NotImplemented and _draws(func, args, kwargs):
            result = fold(member_by_member(func, self._streams), args, kwargs, draws=True)
        result = func(*args, **kwargs) if result is NotImplemented else result
        if _is_new(func, args, kwargs, result):
            self._fresh[id(result)] = ref(result)
        elif self._fresh and not (isinstance(result, Tensor) and is_batched(result)):
            for x in filter(self._is_fresh, tree_leaves((args, kwargs))):
                if _views(result, x):
                    del self._fresh[id(x)]  # do not copy `x` for each member: this view would miss writes to copies
        return result

    @property
    def copied(self) -> bool:
        """Return whether a shared tensor has been copied for each member, see `of_each`."""
        return bool(self._own)

    def _is_fresh(self, x: Any) -> bool:
        """Return whether `x` is a new tensor (see `_is_new`) without a known view."""
        known = self._fresh.get(id(x)) if self._fresh else None
        return known is not None and known() is x

    def of_each(self, x: Any) -> Any:
        """Return the members' own copies of `x` if `x` is a shared tensor that has been copied; else return `x`.

        `REQUIRING` and `_is_new` tell which tensors are copied for each member.
        """
        known, own = self._own.get(id(x), (None, None)) if isinstance(x, Tensor) else (None, None)
        return x if known is not x or known is None else own


def _one_for_each(K: int, x: Member, *args: Any, **kwargs: Any) -> Any:
    """Copy a shared tensor for each member, before members write different values to it."""
    return NotImplemented if x.dim is not None else Member(x.lead(K).clone(), 0)


def _is_new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
    """Return whether `result` is a new tensor that shares memory with no other.

    If members later write to such a tensor, each gets its own copy.
    """
    if not isinstance(result, Tensor) or is_batched(result) or result.layout is not torch.strided:
        return False
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and not is_batched(x)]
    if func in HELD or getattr(func, "__name__", "") == "__get__" or any(map(_is_wrapped, [result, *given])):
        return False
    place = result.untyped_storage()._cdata
    return all(x.layout is torch.strided and x.untyped_storage()._cdata != place for x in given)


_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
"""Tells whether a tensor belongs to a transform such as `vmap`, and therefore hides its place in memory."""


def _views(result: Any, tensor: Tensor) -> bool:
    """Return whether a tensor in `result`, other than `tensor` itself, may use the memory of `tensor`.

    Only tensors without a hidden K axis count.
    """
    plain = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x is not tensor and not is_batched(x)]
    if not plain or is_batched(tensor):
        return False
    if any(map(_is_wrapped, [tensor, *plain])):
        return True  # another transform hides the memory, so any tensor may be a view
    place = tensor.untyped_storage().data_ptr()
    return any(x.untyped_storage().data_ptr() == place for x in plain)


def _writes(func: Any) -> bool:
    """Return whether a method such as `add_` or `__setitem__` writes to its tensor."""
    name = getattr(func, "__name__", "")
    return name in _OPERATORS_THAT_WRITE or (name.endswith("_") and not name.endswith("__"))


_OPERATORS_THAT_WRITE = {
    "__setitem__",
    *(f"__i{name}__" for name in ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "and", "or", "xor")),
}
"""Names of methods that Python calls for `x[i] = y`, `x += y`, `x |= y` and the like."""


def _unfilled(func: Any, K: int, *args: Any, **kwargs: Any) -> Any:
    """Make an empty tensor for each member; `vmap` would make a single one for all."""
    if any(isinstance(x, Member) and x.dim is not None for x in args) or kwargs.get("out") is not None:
        return NotImplemented
    one = func(*(x.value if isinstance(x, Member) else x for x in args), **kwargs)
    return Member(one.new_empty((K, *one.shape)), 0)


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return func in DRAWING and DRAWING[func](*args, **kwargs)
