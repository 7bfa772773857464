"""Random numbers belong to a member: the same alone, fused in any group at any place, and one by one."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusion import FusedModel, FusionWarning, dry_run, fuse
from fusion.check.dry_run import Obstacle
from fusion.streams import Stream, global_states, preserved_generators, seed_generators
from tests.zoo import DEVICES

pytestmark = pytest.mark.gpu

ROWS, IMAGES = torch.randn(6, 4), torch.randn(6, 4, 5, 5)
SEQUENCES = torch.randn(6, 5, 4)
SEEDS = [11, 2**63 - 1, 7]


class Noisy(nn.Module):
    """A layer, and a function that draws."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(4, 4), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(self.layer(x))


def attend(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.4)


def masked(x: Tensor) -> Tensor:
    mask = torch.ones(5, 5, dtype=torch.bool).tril().index_fill(0, torch.tensor(2), False)  # one row sees nothing
    return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], mask, 0.4)


def in_place(x: Tensor) -> Tensor:
    return x + torch.empty_like(x).uniform_() + x.new_empty(6, 1).bernoulli_(0.5)


def laplace(x: Tensor) -> Tensor:
    return torch.distributions.Laplace(x, x.exp()).rsample()


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "dropout": (lambda x: F.dropout(x, 0.4), ROWS),
    "dropout-in-place": (lambda x: F.dropout(x * 2, 0.4, inplace=True), ROWS),
    "dropout-of-what-is-shared": (lambda x: x + F.dropout(torch.ones(4), 0.4), ROWS),
    "dropout-of-all": (lambda x: x + F.dropout(x, 1.0) + torch.rand(()), ROWS),
    "dropout-of-nothing": (lambda x: x + F.dropout(x, 0.0) + torch.rand(()), ROWS),
    "rand-like": (lambda x: x + torch.rand_like(x), ROWS),
    "stochastic-depth": (lambda x: x * torch.rand(()).lt(0.5), ROWS),
    "normal": (lambda x: torch.normal(x, 0.1), ROWS),
    "in-place": (in_place, ROWS),
    "new": (lambda x: x + torch.zeros(6, 4).normal_(0, 0.1), ROWS),
    "locked-dropout": (lambda x: x * x.data.new(1, 4).bernoulli_(0.6), ROWS),
    "bernoulli": (lambda x: x * torch.bernoulli(x.sigmoid()), ROWS),
    "permutation": (lambda x: x[torch.randperm(6)], ROWS),
    "multinomial": (lambda x: x.gather(1, x.softmax(1).multinomial(2)), ROWS),
    "gumbel": (lambda x: F.gumbel_softmax(x, hard=True), ROWS),
    "distribution": (lambda x: torch.distributions.Normal(x, 1.0).rsample(), ROWS),
    "beta": (lambda x: torch.distributions.Beta(x.exp(), x.exp()).rsample(), ROWS),
    "laplace": (laplace, ROWS),
    "laplace-twice": (lambda x: torch.distributions.Laplace(x, x.exp()).rsample((2,)).sum(0) + laplace(x), ROWS),
    "counts": (lambda x: laplace(x) * torch.distributions.Multinomial(5, logits=x).sample(), ROWS),
    "gamma": (lambda x: torch.distributions.Gamma(x.exp(), x.exp()).rsample(), ROWS),
    "attention": (attend, SEQUENCES),
    "masked-attention": (masked, SEQUENCES),
}


def noisy(function: str) -> tuple[Callable[[], nn.Module], Tensor]:
    draw, x = FUNCTIONS[function]
    return lambda: Noisy(draw), x


MODULES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    **{name: noisy(name) for name in FUNCTIONS},
    "conv": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.Dropout(0.4), nn.Dropout2d(0.4)), IMAGES),
    "alpha-dropout": (lambda: nn.Sequential(nn.Linear(4, 4), nn.AlphaDropout(0.4), nn.FeatureAlphaDropout(0.4)), ROWS),
    "rrelu": (lambda: nn.Sequential(nn.Linear(4, 4), nn.RReLU()), ROWS),
    "rrelu-in-place": (lambda: nn.Sequential(nn.Linear(4, 4), nn.RReLU(inplace=True)), ROWS),
    "fractional": (lambda: nn.Sequential(nn.Conv2d(4, 2, 1), nn.FractionalMaxPool2d(2, 3)), IMAGES),
    "lstm": (lambda: nn.LSTM(4, 5, 2, dropout=0.4, batch_first=True, bidirectional=True), SEQUENCES),
    "gru": (lambda: nn.GRU(4, 5, 3, dropout=0.4), SEQUENCES),
    "frozen-lstm": (lambda: nn.Sequential(nn.Linear(4, 4), frozen_lstm()), SEQUENCES),
    "transformer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.4, batch_first=True), SEQUENCES),
    "decoder": (lambda: Decoder(), SEQUENCES),
    "attention-with-bias": (lambda: SelfAttention(add_bias_kv=True), SEQUENCES),
    "attention-with-weights": (lambda: SelfAttention(), SEQUENCES),
}


