"""One time step of an LSTM, GRU or RNN. For LSTM and GRU, also all steps at once, with a gradient written by hand.

Shape suffixes: K members, T time steps, N examples, G gates of H units. The hand-written code puts features before
examples, [K, H, N], so that each gate is contiguous within a member. Time is the first axis, so that the product of a
step is written to its final place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

State = tuple[Tensor, ...]
# The tensors that `forward` saves for `backward`. Their first axis has length T, or 1 + T with the initial state.
Saved = tuple[Tensor, ...]


class ByHand(NamedTuple):
    """All time steps of a layer, and their gradient, written by hand. Gates are in torch's order.

    A gate has two terms: the product with the input, and the product with the state.

    Attributes:
        summed: Number of leading gates that use only the sum of both terms.
        forward: `(T, from_input, weight, bias, state, keep)` -> outputs [T, K, H, N], last state without the output,
            `Saved`. `from_input` yields each step's gate terms from the input, [K, G*H, N]. `weight` [K, G*H, H] and
            `bias` [K, G*H, 1] multiply and shift the state, whose parts are [K, H, N]. `keep` is True if a gradient
            will be needed.
        backward: `(grad, grad_last, weight, kept)` -> gradient of the gates [T, K, G*H, N]. `grad` holds the gradients
            of the initial state and of all outputs, [1 + T, K, H, N]. `grad_last` is the gradient of the last state
            without the output. The function writes the total gradients of the same states into `grad`, and the total
            gradient of the initial state without the output into `grad_last`. For a gate that is not summed, the result
            has the gradient of the state term in the gate's place. The gradient of the input term follows after all
            gates.
    """

    summed: int
    forward: Callable[[int, Iterable[Tensor], Tensor, Tensor, State, bool], tuple[Tensor, State, Saved]]
    backward: Callable[[Tensor, State, Tensor, Saved], Tensor]


class Cell(NamedTuple):
    """One kind of recurrent layer.

    Attributes:
        step: (gate terms from the input [K, N, G*H], those from the state [K, N, G*H], state) -> next state, whose
            first part is the output.
        by_hand: The hand-written code for all steps, if it is faster. None for an RNN, whose step has few operators.
    """

    step: Callable[[Tensor, Tensor, State], State]
    by_hand: ByHand | None = None


def _lstm_step(from_input: Tensor, from_state: Tensor, state: State) -> State:
    i, f, g, o = (from_input + from_state).chunk(4, -1)
    cell = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def _lstm_forward(
    T: int, from_input: Iterable[Tensor], weight: Tensor, bias: Tensor, state: State, keep: bool
) -> tuple[Tensor, State, Saved]:
    h, c = state
    K, H, N = h.shape
    dtype = torch.promote_types(weight.dtype, c.dtype)
    gates = _buffer(weight, T, keep, (K, 4 * H, N))
    cells = _buffer(c, 1 + T, keep, c.shape, dtype)
    tanhs = _buffer(c, T, keep, c.shape, dtype)
    outputs = _buffer(h, T, True, h.shape, dtype)
    cells[0] = c
    c = cells[0]
    i, f, g, o = (gate.unbind() for gate in gates.chunk(4, 2))
    i_f, gate, cell, tanh, output = (t.unbind() for t in (gates[:, :, : 2 * H], gates, cells[1:], tanhs, outputs))
    for t, from_input_KGN in enumerate(from_input):
        torch.baddbmm(from_input_KGN, weight, h.to(weight.dtype), out=gate[t])
        i_f[t].sigmoid_()
        g[t].tanh_()
        o[t].sigmoid_()
        c = torch.mul(f[t], c, out=cell[t]).addcmul_(i[t], g[t])
        h = torch.mul(o[t], torch.tanh(c, out=tanh[t]), out=output[t])
    return outputs, (c,), (gates, cells, tanhs)


def _lstm_backward(grad: Tensor, grad_last: State, weight: Tensor, kept: Saved) -> Tensor:
    gates, cells, tanhs = kept
    i, f, g, o = gates.chunk(4, 2)
    # Compute for all steps at once the factors that need no incoming gradient. These are the derivatives with respect
    # to the gates, and the derivative of the output with respect to the cell.
    slopes = torch.empty_like(gates)
    slope_i, slope_f, slope_g, slope_o = slopes.chunk(4, 2)
    _sigmoid_backward(g, i, grad_input=slope_i)
    _sigmoid_backward(cells[:-1], f, grad_input=slope_f)
    _tanh_backward(i, g, grad_input=slope_g)
    _sigmoid_backward(tanhs, o, grad_input=slope_o)
    output = _tanh_backward(o, tanhs, grad_input=torch.empty_like(tanhs)).unbind()
    i_f_g = slopes.unflatten(2, (4, -1))[:, :, :3].unbind()
    forget, out_gate, gate, dh = f.unbind(), slope_o.unbind(), slopes.unbind(), grad.unbind()
    (dc,) = grad_last
    dc_gates, weight = dc.unsqueeze(1), weight.mT
    for t in reversed(range(len(gates))):
        out_gate[t].mul_(dh[t + 1])
        dc.addcmul_(dh[t + 1], output[t])
        i_f_g[t].mul_(dc_gates)
        dc.mul_(forget[t])
        dh[t].baddbmm_(weight, gate[t])
    return slopes


def _gru_step(from_input: Tensor, from_state: Tensor, state: State) -> State:
    input_r, input_z, input_n = from_input.chunk(3, -1)
    state_r, state_z, state_n = from_state.chunk(3, -1)
    new = (input_n + (input_r + state_r).sigmoid() * state_n).tanh()
    return (new + (input_z + state_z).sigmoid() * (state[0] - new),)


def _gru_forward(
    T: int, from_input: Iterable[Tensor], weight: Tensor, bias: Tensor, state: State, keep: bool
) -> tuple[Tensor, State, Saved]:
    (h,) = state
    K, H, N = h.shape
    dtype = torch.promote_types(weight.dtype, h.dtype)
    r_z = _buffer(weight, T, keep, (K, 2 * H, N))
    from_state, new = (_buffer(weight, T, keep, h.shape) for _ in range(2))
    outputs = _buffer(h, 1 + T, True, h.shape, dtype)
    outputs[0] = h
    h = outputs[0]
    r, z = (gate.unbind() for gate in r_z.chunk(2, 2))
    gates, n_state, n, output = (t.unbind() for t in (r_z, from_state, new, outputs[1:]))
    weight_rz, weight_n, bias_n = weight[:, : 2 * H], weight[:, 2 * H :], bias[:, 2 * H :]
    for t, from_input_KGN in enumerate(from_input):
        given = h.to(weight.dtype)
        torch.baddbmm(from_input_KGN[:, : 2 * H], weight_rz, given, out=gates[t]).sigmoid_()
        torch.baddbmm(bias_n, weight_n, given, out=n_state[t])
        torch.addcmul(from_input_KGN[:, 2 * H :], r[t], n_state[t], out=n[t]).tanh_()
        h = torch.lerp(n[t].to(dtype), h, z[t].to(dtype), out=output[t])
    return outputs[1:], (), (r_z, from_state, new, outputs)


def _gru_backward(grad: Tensor, grad_last: State, weight: Tensor, kept: Saved) -> Tensor:
    r_z, from_state, new, outputs = kept
    T, K, H, N = new.shape
    r, z = r_z.chunk(2, 2)
    slopes = new.new_empty(T, K, 4, H, N)  # derivatives with respect to r, z, and the state and input terms of n
    slope_r, slope_z, slope_state, slope_n = slopes.unbind(2)
    _sigmoid_backward(from_state, r, grad_input=slope_r)
    _sigmoid_backward(outputs[:-1] - new, z, grad_input=slope_z)
    slope_state.copy_(r)
    _tanh_backward(1 - z, new, grad_input=slope_n)
    z_n, r_state, n = slopes[:, :, 1::2].unbind(), slopes[:, :, 0::2].unbind(), slopes[:, :, 3:].unbind()
    stay, gate, dh, weight = z.unbind(), slopes[:, :, :3].flatten(2, 3).unbind(), grad.unbind(), weight.mT
    for t in reversed(range(T)):
        z_n[t].mul_(dh[t + 1].unsqueeze(1))
        r_state[t].mul_(n[t])
        dh[t].addcmul_(stay[t], dh[t + 1]).baddbmm_(weight, gate[t])
    return slopes.flatten(2, 3)


def _buffer(like: Tensor, T: int, keep: bool, shape: Iterable[int], dtype: torch.dtype | None = None) -> Tensor:
    """Allocate [T, *shape]. If `keep` is False, all steps share the memory of one step."""
    return like.new_empty(T if keep else 1, *shape, dtype=dtype).expand(T, *shape)


_sigmoid_backward: Any = torch.ops.aten.sigmoid_backward.grad_input
_tanh_backward: Any = torch.ops.aten.tanh_backward.grad_input

LSTM = Cell(_lstm_step, ByHand(4, _lstm_forward, _lstm_backward))
GRU = Cell(_gru_step, ByHand(2, _gru_forward, _gru_backward))
RNN_TANH = Cell(lambda from_input, from_state, state: ((from_input + from_state).tanh(),))
RNN_RELU = Cell(lambda from_input, from_state, state: ((from_input + from_state).relu(),))
