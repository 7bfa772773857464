"""LSTM, GRU and RNN layers and cells, for which `vmap` has no rule.

Layers are unrolled over time, with one input product for all steps. If members share the weights (a frozen encoder),
torch's own kernel runs instead, with K folded into the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusion.evaluate.rules.dropout import masks
from fusion.evaluate.rules.linear import linear
from fusion.evaluate.rules.member import Member, Rule
from fusion.evaluate.rules.recurrent_cells import Cell, State
from fusion.evaluate.rules.recurrent_time_steps import packed_recurrence, recurrence
from fusion.streams import Streams

Direction = Callable[[Tensor, State, list[Tensor], Tensor | None, bool], tuple[Tensor, State]]
"""Computes one layer in one direction: (input, state, four weights, projection, reverse) -> (output, last state)."""


def recurrent(function: Callable[..., Any], cell: Cell) -> Rule:
    """Make the rule of torch's recurrent kernel `function`, whose time step is `cell`."""

    def fold(K: int, input: Any, hx: Any, params: Any, *settings: Any, streams: Streams) -> Any:
        if settings and isinstance(settings[0], list):
            return _packed(cell, K, input, hx, params, *settings, streams=streams)
        if not isinstance(params, list) or len(settings) != 6 or isinstance(settings[2], Member):
            return NotImplemented  # for example because the dropout probability differs between members
        states = hx if isinstance(hx, list) else [hx]
        *options, batch_first = settings
        dropout = options[2] if options[3] else 0.0
        x = input.lead(K)
        x_KTNI = x.transpose(1, 2) if batch_first else x
        hx_K = [s.lead(K) for s in states]
        if dropout and (input.value.is_cuda or all(p.dim is None for p in params)):
            return NotImplemented
        if all(p.dim is None for p in params):
            weights = [p.value for p in params]
            out, *last = _shared_weights(function, K, x_KTNI, hx_K, weights, *options)
        else:
            weights = [p.lead(K) for p in params]
            out, *last = _layers(partial(_direction, cell), K, x_KTNI, hx_K, weights, *options, streams=streams)
        out = out.transpose(1, 2) if batch_first else out
        return tuple(Member(t, 0) for t in (out, *last))

    return fold


def recurrent_cell(cell: Cell) -> Rule:
    """Make the rule of torch's kernel for one time step `cell`, with input [N, I] and states [N, H]."""

    def fold(K: int, input: Member, hx: Any, of_input: Member, of_state: Member, *biases: Member | None) -> Any:
        given = hx if isinstance(hx, list) else [hx]
        bias_input, bias_state = biases or (None, None)
        from_input, from_state = linear(K, input, of_input, bias_input), linear(K, given[0], of_state, bias_state)
        state = cell.step(from_input.lead(K), from_state.lead(K), tuple(s.lead(K) for s in given))
        of_each = [Member(s, 0) for s in state]
        return of_each if isinstance(hx, list) else of_each[0]

    return fold


def pack(function: Callable[..., Any]) -> Rule:
    """Make the rule of torch's kernel that packs or pads sequences. It puts K after the axes of time and examples."""

    packs = function is torch._pack_padded_sequence

    def fold(K: int, input: Member, sizes: Member, *settings: Any) -> Any:
        if sizes.dim is not None:
            return NotImplemented
        data, others = function(input.at(K, 2 if packs else 1), sizes.value, *settings)
        return Member(data, 1 if packs else 2), Member(others, None)

    return fold


def scatter(
    K: int, tensor: Member, dim: int, index: Member, src: Any = None, *, value: Any = None, **settings: Any
) -> Any:
    """Do `Tensor.scatter_` of a tensor or a number for K members. Packed sequences use it to invert a permutation."""
    written = value if src is None else src
    if tensor.dim is None or settings or written is None:
        return NotImplemented
    written_K = written.lead(K) if isinstance(written, Member) else written
    tensor.lead(K).scatter_(dim + 1 if dim >= 0 else dim, index.lead(K), written_K)
    return tensor


def _packed(
    cell: Cell,
    K: int,
    data: Member,
    batch_sizes: Member,
    hx: Any,
    params: list[Member],
    *options: Any,
    streams: Streams,
) -> Any:
    """Apply the rule of `recurrent` to a packed sequence.

    A packed sequence has the rows of the first time step, then those of the second, and so on. Each step has a row for
    every example that is long enough.
    """
    _, _, dropout, train, _ = options
    if batch_sizes.dim is not None or isinstance(dropout, Member) or (dropout and train and data.value.is_cuda):
        return NotImplemented
    sizes = batch_sizes.value.tolist()
    states = [s.lead(K) for s in (hx if isinstance(hx, list) else [hx])]

    def direction(x_KSI: Tensor, state: State, weights: list[Tensor], projection: Tensor | None, reverse: bool) -> Any:
        return packed_recurrence(cell, x_KSI, sizes, state, weights, projection, reverse=reverse)

    out, *last = _layers(direction, K, data.lead(K), states, [p.lead(K) for p in params], *options, streams=streams)
    return tuple(Member(t, 0) for t in (out, *last))


def _shared_weights(
    function: Callable[..., Any], K: int, x_KTNI: Tensor, hx: list[Tensor], weights: list[Tensor], *options: Any
) -> list[Tensor]:
    x = x_KTNI.transpose(0, 1).flatten(1, 2)
    states = [s.transpose(0, 1).flatten(1, 2).contiguous() for s in hx]
    results = function(x, tuple(states) if len(states) > 1 else states[0], weights, *options, False)
    return [t.unflatten(1, (K, -1)).transpose(0, 1) for t in results]


def _layers(
    direction: Direction,
    K: int,
    x_KTNI: Tensor,
    hx: list[Tensor],
    weights: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    *,
    streams: Streams,
) -> list[Tensor]:
    """Compute L layers of D directions; return the output [K, T, N, D*H], then the last states [K, L*D, N, H].

    For a packed sequence, one axis takes the place of T and N.
    """
    directions = 2 if bidirectional else 1
    per_layer = len(weights) // (num_layers * directions)
    last: list[State] = []
    for layer in range(num_layers):
        outputs = []
        for which in range(directions):
            at = layer * directions + which
            own = weights[at * per_layer : (at + 1) * per_layer]
            no_bias = own[1].new_zeros(own[1].shape[:2])
            four = own[:4] if has_biases else [*own[:2], no_bias, no_bias]
            projection = own[-1].mT if len(own) % 2 else None
            out, state = direction(x_KTNI, tuple(s[:, at] for s in hx), four, projection, which == 1)
            outputs.append(out)
            last.append(state)
        x_KTNI = torch.cat(outputs, -1)
        if layer + 1 < num_layers and train and dropout:
            x_KTNI = x_KTNI * masks(x_KTNI, [dropout] * K, streams)
    return [x_KTNI, *(torch.stack(s, 1) for s in zip(*last))]


def _direction(
    cell: Cell, x_KTNI: Tensor, state: State, weights: list[Tensor], projection: Tensor | None, reverse: bool
) -> tuple[Tensor, State]:
    """Compute one layer in one direction; return the output [K, T, N, H or projection] and the last state."""
    x_KTNI = x_KTNI.flip(1) if reverse else x_KTNI
    out, state = recurrence(cell, x_KTNI, state, weights, projection)
    return out.flip(1) if reverse else out, state
