"""LSTM, GRU and RNN, for which `vmap` has no rule: unrolled, with one input product for all time steps.

If members share the weights (a frozen encoder), K folds into the batch of torch's own kernel instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusion.rules.cells import Cell, State
from fusion.rules.dropout import masks
from fusion.rules.member import Member, Rule
from fusion.rules.recurrence import recurrence
from fusion.streams import Streams


def recurrent(function: Callable[..., Any], cell: Cell) -> Rule:
    """Make the rule of a recurrent kernel of torch; `cell` computes one time step."""

    def fold(K: int, input: Any, hx: Any, params: Any, *settings: Any, streams: Streams) -> Any:
        if not isinstance(params, list) or len(settings) != 6 or isinstance(settings[2], Member):
            return NotImplemented  # a packed sequence, or a dropout probability per member
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
            out, *last = _unrolled(cell, K, x_KTNI, hx_K, weights, *options, streams=streams)
        out = out.transpose(1, 2) if batch_first else out
        return tuple(Member(t, 0) for t in (out, *last))

    return fold


def _shared_weights(
    function: Callable[..., Any], K: int, x_KTNI: Tensor, hx: list[Tensor], weights: list[Tensor], *options: Any
) -> list[Tensor]:
    x = x_KTNI.transpose(0, 1).flatten(1, 2)
    states = [s.transpose(0, 1).flatten(1, 2).contiguous() for s in hx]
    results = function(x, tuple(states) if len(states) > 1 else states[0], weights, *options, False)
    return [t.unflatten(1, (K, -1)).transpose(0, 1) for t in results]


def _unrolled(
    cell: Cell,
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
    """Output [K, T, N, D*H], then the last states [K, L*D, N, H], L layers of D directions."""
    directions = 2 if bidirectional else 1
    per_layer = len(weights) // (num_layers * directions)
    last: list[State] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            at = layer * directions + direction
            own = weights[at * per_layer : (at + 1) * per_layer]
            state = tuple(s[:, at] for s in hx)
            out, state = _direction(cell, x_KTNI, state, own, has_biases, reverse=direction == 1)
            outputs.append(out)
            last.append(state)
        x_KTNI = torch.cat(outputs, -1)
        if layer + 1 < num_layers and train and dropout:
            x_KTNI = x_KTNI * masks(x_KTNI, [dropout] * K, streams)
    return [x_KTNI, *(torch.stack(s, 1) for s in zip(*last))]


def _direction(
    cell: Cell, x_KTNI: Tensor, state: State, weights: list[Tensor], has_biases: bool, *, reverse: bool
) -> tuple[Tensor, State]:
    """Compute one layer in one direction: output [K, T, N, H or projection], last state."""
    no_bias = weights[1].new_zeros(weights[1].shape[:2])
    projection = weights[-1].mT if len(weights) % 2 else None
    weights = weights[:4] if has_biases else [*weights[:2], no_bias, no_bias]
    x_KTNI = x_KTNI.flip(1) if reverse else x_KTNI
    out, state = recurrence(cell, x_KTNI, state, weights, projection)
    return out.flip(1) if reverse else out, state
