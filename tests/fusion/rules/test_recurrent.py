"""Recurrent layers, unrolled."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusion.rules import folded
from fusion.streams import Streams
from tests.fusion.rules.folding import K, assert_folds, assert_modules_fold, member

RECURRENT: list[tuple[Any, dict[str, Any]]] = [
    (nn.LSTM, {}),
    (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    (nn.LSTM, {"proj_size": 3, "bias": False}),
    (nn.LSTM, {"proj_size": 3}),
    (nn.GRU, {}),
    (nn.GRU, {"num_layers": 2, "bidirectional": True, "batch_first": True, "bias": False}),
    (nn.RNN, {"nonlinearity": "tanh"}),
    (nn.RNN, {"nonlinearity": "relu", "num_layers": 2}),
]


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
