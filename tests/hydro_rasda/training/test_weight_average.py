from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from hydro_rasda.training.weight_average import Average, trained_tensors

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
    average = Average(lambda: trained_tensors(net))
    for step in range(3):
        learn(net, 1, step)
        average.update(horizon)
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
