from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surrogate.init_distributions import Law, initial_laws


def laws_of(build: Callable[[], nn.Module]) -> dict[str, Law]:
    """Without memory for the parameters, and with nothing drawn from the global generator."""
    before = torch.get_rng_state()
    model, laws = initial_laws(build)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.is_meta for parameter in model.parameters() if parameter.dim())
    return laws


def linear(initialize: Callable[[Tensor], Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layer = nn.Linear(64, 32)
        initialize(layer.weight)
        return layer

    return build


def padded(weight: Tensor) -> None:
    nn.init.normal_(weight, std=0.02)
    with torch.no_grad():
        weight[3].zero_()


def by_parts(weight: Tensor) -> None:
    for part in weight.chunk(2):
        nn.init.orthogonal_(part)


CLOSED_FORMS: dict[str, tuple[Callable[[Tensor], Any], float]] = {
    "torch's own": (lambda w: w, (3 * 64) ** -0.5),
    "normal": (lambda w: nn.init.normal_(w, std=0.02), 0.02),
    "normal around a mean": (lambda w: nn.init.normal_(w, mean=2.0), 5**0.5),
    "standard normal": (nn.init.normal_, 1.0),
    "uniform": (lambda w: nn.init.uniform_(w, -0.3, 0.3), 0.3 / 3**0.5),
    "uniform to torch's default": (lambda w: nn.init.uniform_(w, -1.0, 1.0), 3**-0.5),
    "uniform to a bound": (lambda w: nn.init.uniform_(w, 0.0, 2.0), 2 / 3**0.5),
    "rand": (lambda w: w.data.copy_(torch.rand(w.shape)), 3**-0.5),
    "rand_like": (lambda w: w.data.copy_(torch.rand_like(w) - 0.5), 12**-0.5),
    "randn_like": (lambda w: w.data.copy_(torch.randn_like(w)), 1.0),
    "xavier_uniform": (nn.init.xavier_uniform_, (2 / 96) ** 0.5),
    "xavier_normal": (nn.init.xavier_normal_, (2 / 96) ** 0.5),
    "kaiming_normal": (lambda w: nn.init.kaiming_normal_(w, nonlinearity="relu"), (2 / 64) ** 0.5),
    "fan_out": (lambda w: nn.init.kaiming_uniform_(w, mode="fan_out", nonlinearity="relu"), (2 / 32) ** 0.5),
    "trunc_normal": (lambda w: nn.init.trunc_normal_(w, std=0.02), 0.02),
    "cut at two deviations": (lambda w: nn.init.trunc_normal_(w, std=1.0), 0.8796),
    "orthogonal": (lambda w: nn.init.orthogonal_(w, gain=2.0), 2.0 * 64**-0.5),
    "orthogonal by parts": (by_parts, 64**-0.5),
    "scaled afterwards": (lambda w: w.data.mul_(0.5), 0.5 * (3 * 64) ** -0.5),
    "by the shape": (lambda w: w.data.copy_(torch.randn(w.shape) * w.shape[1] ** -0.5), 64**-0.5),
    "a padding": (padded, 0.02),
}


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_closed_forms(name: str) -> None:
    initialize, expected = CLOSED_FORMS[name]
    law = laws_of(linear(initialize))["weight"]
    assert law.random
    assert law.size == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.3])
def test_constants(value: float) -> None:
    law = laws_of(linear(lambda w: nn.init.constant_(w, value)))["weight"]
    assert law.size == pytest.approx(value)
    assert (law.constant, law.random) == (True, False)


@pytest.mark.parametrize("initialize", [nn.init.eye_, lambda w: w.data.copy_(torch.linspace(0, 1, 64))])
def test_patterns_are_not_random(initialize: Callable[[Tensor], Any]) -> None:
    law = laws_of(linear(initialize))["weight"]
    assert (law.constant, law.random) == (False, False)


def test_a_law_without_a_closed_form_is_sampled() -> None:
    laws = laws_of(linear(lambda w: w.data.bernoulli_(0.25)))
    assert laws["weight"].size == pytest.approx(0.25**0.5, rel=0.1)
    laws = laws_of(linear(lambda w: w.data.exponential_(2.0)))
    assert laws["weight"].size == pytest.approx(0.5**0.5, rel=0.1)


def joined(weight: Tensor) -> None:
    weight.data[:8].copy_(torch.cat([torch.randn(4, 64), torch.zeros(4, 64)]))


def overlapping(weight: Tensor) -> None:
    nn.init.normal_(weight[:20], std=0.1)
    nn.init.normal_(weight[10:], std=0.2)


def by_elements(weight: Tensor) -> None:
    weight.data.copy_(torch.normal(torch.zeros_like(weight), torch.full_like(weight, 0.1)))


def around_elements(weight: Tensor) -> None:
    weight.data.copy_(torch.normal(torch.full_like(weight, 3.0)))


@pytest.mark.parametrize("initialize", [joined, overlapping, by_elements, around_elements])
def test_no_size_is_told_where_that_of_a_part_is_unknown(initialize: Callable[[Tensor], Any]) -> None:
    law = laws_of(linear(initialize))["weight"]
    assert (law.size, law.random) == (None, True)


class Loose(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scaled = nn.Parameter(torch.randn(6, 16) * 16**-0.5)
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.gate = nn.Parameter(torch.full((16,), 1e-4))
        self.joined = nn.Parameter(torch.cat([torch.randn(3), torch.zeros(1)]))
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]


def test_parameters_without_a_layer() -> None:
    laws = laws_of(Loose)
    assert laws["scaled"].size == pytest.approx(0.25, rel=0.01)
    assert (laws["temperature"].size, laws["temperature"].random) == (0.5, False)
    assert laws["gate"].size == pytest.approx(1e-4)
    assert not laws["gate"].random
    assert (laws["joined"].size, laws["joined"].random) == (None, True)


def test_a_library_that_leaves_meta_tensors_alone() -> None:
    """transformers initializes nothing on the meta device; GPT-2's residual projections start at 0.02 / sqrt(2 L)."""
    import transformers

    sizes = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(bos_token_id=0, eos_token_id=1, **sizes)
    laws = laws_of(lambda: transformers.GPT2LMHeadModel(config))
    assert laws["transformer.wte.weight"].size == pytest.approx(0.02, rel=0.01)
    assert laws["transformer.h.1.mlp.c_proj.weight"].size == pytest.approx(0.02 / math.sqrt(4), rel=0.01)


def test_a_constructor_that_reads_random_values_is_followed_with_memory() -> None:
    def build() -> nn.Module:
        layer = nn.Linear(64, 32)
        nn.init.normal_(layer.weight, std=0.1 if layer.weight[0, 0].item() > 9.0 else 0.2)
        return layer

    model, laws = initial_laws(build)
    assert not next(model.parameters()).is_meta
    assert laws["weight"].size == pytest.approx(0.2, rel=0.01)


def test_a_constructors_own_error_is_raised() -> None:
    def build() -> nn.Module:
        raise KeyError("hidden")

    with pytest.raises(KeyError, match="hidden"):
        initial_laws(build)
