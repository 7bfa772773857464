"""Models of each kind of layer: narrow as by hand, or refused in words that name the layer."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from surrogate import ShrinkPlan, coordinate_check, make_surrogate, plan_shrink, shrink
from surrogate.coordinates import CoordinateCheck
from surrogate.roles_and_multipliers import lr_multipliers, width_plan
from surrogate.widths import shapes_of
from tests.surrogate.layers import EXACT, IMAGES, SERIES, MixedByFourier, PaddedChannels

WIDTHS = (1 / 4, 1 / 2, 1.0)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
# The whole transformer is made of parts that others have.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "transformer")) for name in EXACT]
)
def test_narrow_as_by_hand(name: str) -> None:
    make, batch = EXACT[name]
    model = make(1.0)
    narrow = shrink(model, 1 / 4, batch)
    twin = make(1 / 4)
    assert shapes_of(narrow) == shapes_of(twin)
    assert repr(narrow) == repr(twin)
    twin.load_state_dict(narrow.state_dict())
    for path, factor in width_plan(narrow).readouts.items():
        reader: Any = twin.get_submodule(path)
        reader.register_forward_pre_hook(lambda _, args, factor=factor: (args[0] * factor, *args[1:]))
    assert torch.equal(narrow(batch), twin(batch))
    assert not width_plan(narrow).mostly_wide


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("transformer", "bilinear")]
LEARNS = ["rnn", "gru", "lstm", "attention", *SLOW]


@cache
def planned(name: str, ratio: float, scale: float) -> ShrinkPlan:
    make, batch = EXACT[name]
    return plan_shrink(make(scale), ratio, batch)


def check(name: str, optimizer: str, monkeypatch: pytest.MonkeyPatch, scale: float = 4.0) -> CoordinateCheck:
    make, batch = EXACT[name]

    def narrow(*args: Any) -> nn.Module:
        plan = planned(name, args[2], scale) if args[2] < 1 else None
        return shrink(make(scale), args[2], batch, plan=plan)

    monkeypatch.setattr("surrogate.coordinates.make_surrogate", narrow)
    torch.manual_seed(1)
    if name == "transformer":
        # Of a token, there is one target: of random ones, the mean leaves gradients by the narrow output alone.
        many = torch.randint(20, (64, 6))
        target = torch.randn(20, 20)[many]
    else:
        many = torch.randn(16 if name == "bilinear" else 64, 5, 8)
        target = torch.randn_like(make(1 / 4)(many))
    config = {"optimizer": optimizer, "lr": 0.01 if optimizer == "sgd" else 0.003}

    def objective(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(model(pair[0]), pair[1])

    return coordinate_check(
        lambda *_: make(scale), config, WIDTHS, [(many, target)] * 3, objective, seeds=4, max_slope=0.25
    )


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("name", LEARNS)
def test_coordinates_neither_grow_nor_shrink_with_the_width(
    name: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = check(name, optimizer, monkeypatch)
    assert found.passed, found.table()


def test_gates_of_a_recurrent_layer_keep_their_own_initial_values() -> None:
    """A forget gate's bias of 1 is the second quarter's, and stays so."""
    model = EXACT["lstm"][0](1.0)
    bias, weight = model.get_parameter("rnn.bias_ih_l0"), model.get_parameter("rnn.weight_hh_l0")
    with torch.no_grad():
        bias.copy_(torch.arange(4.0).repeat_interleave(64) == 1)
        weight.copy_(torch.eye(64).repeat(4, 1))
    narrow = shrink(model, 1 / 4, SERIES)
    assert torch.equal(narrow.get_parameter("rnn.bias_ih_l0"), (torch.arange(4.0).repeat_interleave(16) == 1).float())
    assert torch.equal(narrow.get_parameter("rnn.weight_hh_l0"), torch.eye(16).repeat(4, 1))


def test_random_gates_are_parts_of_their_own_gate() -> None:
    model = EXACT["gru"][0](1.0)
    with torch.no_grad():
        model.get_parameter("rnn.bias_hh_l0").copy_(torch.arange(3.0).repeat_interleave(64) + torch.rand(192))
    narrow = shrink(model, 1 / 4, SERIES)
    assert narrow.get_parameter("rnn.bias_hh_l0").floor().tolist() == torch.arange(3.0).repeat_interleave(16).tolist()


def test_the_fan_in_of_a_bilinear_layer_is_the_product_of_its_inputs_sizes() -> None:
    make, batch = EXACT["bilinear"]
    narrow = shrink(make(1.0), 1 / 4, batch)
    width = width_plan(narrow).params["products.weight"]
    assert width.width_mult == 1 / 16
    assert width.spread == 4.0
    assert lr_multipliers(narrow, "adam")["products.weight"] == 16.0
    assert lr_multipliers(narrow, "muon")["products.weight"] == 16.0  # updated by AdamW: it is no matrix
    assert lr_multipliers(narrow, "sgd")["products.weight"] == 1 / 4 / (1 / 16)


class WritesTheOutput(nn.Module):
    """A recurrent layer is the last one."""

    def __init__(self, kind: Any, packed: bool = False, **settings: Any) -> None:
        super().__init__()
        self.first, self.last, self.packed = nn.Linear(8, 32), kind(32, batch_first=True, **settings), packed

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        out: Tensor = self.last(pack_sequence(list(x)))[1][-1] if self.packed else self.last(x)[0]
        return out


@pytest.mark.parametrize("packed", [False, True])
def test_a_recurrent_layer_that_writes_the_output_is_a_readout(packed: bool) -> None:
    narrow = shrink(WritesTheOutput(nn.GRU, packed, hidden_size=3), 1 / 4, SERIES)
    assert width_plan(narrow).readouts == {"last": 4.0}


REFUSED: dict[str, tuple[nn.Module, Tensor, str]] = {
    "channels padded by a number": (
        PaddedChannels(third=False),
        IMAGES,
        r"no width can be scaled.*16 of first.weight stays, as `pad` in module 'PaddedChannels' fixes it.*width_ratio",
    ),
    "a projection that writes the output": (
        WritesTheOutput(nn.LSTM, hidden_size=32, proj_size=3),
        SERIES,
        r"parameter 'last.weight_hr_l0' reads a width and writes a fixed size within layer 'last' \(LSTM\).*nn.Linear",
    ),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line_that_names_the_layer(name: str) -> None:
    model, batch, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as refused:
        shrink(model, 1 / 4, batch)
    assert "\n" not in str(refused.value)


def test_projections_of_fixed_size_are_refused_of_a_model_function_too() -> None:
    with pytest.raises(ValueError, match=r"parameter 'weight_hr_l0' reads a width .* within layer '' \(LSTM\)"):
        make_surrogate(lambda _, ratio: nn.LSTM(8, int(32 * ratio), proj_size=3), {}, 1 / 4)
    make_surrogate(lambda _, ratio: nn.LSTM(8, int(32 * ratio), proj_size=int(16 * ratio)), {}, 1 / 4)
    for key in ("k", "v"):

        def attention(_: Any, ratio: float, key: str = key) -> nn.Module:
            sizes: dict[str, Any] = {"kdim": 8, "vdim": 8, f"{key}dim": int(32 * ratio)}
            return nn.MultiheadAttention(16, 2, **sizes)

        told = rf"parameter '{key}_proj_weight' reads a width .* within layer '' \(MultiheadAttention\)"
        with pytest.raises(ValueError, match=told):
            make_surrogate(attention, {}, 1 / 4)


def test_a_fourier_transform_along_a_width_keeps_it_and_the_plan_says_so() -> None:
    assert width_plan(shrink(MixedByFourier(), 1 / 4, SERIES)).summary == (
        "3 of 6 parameters are narrower "
        "(first.weight stays; 32 of first.weight stays, as `fft_fft2` in module 'MixedByFourier' fixes it)"
    )


def test_a_model_that_mostly_keeps_its_widths_is_a_warning() -> None:
    with pytest.warns(UserWarning, match="saves little: only 3 of 8 parameters are narrower .*`pad` in module"):
        shrink(PaddedChannels(third=True), 1 / 4, IMAGES)
