""" """

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from hydro_rasda.settings.config import Mode
from hydro_rasda.training.best_weights import TOLERANCE, Average, bettered, epochs_since, kept_epoch, trained_tensors


@pytest.mark.parametrize(("mode", "sign"), [("min", 1.0), ("max", -1.0)])
@pytest.mark.parametrize("unit", [1.0, 1e-6, 1e6])
@pytest.mark.parametrize("zero", [1.0, -50.0])
def test_the_last_epoch_that_is_as_good_as_the_best_but_for_the_tolerance(
    mode: Mode, sign: float, unit: float, zero: float
) -> None:
    """In which unit a score is, and from which zero it counts, does not matter: the training gains 1 in all."""
    just, more = 0.9 * TOLERANCE, 1.1 * TOLERANCE

    def kept(*losses: float) -> int:
        return kept_epoch({epoch: sign * unit * (zero + loss) for epoch, loss in enumerate(losses, 1)}, mode)

    assert kept(1.0, 0.5, 0.0, just) == 4
    assert kept(1.0, 0.5, 0.0, more) == 3
    assert kept(1.0, 0.0, more, just, more) == 4
    assert kept(1.0, 2.0, 3.0) == 1  # nothing was gained
    assert kept(1.0, 0.5, 0.25, 0.0) == 4


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_first_score_that_is_far_off_makes_no_wide_tolerance(sign: float) -> None:
    """A regression whose targets are not scaled begins with a mean square of thousands."""
    scores = [sign * loss for loss in (1e4, 50.0, 10.0, 10.9, 50.0)]
    assert kept_epoch(dict(enumerate(scores, 1)), "min" if sign > 0 else "max") == 4


def test_what_is_not_finite_is_never_kept() -> None:
    assert kept_epoch({1: math.nan, 2: 0.5, 3: -math.inf}, "min") == 2
    assert kept_epoch({1: math.nan}, "min") == 0


def test_patience_counts_from_the_best_and_not_from_what_is_kept() -> None:
    best = None
    for epoch, score in enumerate([2.0, 1.0, 1 + 0.5 * TOLERANCE, 1 + 0.7 * TOLERANCE], 1):
        best = bettered(best, epoch, score, "min", dict)
    assert best is not None
    assert (best["epoch"], best["top_epoch"], epochs_since(best, 4)) == (4, 2, 2)
    assert epochs_since(None, 4) == 0


HORIZON = 4.0


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))


def learn(net: nn.Module, steps: int, seed: int = 0) -> None:
    """The network's own steps, of which each is seen by whoever looks between them."""
    generator = torch.Generator().manual_seed(seed)
    update = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(steps):
        update.zero_grad()
        net(torch.randn(8, 3, generator=generator)).square().mean().backward()
        update.step()


def averaged(net: nn.Module, steps: int, horizon: float = HORIZON) -> Average:
    """The average over the network's next steps."""
    average = Average(lambda: trained_tensors(net))
    for step in range(steps):
        learn(net, 1, step)
        average.update(horizon)
    return average


def test_it_averages_as_torch_does() -> None:
    """Evenly over the first steps, then each moves it by 1 / horizon of the way; running statistics likewise."""

    def even_then_exponential(mean: Tensor, value: Tensor, before: Tensor | int) -> Tensor:
        return mean + (value - mean) * max(1 / (int(before) + 1), 1 / HORIZON) if mean.is_floating_point() else value

    net = model()
    average = Average(lambda: trained_tensors(net))
    oracle = AveragedModel(net, avg_fn=even_then_exponential, use_buffers=True)
    for step in range(9):
        learn(net, 1, step)
        average.update(HORIZON)
        oracle.update_parameters(net)
        assert average.differs == (step > 0)
    own = {name: value.clone() for name, value in net.state_dict().items()}
    with average.in_place():
        for name, value in oracle.module.state_dict().items():
            torch.testing.assert_close(net.state_dict()[name], value, msg=name)
        assert not torch.equal(net.state_dict()["0.weight"], own["0.weight"])
    for name, value in net.state_dict().items():
        assert torch.equal(value, own[name]), name


def test_it_goes_on_from_what_was_saved() -> None:
    net = model()
    whole = Average(lambda: trained_tensors(net))
    saved: dict[str, Any] = {}
    for step in range(8):
        learn(net, 1, step)
        if step == 5:
            later = Average(lambda: trained_tensors(net))
            later.load(saved)
        if step >= 5:
            later.update(HORIZON)
        whole.update(HORIZON)
        if step == 4:
            saved = copy.deepcopy(whole.state())
    for name, mean in whole.state()["means"].items():
        assert torch.equal(mean, later.state()["means"][name]), name


@pytest.mark.parametrize("horizon", [0.0, 0.3, 1.0])
def test_a_horizon_of_a_step_is_the_step(horizon: float) -> None:
    net = model()
    average = averaged(net, 3, horizon)
    assert not average.differs
    before = net.state_dict()["0.weight"].clone()
    with average.in_place():
        assert torch.equal(net.state_dict()["0.weight"], before)


def test_small_shares_of_16_bit_weights_are_not_lost() -> None:
    """A thousandth of the way from 1 to 2 is less than bfloat16's distance of neighbours, 1 / 128."""
    weight = torch.ones(1, dtype=torch.bfloat16)
    average = Average(lambda: {"weight": weight})
    average.update(1000)
    average._steps = 1000
    weight.fill_(2)
    for _ in range(1000):
        average.update(1000)
    with average.in_place():
        assert weight.item() == pytest.approx(2 - 0.999**1000, abs=1 / 128)
    assert weight.item() == 2


def test_what_does_not_learn_is_not_averaged() -> None:
    net = model()
    net.get_submodule("0").requires_grad_(False)
    names = {"1.weight", "1.bias", "1.running_mean", "1.running_var", "2.weight", "2.bias"}
    assert set(trained_tensors(net)) == names


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_buffers_that_are_no_statistics_keep_their_last_value(norm: Callable[[nn.Module], nn.Module]) -> None:
    """Those of spectral normalization are unit vectors, and the mean of such is shorter."""
    torch.manual_seed(0)
    net = nn.Sequential(norm(nn.Linear(3, 5)), nn.Tanh(), nn.Linear(5, 1))
    average = averaged(net, 6)
    last = {name: buffer.clone() for name, buffer in net.named_buffers()}
    assert len(last) == 2
    with average.in_place():
        for name, buffer in net.named_buffers():
            assert torch.equal(buffer, last[name]), name
            assert buffer.norm().item() == pytest.approx(1)


def test_an_infinite_buffer_stays_as_it_is() -> None:
    """Such as a causal mask: the average of -inf and -inf would be NaN, and so would all outputs."""
    net = model()
    mask = torch.triu(torch.full((3, 3), -math.inf), 1)
    net.register_buffer("mask", mask.clone())
    average = averaged(net, 3)
    with average.in_place():
        assert torch.equal(net.get_buffer("mask"), mask)


def test_complex_parameters_are_averaged() -> None:
    """As those of Fourier operators: else the model would be averaged in part."""
    net = model()
    weight = nn.Parameter(torch.tensor([1 + 1j]))
    net.register_parameter("spectral", weight)
    average = Average(lambda: trained_tensors(net))
    for value in (0j, 2 - 2j, 4 + 2j):
        weight.data.fill_(value)
        average.update(HORIZON)
    with average.in_place():
        assert weight.item() == pytest.approx(2)
    assert weight.item() == 4 + 2j