def frozen_lstm() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.LSTM(4, 5, 2, dropout=0.4).requires_grad_(False)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(4, 2, 8, 0.4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x, x[:3], tgt_mask=nn.Transformer.generate_square_subsequent_mask(6), tgt_is_causal=True)
        return y


class SelfAttention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, 0.4, **options)

    def forward(self, x: Tensor) -> Any:
        return self.attention(x, x, x)[0]


def output(model: nn.Module, x: Tensor) -> Tensor:
    result = model(x)
    first: Tensor = result[0] if isinstance(result, tuple) else result
    return first


def steps(fused: FusedModel, x: Tensor) -> list[Tensor]:
    """Outputs of three steps and their gradients, [K, ...] each."""
    seen = []
    for _ in range(3):
        fused.zero_grad()
        out_K = fused.map(output, x)
        out_K.square().sum().backward()
        seen += [out_K.detach(), *(p.grad for p in fused.stacked.values() if p.grad is not None)]
    return seen


def steps_alone(model: nn.Module, x: Tensor, seed: int) -> list[Tensor]:
    with preserved_generators():
        seed_generators(seed)
        return [row[0] for row in steps(fuse([model]), x)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODULES)
def test_a_member_draws_as_alone(name: str, device: str) -> None:
    if device == "cuda" and name in ("lstm", "gru", "frozen-lstm"):
        pytest.skip("cuDNN draws the dropout between layers from a generator of its own, which no seed reaches")
    with torch.device(device):
        check_draws(*MODULES[name])


def check_draws(make: Callable[[], nn.Module], x: Tensor) -> None:
    x = x.to(torch.get_default_device())
    torch.manual_seed(0)
    models = [make() for _ in SEEDS]
    alone = [steps_alone(model, x, seed) for model, seed in zip(models, SEEDS)]
    first = 1 if x.device.type == "cpu" else len(alone[0])  # on a GPU, both seeds drop the same in some first step
    again = steps_alone(models[0], x, SEEDS[2])
    assert not all(map(torch.equal, alone[0][:first], again)), "no random number is drawn"
    before = global_states()
    for members, one_by_one in (([0, 1, 2], False), ([2, 0], False), ([1, 2], True), ([1], False)):
        fused = fuse([models[k] for k in members], one_by_one=one_by_one)
        fused.seed([SEEDS[k] for k in members])
        for step, *expected in zip(steps(fused, x), *(alone[k] for k in members), strict=True):
            for position in range(len(members)):
                torch.testing.assert_close(step[position], expected[position], rtol=1e-3, atol=1e-3)
    assert global_states() == before


@pytest.mark.parametrize("name", ["dropout", "lstm", "transformer"])
def test_a_probability_of_ones_own_changes_nothing(name: str) -> None:
    """Whether a float is the same in all members or not; a member without dropout draws nothing."""
    make, x = {**MODULES, "dropout": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.4)), ROWS)}[name]
    models = [make() for _ in range(3)]
    for model, p in zip(models, (0.0, 0.1, 0.7)):
        for child in model.modules():
            for attribute in {"p", "dropout"} & vars(child).keys():
                setattr(child, attribute, p)
    fused = fuse(models)
    fused.seed(SEEDS)
    seen = steps(fused, x)
    for k, model in enumerate(models):
        for step, expected in zip(seen, steps_alone(model, x, SEEDS[k]), strict=True):
            torch.testing.assert_close(step[k], expected, rtol=1e-3, atol=1e-3)


def draws(fused: FusedModel) -> list[list[float]]:
    return [row.tolist() for row in fused.map(lambda model, _: torch.rand(4), None)]


