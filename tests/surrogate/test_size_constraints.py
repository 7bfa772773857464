from __future__ import annotations

import pytest
import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, nn

from surrogate.size_constraints import trace_sizes
from tests.surrogate.plain import Literal, SplitAttention


class Skip(nn.Module):
    """A residual sum ties the layer's output to its input's width."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.second = nn.Linear(16, 16)
        self.readout = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        out: Tensor = self.readout(hidden + self.second(hidden).relu())
        return out


def test_sizes_that_a_sum_ties_are_one_symbol_and_those_of_input_and_output_are_numbers() -> None:
    trace = trace_sizes(Skip(), torch.zeros(2, 6))
    width, inputs = trace.tensors["first.weight"]
    assert inputs == 6
    assert trace.tensors["second.weight"] == (width, width)
    assert trace.tensors["readout.weight"] == (2, width)
    assert trace.seeds == {width}
    assert trace.sizes[width] == 16


def test_a_number_in_the_forward_pass_fixes_its_width() -> None:
    trace = trace_sizes(Literal(), torch.zeros(2, 6))
    assert trace.tensors["first.weight"] == (32, 6)
    assert trace.tensors["second.weight"][0].free_symbols


def test_an_index_in_a_tensor_may_pick_the_only_row() -> None:
    class Picks(Skip):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[None][torch.tensor(0)])

    assert trace_sizes(Picks(), torch.zeros(2, 6)).tensors["first.weight"][1] == 6


def test_heads_are_tied_to_their_width_by_equations_that_hold_now() -> None:
    trace = trace_sizes(SplitAttention(), torch.zeros(2, 8, dtype=torch.long))
    (heads,), (width,) = trace.attributes["", "n_head"], trace.attributes["", "n_embd"]
    assert any({heads, width} <= equation.free_symbols for equation in trace.equations)
    now = {symbol: sympy.Integer(size) for symbol, size in trace.sizes.items()}
    assert all(equation.xreplace(now) == sympy.true for equation in trace.equations)


def test_the_module_is_not_changed() -> None:
    model = SplitAttention()
    trace_sizes(model, torch.zeros(2, 8, dtype=torch.long))
    assert (model.n_head, type(model.n_head)) == (4, int)
    assert not any(layer._forward_hooks for layer in model.modules())


def test_the_module_that_cannot_be_followed_is_named() -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.from_numpy(x.numpy()) + x

    with pytest.raises(ValueError, match="module '1' cannot be followed on symbolic sizes"):
        trace_sizes(nn.Sequential(nn.Linear(4, 8), Reads()), torch.zeros(2, 4))
