"""All time steps of one direction of a recurrent layer, either recorded by autograd or with a hand-written gradient.

Autograd records a dozen operators for each step and runs twice as many in the backward pass. It also adds up the
gradient of the state's weight step by step. The hand-written code needs one product and a few in-place operators for
each step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fusion.evaluate.rules.kernel_inputs import cast
from fusion.evaluate.rules.recurrent_cells import ByHand, Cell, State

# Number of time steps for which one product computes the gates from the input, or the gradients of the weights. More
# steps make a product more efficient; fewer keep its operands in a CPU's cache.
_BLOCK = 8


def unrolled(
    cell: Cell, x_KTNI: Tensor, state: State, weights: Sequence[Tensor], projection_KHP: Tensor | None = None
) -> tuple[Tensor, State]:
    """Compute one direction of a recurrent layer, one time step after another.

    Args:
        state: The parts of the initial state, [K, N, H] each.
        weights: The input's weight [K, G*H, I], the state's weight [K, G*H, H or P], and the bias of each, [K, G*H].
        projection_KHP: Multiplies the output.

    Returns:
        Outputs [K, T, N, H or P] and the last state.
    """
    of_input, of_state, bias_input, bias_state = weights
    gates = torch.baddbmm(bias_input.unsqueeze(1), x_KTNI.flatten(1, 2), of_input.mT).unflatten(1, x_KTNI.shape[1:3])
    outputs = []
    for gate in gates.unbind(1):
        from_state = torch.baddbmm(bias_state.unsqueeze(1), state[0].to(of_state.dtype), of_state.mT)
        state = cell.step(gate, from_state, state)
        if projection_KHP is not None:
            state = (torch.bmm(state[0], projection_KHP), *state[1:])
        outputs.append(state[0])
    return torch.stack(outputs, 1), state


def packed_recurrence(
    cell: Cell,
    x_KSI: Tensor,
    sizes: Sequence[int],
    state: State,
    weights: Sequence[Tensor],
    projection_KHP: Tensor | None = None,
    *,
    reverse: bool = False,
) -> tuple[Tensor, State]:
    """Compute one direction of a recurrent layer for a packed sequence [K, S, I], step by step; see `unrolled`.

    Time step t has the next `sizes[t]` of the S rows. Examples are sorted from long to short. A step updates the first
    `sizes[t]` examples; the others keep their state.
    """
    of_input, of_state, bias_input, bias_state = weights
    gates = torch.baddbmm(bias_input.unsqueeze(1), x_KSI, of_input.mT).split(list(sizes), 1)
    outputs: dict[int, Tensor] = {}
    for t in sorted(range(len(sizes)), reverse=reverse):
        now = tuple(s[:, : sizes[t]] for s in state)
        from_state = torch.baddbmm(bias_state.unsqueeze(1), now[0].to(of_state.dtype), of_state.mT)
        now = cell.step(gates[t], from_state, now)
        if projection_KHP is not None:
            now = (torch.bmm(now[0], projection_KHP), *now[1:])
        state = tuple(torch.cat([new, s[:, sizes[t] :]], 1) for new, s in zip(now, state, strict=True))
        outputs[t] = now[0]
    return torch.cat([outputs[t] for t in range(len(sizes))], 1), state


def recurrence(
    cell: Cell, x_KTNI: Tensor, state: State, weights: Sequence[Tensor], projection_KHP: Tensor | None = None
) -> tuple[Tensor, State]:
    """Compute the same as `unrolled`, by the hand-written code if the cell has it and there is no projection.

    Even under autocast, an LSTM computes its cell state in the precision of the given state.
    """
    if cell.by_hand is None or projection_KHP is not None:
        return unrolled(cell, x_KTNI, state, weights, projection_KHP)
    x, *weights = (cast(t) for t in (x_KTNI, *weights))
    x = x.flatten(1, 2).unflatten(1, x.shape[1:3])  # in the memory layout that the products need
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *weights, *state))
    out, *last = _Recurrence.apply(cell, cell.by_hand, keep, x, *weights, *state)  # type: ignore[no-untyped-call]
    return out, (out[:, -1], *last)


class _Recurrence(torch.autograd.Function):
    """Runs a cell's hand-written code and gradient.

    Arguments are the cell, its `by_hand`, `keep`, the input, the weights and the state. It returns the outputs, and the
    parts of the last state other than the output.
    """

    @staticmethod
    def forward(ctx: Any, cell: Cell, by_hand: ByHand, keep: bool, x_KTNI: Tensor, *weights_and_state: Tensor) -> Any:
        of_input, of_state, bias_input, bias_state, *state = weights_and_state
        bias = bias_input.clone()
        summed = by_hand.summed * of_state.shape[2]
        bias[:, :summed] += bias_state[:, :summed]

        def from_input() -> Iterator[Tensor]:
            for x in x_KTNI.split(_BLOCK, 1):
                gates = torch.baddbmm(bias.unsqueeze(2), of_input, x.flatten(1, 2).mT)
                yield from gates.unflatten(2, x.shape[1:3]).unbind(2)

        initial = tuple(s.mT for s in state)
        outputs, last, kept = by_hand.forward(
            x_KTNI.shape[1], from_input(), of_state, bias_state.unsqueeze(2), initial, keep
        )
        out_KTNH = outputs.permute(1, 0, 3, 2).contiguous()
        if keep:
            ctx.cell, ctx.by_hand = cell, by_hand
            ctx.save_for_backward(x_KTNI, *weights_and_state, out_KTNH, *kept)
        return out_KTNH, *(s.mT for s in last)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, *grad_last: Tensor) -> Any:
        needed = ctx.needs_input_grad[3:]
        given, (out_KTNH, *kept) = ctx.saved_tensors[: len(needed)], ctx.saved_tensors[len(needed) :]
        if torch.is_grad_enabled():
            return None, None, None, *_recorded(ctx.cell, given, needed, (grad_out, *grad_last))
        x_KTNI, of_input, of_state, _, _, h, *_ = given
        K, T, N, H = out_KTNH.shape
        summed, gates = ctx.by_hand.summed * H, of_state.shape[1]
        grad_before = torch.zeros_like(h.mT, dtype=of_state.dtype, memory_format=torch.contiguous_format)
        grad_rest = tuple(g.mT.clone(memory_format=torch.contiguous_format) for g in grad_last)
        grad_x = torch.empty_like(x_KTNI) if needed[0] else None
        grads = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in given[1:5]]
        for start in reversed(range(0, T, _BLOCK)):
            steps = slice(start, min(start + _BLOCK, T))
            block = tuple(k[start : steps.stop + len(k) - T] for k in kept)
            grad_h = torch.cat([grad_before.new_zeros(1, K, H, N), grad_out[:, steps].permute(1, 0, 3, 2)])
            grad_h = grad_h.to(of_state.dtype)
            grad_h[-1] += grad_before
            of_gates = ctx.by_hand.backward(grad_h, grad_rest, of_state, block)
            grad_before = grad_h[0].clone()
            before = (
                out_KTNH[:, start - 1 : steps.stop - 1]
                if start
                else torch.cat([h.unsqueeze(1), out_KTNH[:, : steps.stop - 1]], 1)
            )
            of_gates = of_gates.permute(1, 2, 0, 3).flatten(2)
            from_state = from_input = of_gates[:, :gates]
            if summed < gates:
                from_input = torch.cat([of_gates[:, :summed], of_gates[:, gates:]], 1)
            if grad_x is not None:
                grad_x[:, steps] = torch.bmm(of_input.mT, from_input).mT.unflatten(1, (len(block[0]), N))
            grads[0].baddbmm_(from_input, x_KTNI[:, steps].flatten(1, 2))
            grads[1].baddbmm_(from_state, before.flatten(1, 2).to(of_state.dtype))
            grads[2] += from_input.sum(2)
            grads[3] += from_state.sum(2)
        of_state_before = grad_before.mT, *(g.mT for g in grad_rest)
        return None, None, None, grad_x, *(g if need else None for g, need in zip(grads, needed[1:])), *of_state_before


def _recorded(
    cell: Cell, given: Sequence[Tensor], needed: Sequence[bool], grads: Sequence[Tensor]
) -> Iterator[Tensor | None]:
    """Run the steps again under autograd, and return gradients that can themselves be differentiated.

    The hand-written gradient cannot be differentiated. Return None for inputs that need no gradient.
    """
    # Differentiate with respect to views. Even if one input was computed from another, no gradient flows between the
    # views.
    x, *rest = (t.view_as(t) for t in given)
    out, state = unrolled(cell, x, tuple(rest[4:]), rest[:4])
    wanted = [t for t, need in zip((x, *rest), needed) if need]
    found = iter(torch.autograd.grad((out, *state[1:]), wanted, grads, create_graph=True))
    return (next(found) if need else None for need in needed)
