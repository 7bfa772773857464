"""Recurrent layers, unrolled."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from fusion.evaluate.rules import folded
from fusion.evaluate.rules.recurrent_cells import GRU, LSTM, Cell
from fusion.evaluate.rules.recurrent_time_steps import recurrence, unrolled
from fusion.streams import Streams
from tests.fusion.evaluate.rules.folding import SHARED, K, assert_folds, assert_modules_fold, member

RECURRENT: list[tuple[Any, dict[str, Any]]] = [
    (nn.LSTM, {}),
    (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    (nn.LSTM, {"proj_size": 3, "bias": False}),
    (nn.LSTM, {"proj_size": 3, "num_layers": 2}),
    (nn.GRU, {}),
    (nn.GRU, {"num_layers": 2, "bidirectional": True, "batch_first": True, "bias": False}),
    (nn.RNN, {"nonlinearity": "tanh"}),
    (nn.RNN, {"nonlinearity": "relu", "num_layers": 2}),
]

CELLS = {"lstm": (LSTM, 4, 2), "gru": (GRU, 3, 1)}
"""Those with a gradient by hand, each with its number of gates and of states."""


@pytest.fixture(params=CELLS)
def cell(request: pytest.FixtureRequest) -> Cell:
    return CELLS[request.param][0]


@pytest.fixture
def tensors(cell: Cell, T: int) -> list[Tensor]:
    """Input, weights and biases, states: of 2 members, 2 examples, 3 features, 2 units."""
    gates, states = next((gates, states) for one, gates, states in CELLS.values() if one is cell)
    shapes = [(2, T, 2, 3), (2, gates * 2, 3), (2, gates * 2, 2), *[(2, gates * 2)] * 2, *[(2, 2, 2)] * states]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def run(direction: Any, cell: Cell, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    out, state = direction(cell, tensors[0], tuple(tensors[5:]), tensors[1:5])
    return out, *state


# As many steps as are computed at once at most are 8: fewer, two lots of them, and some more.
@pytest.mark.parametrize("T", [1, 3, 16, 19])
def test_recurrence_is_what_autograd_records(cell: Cell, tensors: list[Tensor]) -> None:
    ours, theirs = run(recurrence, cell, tensors), run(unrolled, cell, tensors)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(run(recurrence, cell, [t.detach() for t in tensors]), ours)
    grads = [torch.randn_like(t) for t in ours]
    expected = torch.autograd.grad(theirs, tensors, grads)
    for _ in range(2):  # The first leaves what it reads as it is.
        torch.testing.assert_close(torch.autograd.grad(ours, tensors, grads, retain_graph=True), expected)


@pytest.mark.parametrize("T", [9])
def test_gradients_of_a_recurrence_and_of_its_gradients(cell: Cell, tensors: list[Tensor]) -> None:
    assert torch.autograd.gradcheck(lambda *t: run(recurrence, cell, list(t)), tensors)
    # In fast mode, along one direction at random instead of along each: all of them would take seconds.
    assert torch.autograd.gradgradcheck(lambda *t: run(recurrence, cell, list(t)), tensors, fast_mode=True)


@pytest.mark.parametrize("T", [9])
def test_gradient_of_a_gradient_where_one_input_depends_on_another(cell: Cell, tensors: list[Tensor]) -> None:
    def penalty(direction: Any) -> Tensor:
        x = tensors[0] * tensors[1].sum()
        (grad,) = torch.autograd.grad(run(direction, cell, [x, *tensors[1:]])[0].sum(), tensors[1], create_graph=True)
        return grad.square().sum()

    torch.testing.assert_close(
        torch.autograd.grad(penalty(recurrence), tensors), torch.autograd.grad(penalty(unrolled), tensors)
    )


@pytest.mark.parametrize("T", [9])
@pytest.mark.parametrize("frozen", range(5))
def test_frozen_tensors_of_a_recurrence(cell: Cell, tensors: list[Tensor], frozen: int) -> None:
    expected = torch.autograd.grad(run(unrolled, cell, tensors)[0].sum(), tensors[frozen + 1 :])
    tensors[frozen].requires_grad_(False)
    torch.testing.assert_close(
        torch.autograd.grad(run(recurrence, cell, tensors)[0].sum(), tensors[frozen + 1 :]), expected
    )


@pytest.mark.parametrize("T", [9])
def test_a_recurrence_that_is_not_finite_changes_no_bit_of_another(cell: Cell, tensors: list[Tensor]) -> None:
    def first(tensors: list[Tensor]) -> list[Tensor]:
        results = run(recurrence, cell, tensors)
        grads = torch.autograd.grad([t.sum() for t in results], tensors)
        return [t[0] for t in (*results, *grads)]

    healthy = first(tensors)
    with torch.no_grad():
        tensors[2][1] = float("nan")
    assert all(torch.equal(*pair) for pair in zip(first(tensors), healthy))


@pytest.mark.parametrize("T", [9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recurrence_under_autocast(cell: Cell, tensors: list[Tensor], dtype: torch.dtype) -> None:
    given = [t.detach().to(dtype if k in (0, 5, 6) else torch.float32).requires_grad_() for k, t in enumerate(tensors)]
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = run(recurrence, cell, given), run(unrolled, cell, given)
    assert [t.dtype for t in ours] == [t.dtype for t in theirs]
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)
    grads = [torch.autograd.grad([t.sum() for t in results], given) for results in (ours, theirs)]
    for one, other, t in zip(*grads, given):
        assert one.dtype == other.dtype == t.dtype
        assert (one - other).norm() < 0.05 * other.norm()


@pytest.mark.parametrize(("kind", "options"), [case for case in RECURRENT if "proj_size" not in case[1]])
def test_recurrent_over_many_steps(kind: Any, options: dict[str, Any]) -> None:
    assert_modules_fold(lambda: kind(5, 4, **options).double(), [torch.randn(11, 10, 5, dtype=torch.float64)], {})


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.parametrize(("kind", "options"), RECURRENT)
def test_recurrent(kind: Any, options: dict[str, Any]) -> None:
    assert_modules_fold(lambda: kind(5, 4, **options), [torch.randn(3, 6, 5)], {})


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_with_frozen_weights_folds_into_the_batch(kind: Any) -> None:
    module = kind(5, 4, num_layers=2)
    assert_folds(lambda x: module(x), member(3, 2, 5), dims=(0,))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_from_a_given_state(kind: Any) -> None:
    module = kind(5, 4)

    def op(x: Tensor, h: Tensor) -> Any:
        return module(x, (h, 2 * h) if kind is nn.LSTM else h)

    assert_folds(op, torch.randn(3, 2, 5), member(1, 2, 4), dims=(None, 0))


def test_recurrent_dropout_between_layers() -> None:
    lstm = nn.LSTM(5, 64, num_layers=2, dropout=0.999999)
    params = {name: p.detach().expand(K, *p.shape) for name, p in lstm.named_parameters()}
    x = torch.randn(3, 2, 5)
    with folded(Streams(K, range(K))):
        out, _ = torch.func.vmap(lambda p: torch.func.functional_call(lstm, p, (x,)), randomness="error")(params)
    nn.init.zeros_(lstm.get_parameter("weight_ih_l1"))
    torch.testing.assert_close(out[0], lstm(x)[0])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("kind", "options"), [(nn.LSTMCell, {}), (nn.GRUCell, {}), (nn.RNNCell, {}), (nn.RNNCell, 1)])
def test_cells(kind: Any, options: Any, bias: bool) -> None:
    more = {"nonlinearity": "relu"} if options else {}

    def op(x: Tensor, *weights: Tensor) -> Any:
        """Two steps, the first from the state of zeros."""
        named = dict(zip((name for name, _ in module.named_parameters()), weights, strict=True))
        first = torch.func.functional_call(module, named, x)
        second = torch.func.functional_call(module, named, (x, first))
        return second if isinstance(second, tuple) else (second,)

    module = kind(5, 4, bias=bias, **more)
    weights = [member(*p.shape) for p in module.parameters()]
    for x, dim in ((torch.randn(6, 5), None), (member(6, 5), 0)):
        assert_folds(op, x, *weights, dims=(dim, *[0] * len(weights)))


class Packed(nn.Module):
    """A recurrent layer on sequences of different lengths."""

    def __init__(self, layer: nn.RNNBase, enforce_sorted: bool) -> None:
        super().__init__()
        self.layer, self.enforce_sorted = layer, enforce_sorted

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        lengths, first = torch.tensor([5, 3, 3, 1]), self.layer.batch_first
        if not self.enforce_sorted:
            lengths = lengths[[2, 0, 3, 1]]
        packed = pack_padded_sequence(x, lengths, first, self.enforce_sorted)
        out, state = self.layer(packed)
        padded, of_lengths = pad_packed_sequence(out, first, -1.0, total_length=6)
        return padded, (of_lengths == lengths).float(), *(state if isinstance(state, tuple) else (state,))


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.parametrize("enforce_sorted", [True, False])
@pytest.mark.parametrize(("kind", "options"), RECURRENT)
def test_packed_sequences(kind: Any, options: dict[str, Any], enforce_sorted: bool) -> None:
    shape = (4, 6, 5) if options.get("batch_first") else (6, 4, 5)
    assert_modules_fold(lambda: Packed(kind(5, 4, **options), enforce_sorted), [torch.randn(shape)], {})


@pytest.mark.parametrize("index", SHARED)
def test_scatter_of_a_number(index: int | None) -> None:
    classes = torch.randint(0, 5, (6, 1) if index is None else (K, 6, 1))
    assert_folds(lambda w, i: (w * 1).scatter_(1, i, value=1.0), member(6, 5), classes, dims=(0, index))
    assert_folds(lambda w, i: (w * 1).scatter_(-1, i, 2.0), member(6, 5), classes, dims=(0, index))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("index", SHARED)
def test_scatter_that_reduces(index: int | None) -> None:
    places = torch.randint(0, 5, (6, 1) if index is None else (K, 6, 1))
    x_K = member(6, 5)
    with folded(Streams(K)):
        found = torch.func.vmap(lambda x, i: (x * 1).scatter_(1, i, 2.0, reduce="multiply"), (0, index))(x_K, places)
    alone = [x.clone().scatter_(1, i, 2.0, reduce="multiply") for x, i in zip(x_K, places.expand(K, 6, 1))]
    assert torch.equal(found, torch.stack(alone))
