"""Replacements for torch functions that read sizes as plain numbers, for a forward pass on symbolic sizes.

Each replacement takes the arguments of torch's function and returns tensors of the right shapes, but with arbitrary
values. It uses operators that state the equations between sizes. For example, the size of a GRU's hidden state equals
the number of columns of its recurrent weight. To "fix" a size means to convert its symbol to a number, so that the size
stays in the narrow copy.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree


class SymbolicFunctions(TorchFunctionMode):
    """Calls the replacements of this module in place of torch's functions, inside the context.

    Args:
        begin: Is called with the arguments of a function before its call.
        done: Is called with the name of a function after its call.
        values: The values that `ValuesRead` noted in a run with data. Fake tensors have no values, so reads return
            these.

    Attributes:
        met: The ids of all tensors that were arguments of functions.
    """

    def __init__(
        self, begin: Callable[[Any], None], done: Callable[[str], None], values: Iterable[tuple[str, Any]] = ()
    ) -> None:
        super().__init__()
        self._begin, self._done, self._values, self.met = begin, done, deque(values), set[int]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        leaves = pytree.tree_leaves((args, kwargs))
        self.met |= {id(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
        if self._values and self._values[0][0] == name:
            return self._values.popleft()[1]
        self._begin(leaves)
        rule = _rule_of(func, name)
        result = (rule or func)(*args, **(kwargs or {}))
        self._done(name)
        return result


class ValuesRead(TorchFunctionMode):
    """Notes the values that are read from tensors, such as the number of graphs in a batch.

    `values` has a pair for each read, in order: the name of the reading function, and the value.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: list[tuple[str, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), getattr(func, "__name__", "")
        if name in _READS:
            self.values.append((name, result))
        return result


def _rule_of(func: Any, name: str) -> Callable[..., Any] | None:
    if name.startswith("fft_") and not name.endswith(("freq", "shift")):
        return functools.partial(_transform, name.removeprefix("fft_"))
    return None if func is Tensor.unfold else _RULES.get(name)  # `Tensor.unfold` only shares its name with `F.unfold`


def _recurrent(gates: int) -> Callable[..., Any]:
    def run(x: Tensor, *rest: Any) -> Any:
        packed = not isinstance(rest[2], bool)  # if packed, batch sizes come before the hidden state
        batches = x.shape[0] // len(rest[0]) if packed else 0
        state, weights, _, layers, _, _, two_ways, *batch_first = rest[packed:]
        passes = layers * (2 if two_ways else 1)
        each = len(weights) // passes
        states = state if gates == _LSTM else (state,)
        ends: list[tuple[Tensor, ...]] = []
        for _ in range(layers):
            outputs = []
            for _ in range(passes // layers):
                i = len(ends)
                found = _step(gates, x, [s[i].flatten(0, -2)[0] for s in states], weights[i * each : (i + 1) * each])
                outputs.append(found[0])
                last = (lambda t: t[:batches]) if packed else (lambda t: t.select(-2 if batch_first[0] else 0, -1))
                ends.append(tuple(map(last, found)))
            x = torch.cat(outputs, -1)
        return x, *(torch.stack(parts) for parts in zip(*ends))

    return run


def _step(gates: int, x: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    # The weights of a recurrent layer hold all `gates` below each other. Compute only one, which has the right shape.
    of_input, of_hidden, *rest = weights
    biases = rest[:2] if len(rest) > 1 else (None, None)
    summed = F.linear(x, of_input, biases[0]) + F.linear(state[0], of_hidden, biases[1])
    gate: Tensor = summed.unflatten(-1, (gates, state[-1].shape[-1])).select(-2, 0)
    hidden = gate
    if gates != _LSTM:
        return (hidden + state[0],)
    cell = hidden + state[1]
    output = F.linear(cell, weights[-1]) if len(weights) % 2 else cell  # a third or fifth weight projects the cell
    return output + state[0], cell


def _cell(gates: int) -> Callable[..., Any]:
    def run(x: Tensor, state: Any, *weights: Any) -> Any:
        found = _step(gates, x, state if gates == _LSTM else (state,), [w for w in weights if w is not None])
        return (found[0], found[1]) if gates == _LSTM else found[0]

    return run


def _pack(x: Tensor, lengths: Any, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Pack sequences as if all had full length, because their real lengths are data, which is missing here."""
    steps, batch = (x.shape[1], x.shape[0]) if batch_first else (x.shape[0], x.shape[1])
    sizes = torch.tensor([int(batch)] * int(steps))
    vars(sizes)[_BATCH] = int(batch)
    return x.flatten(0, 1), sizes


def _pad_sequence(sequences: Sequence[Tensor], batch_first: bool = False, *_: Any) -> Tensor:
    first, steps = sequences[0], max(map(len, sequences))
    sizes = (len(sequences), steps) if batch_first else (steps, len(sequences))
    return first.new_zeros((*sizes, *first.shape[1:]))


def _unpack(data: Tensor, batch_sizes: Tensor, batch_first: bool, *_: Any) -> tuple[Tensor, Tensor]:
    steps = len(batch_sizes)
    batch = data.shape[0] // steps
    padded = data.unflatten(0, (batch, steps) if batch_first else (steps, batch))
    return padded, torch.tensor([steps] * batch)


def _get_item(x: Tensor, place: Any) -> Any:
    """Index a tensor. Dimensions into which tensors of indices point are fixed: they must not shrink.

    If `x` holds packed batch sizes, return the number of sequences.
    """
    if _BATCH in vars(x):
        return torch.tensor(vars(x)[_BATCH])
    places = [p for p in (place if isinstance(place, tuple) else (place,)) if p is not None]
    flags = [p.dim() if isinstance(p, Tensor) and p.dtype == torch.bool else 1 for p in places]
    for at, p in enumerate(places):
        if isinstance(p, Tensor) and p.dtype != torch.bool and not any(q is ... for q in places[:at]):
            int(x.shape[sum(flags[:at])])
    # Replace a 0-d index tensor by 0, because torch would read its value. Index 0 also gives the right shape.
    return x[pytree.tree_map(lambda p: 0 if isinstance(p, Tensor) and p.dim() == 0 else p, place)]


def _product(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a matrix product so that the first matrix may be sparse, such as the adjacency matrix of a graph."""

    def run(first: Tensor, other: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(first, Tensor) or first.layout == torch.strided:
            return function(first, other, *args, **kwargs)
        assert first.shape[1] == other.shape[0]
        return other.new_empty(first.shape[0], *other.shape[1:])

    return run


def _looked_up(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `gather` or a similar function, to fix the dimension into which indices point: it must not shrink."""

    def run(x: Tensor, dim: int, index: Tensor, *args: Any, **kwargs: Any) -> Any:
        int(x.shape[dim])
        return function(x, dim, index, *args, **kwargs)

    return run


def _embedding(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
    int(weight.shape[0])
    return F.embedding(input, weight, *args, **kwargs)


def _embedding_bag(input: Tensor, weight: Tensor, offsets: Tensor | None = None, *_: Any, **own: Any) -> Tensor:
    int(weight.shape[0])
    bags = input.shape[0] if offsets is None else offsets.shape[0] - bool(own.get("include_last_offset"))
    return weight.new_empty((bags, weight.shape[1]))


def _zeros(*sizes: Any, **kwargs: Any) -> Tensor:
    """Call `torch.zeros` with sizes that may be tensors, as a recurrent layer does for packed sequences."""
    return torch.zeros(*(int(size) if isinstance(size, Tensor) else size for size in sizes), **kwargs)


def _bilinear(first: Tensor, second: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(first, weight.select(2, 0), bias) + F.linear(second, weight.select(1, 0))


def _pad(x: Tensor, pad: Sequence[Any], mode: str = "constant", value: float | None = None) -> Tensor:
    """Pad. A size that is padded by a plain number is fixed, because the number does not shrink in the narrow copy."""
    shape = list(x.shape)
    for place, (before, after) in enumerate(zip(pad[::2], pad[1::2]), start=1):
        if not isinstance(before, torch.SymInt) and not isinstance(after, torch.SymInt) and (before or after):
            shape[-place] = int(shape[-place])
        shape[-place] = shape[-place] + before + after
    return x.new_zeros(shape)


def _of_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function whose kernel takes scales or windows as plain numbers. These are no widths, so they are fixed."""

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return function(
            x, *pytree.tree_map_only(torch.SymInt, int, args), **pytree.tree_map_only(torch.SymInt, int, kwargs)
        )

    return run


@_of_numbers
def _interpolate(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Interpolate each channel by itself; the sizes of pictures are fixed, because they must not shrink."""
    size = F.interpolate(x.new_empty((1, 1, *map(int, x.shape[2:]))), *args, **kwargs).shape[2:]
    return x.new_empty((*x.shape[:2], *size))


@_of_numbers
def _unfold(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    places, steps = F.unfold(x.new_empty((1, 1, *map(int, x.shape[-2:]))), *args, **kwargs).shape[1:]
    return x.new_empty((*x.shape[:-3], x.shape[-3] * places, steps))


@_of_numbers
def _fold(x: Tensor, output_size: Any, kernel_size: Any, *args: Any, **kwargs: Any) -> Tensor:
    places = math.prod(kernel_size) if isinstance(kernel_size, Sequence) else kernel_size**2
    size = F.fold(x.new_empty((1, places, int(x.shape[-1]))), output_size, kernel_size, *args, **kwargs).shape[2:]
    return x.new_empty((*x.unflatten(-2, (-1, places)).shape[:-2], *size))


def _index_into(x: Tensor, dim: int, index: Tensor, source: Tensor, **_: Any) -> Tensor:
    """Replace `index_add` and `index_copy`. The sizes of `source` equal those of `x`, except along `dim`."""
    for place in {*range(x.dim())} - {dim % x.dim()}:
        torch._check(x.shape[place] == source.shape[place])
        assert x.shape[place] == source.shape[place]
    return x


def _transform(name: str, x: Tensor, n: Any = None, dim: Any = None, norm: Any = None, **own: Any) -> Tensor:
    """Do a Fourier transform. The sizes along which it runs are fixed (must not shrink): its values grow with them."""
    n = own.get("s", n)
    if dim is None:
        count = 2 if name.endswith("2") else 1 if not name.endswith("n") else x.dim() if n is None else len(n)
        dim = tuple(range(-count, 0))
    dims = dim if isinstance(dim, Sequence) else (dim,)
    along = {d % x.dim() for d in dims}
    shape = [int(size) if place in along else size for place, size in enumerate(x.shape)]
    few = [size if place in along else 1 for place, size in enumerate(shape)]
    found: Tensor = getattr(torch.fft, name)(x.new_empty(few), n, dims if name.endswith(("2", "n")) else dims[0], norm)
    return found.new_empty([found.shape[place] if place in along else size for place, size in enumerate(shape)])


_READS = frozenset({"__bool__", "__int__", "__index__", "__float__", "item", "tolist", "equal", "allclose"})
_LSTM = 4
_BATCH = "number_of_packed_sequences"
_RULES: dict[str, Callable[..., Any]] = {
    "lstm": _recurrent(_LSTM),
    "gru": _recurrent(3),
    "rnn_tanh": _recurrent(1),
    "rnn_relu": _recurrent(1),
    "lstm_cell": _cell(_LSTM),
    "gru_cell": _cell(3),
    "rnn_tanh_cell": _cell(1),
    "rnn_relu_cell": _cell(1),
    "pad_sequence": _pad_sequence,
    "_pack_padded_sequence": _pack,
    "_pad_packed_sequence": _unpack,
    "__getitem__": _get_item,
    "gather": _looked_up(torch.gather),
    **{function.__name__: _product(function) for function in (torch.mm, torch.spmm, torch.matmul, torch.sparse.mm)},
    "__matmul__": _product(torch.matmul),
    "index_select": _looked_up(torch.index_select),
    "embedding": _embedding,
    "embedding_bag": _embedding_bag,
    "zeros": _zeros,
    "bilinear": _bilinear,
    "pad": _pad,
    "interpolate": _interpolate,
    "unfold": _unfold,
    "fold": _fold,
    "local_response_norm": lambda x, *_, **__: x,
    **dict.fromkeys(("index_add", "index_add_", "index_copy", "index_copy_"), _index_into),
}