@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_place_in_the_numbers_goes_where_its_member_goes(one_by_one: bool) -> None:
    def group(seeds: list[int]) -> FusedModel:
        fused = fuse([nn.Linear(1, 1) for _ in seeds], one_by_one=one_by_one)
        fused.seed(seeds)
        return fused

    def alone(seed: int) -> list[float]:
        return torch.rand(12, generator=torch.Generator().manual_seed(seed)).tolist()

    fused, other = group([1, 2, 3]), group([4, 5])
    assert draws(fused) == [alone(seed)[:4] for seed in (1, 2, 3)]
    fused.keep([2, 0, 2])
    fused.concat(other)
    assert draws(fused) == [*(alone(seed)[4:8] for seed in (3, 1, 3)), *(alone(seed)[:4] for seed in (4, 5))]
    assert draws(other) == [alone(seed)[:4] for seed in (4, 5)]
    fused.seed([9, 9, 1, 2, 3])
    assert draws(fused) == [alone(seed)[:4] for seed in (9, 9, 1, 2, 3)]
    with pytest.raises(ValueError, match="`len\\(seeds\\)` is 1, but must be 5"):
        fused.seed([1])


def test_members_that_nobody_seeds_follow_torchs_default_generator() -> None:
    def fresh() -> list[list[float]]:
        torch.manual_seed(5)
        return draws(fuse([nn.Linear(1, 1) for _ in range(3)]))

    one = fresh()
    assert fresh() == one
    assert len({tuple(row) for row in one}) == 3


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: random.gauss(0, 1), np.random.randn])
def test_what_draws_from_other_generators_is_evaluated_one_by_one(draw: Callable[[], float]) -> None:
    def objective(model: nn.Module, x: Tensor) -> Tensor:
        result: Tensor = model(x).sum() * 0 + draw()
        return result

    fused = fuse([nn.Linear(4, 1) for _ in SEEDS])
    before = global_states()
    with pytest.warns(FusionWarning, match="it draws from a generator that all share"):
        assert isinstance(dry_run(fused, objective, ROWS), Obstacle)
    assert global_states() == before
    fused.seed(SEEDS)
    fused.keep([2, 0, 1])
    seen = torch.stack([fused.map(objective, ROWS) for _ in range(3)], 1)
    with preserved_generators():
        for row, seed in zip(seen, (SEEDS[2], SEEDS[0], SEEDS[1])):
            seed_generators(seed)
            assert row.tolist() == torch.tensor([float(draw()) for _ in range(3)]).tolist()
    assert global_states() == before


def test_what_draws_from_a_generator_of_its_own_is_evaluated_one_by_one() -> None:
    def draw(x: Tensor) -> Tensor:
        return x + torch.rand(4, generator=torch.Generator().manual_seed(0))

    models = [Noisy(draw) for _ in SEEDS]
    fused = fuse(models)
    with pytest.warns(FusionWarning, match="it draws numbers without a rule .* `torch.Generator` of its own"):
        assert isinstance(dry_run(fused, lambda model, x: model(x).sum(), ROWS), Obstacle)
    torch.testing.assert_close(fused(ROWS), torch.stack([model(ROWS) for model in models]))


def test_what_begins_to_draw_after_a_change_of_mode_is_seen() -> None:
    def objective(model: nn.Module, _: None) -> float:
        return 0.0 if model.training else random.random()

    fused = fuse([nn.Linear(1, 1) for _ in SEEDS], one_by_one=True)
    fused.seed(SEEDS)
    for _ in range(2):
        fused.map(objective, None)
    before = random.getstate()
    seen = fused.eval().map(objective, None)
    assert seen.tolist() == torch.tensor([random.Random(seed).random() for seed in SEEDS]).tolist()
    assert random.getstate() == before


def test_an_operator_that_is_not_known_to_draw_is_never_drawn_for_all_at_once() -> None:
    def objective(model: nn.Module, x: Tensor) -> Tensor:
        total: Tensor = model(x).sum() + torch.ops.aten.rand_like(x).sum()
        return total

    fused = fuse([nn.Linear(4, 1) for _ in SEEDS])
    with pytest.warns(FusionWarning):
        dry_run(fused, objective, ROWS)
    assert fused.one_by_one


def test_an_error_takes_back_what_was_drawn() -> None:
    stream, before = Stream(3), global_states()
    with pytest.raises(ZeroDivisionError), stream.drawn_from():
        _ = torch.rand(3) * (random.random() + np.random.rand()) * (1 // 0)
    assert global_states() == before
    with stream.drawn_from():
        drawn = torch.rand(3), random.random(), np.random.rand()
    with preserved_generators():
        seed_generators(3)
        assert torch.equal(drawn[0], torch.rand(3))
        assert drawn[1:] == (random.random(), np.random.rand())
