from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

from surrogate import make_surrogate
from surrogate.readouts import ScaleInput, find_readouts
from surrogate.widths import compare_shapes, shapes_of
from tests.surrogate.models import ZOO


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mlp", {"4": 4.0}),
        ("cnn", {"8": 4.0}),
        ("conv_readout", {"2": 4.0}),
        ("transformer", {"readout": 4.0}),
        ("tied", {"readout": 4.0}),
        ("two_heads", {"classes": 4.0, "box": 4.0}),
        ("lstm", {"readout": 4.0}),
    ],
)
def test_readouts_by_shape(name: str, expected: dict[str, float]) -> None:
    model_fn, config, _ = ZOO[name]
    narrow, wide = model_fn(config, 1 / 4), model_fn(config, 1.0)
    assert find_readouts(narrow, compare_shapes(shapes_of(wide), shapes_of(narrow))) == expected


def test_readout_input_is_multiplied_and_its_bias_is_not() -> None:
    model_fn, config, x = ZOO["mlp"]
    narrow = make_surrogate(model_fn, config, 1 / 4)
    assert isinstance(narrow, nn.Sequential)
    hidden = narrow[:-1](x)
    expected = 4.0 * hidden @ narrow.get_parameter("4.weight").T + narrow.get_parameter("4.bias")
    torch.testing.assert_close(narrow(x), expected)


def test_hooks_compare_by_value_and_pickle() -> None:
    assert ScaleInput(4.0) == ScaleInput(4.0) != ScaleInput(2.0)
    assert pickle.loads(pickle.dumps(ScaleInput(4.0))) == ScaleInput(4.0)


def test_a_readout_called_by_keyword() -> None:
    layer = nn.Linear(4, 2)
    layer.register_forward_pre_hook(ScaleInput(2.0))
    with pytest.raises(ValueError, match=r"a readout .* first positional argument"):
        layer(input=torch.zeros(1, 4))
