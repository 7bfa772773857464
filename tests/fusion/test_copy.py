"""A member that becomes a copy goes on as its source: against the source itself, and against torch alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusion import FusedModel, FusedOptimizer, GraphedStep, LossScale, fuse, fused_optimizer
from fusion.optim import optimizer
from tests.zoo import CLASSES, classify

CONFIGS: dict[str, list[dict[str, Any]]] = {
    "sgd": [{"optimizer": "sgd", "lr": 0.1 / (k + 1), "momentum": 0.9, "nesterov": k == 1} for k in range(4)],
    "adamw": [{"optimizer": "adamw", "lr": 0.01 / (k + 1), "weight_decay": 0.1 * k} for k in range(4)],
    "mixed": [
        {"optimizer": "adam", "lr": 0.01, "lr.5": 0.1},
        {"optimizer": "sgd", "lr": 0.1, "momentum": 0.8},
        {"optimizer": "rmsprop", "lr": 0.01},
        {"optimizer": "nadam", "lr": 0.02},
    ],
}


def build(k: int) -> nn.Module:
    """BatchNorm, dropout and a slope of its own; a frozen base that all share."""
    torch.manual_seed(k)
    layers = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.LeakyReLU(0.1 * k), nn.Dropout(0.1 * (k + 1)), nn.Linear(8, CLASSES)
    torch.manual_seed(100)
    return nn.Sequential(nn.Linear(8, 8).requires_grad_(False), *layers).double()


def group(configs: list[dict[str, Any]], one_by_one: bool = False) -> tuple[FusedModel, FusedOptimizer]:
    fused = fuse([build(k) for k in range(len(configs))], one_by_one=one_by_one)
    return fused, fused_optimizer(fused, configs)


def batch(step: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(step)
    return torch.randn(9, 8, dtype=torch.double, generator=rng), torch.randint(CLASSES, (9,), generator=rng)


def train(fused: FusedModel, opt: FusedOptimizer, steps: range) -> Tensor:
    losses = []
    for step in steps:
        opt.set_lr_factor([1 / (1 + step)] * fused.K)
        opt.zero_grad()
        losses.append(fused.map(classify, batch(step)))
        losses[-1].sum().backward()
        opt.step()
    return torch.stack(losses).detach()


def state(fused: FusedModel, opt: FusedOptimizer, k: int) -> dict[str, Any]:
    module = fused.unfuse(k)
    return {"module": dict(module.state_dict()), "optimizer": opt.unfuse(k, module).state_dict()}


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("one_by_one", [False, True], ids=["fused", "one-by-one"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_copy_goes_on_as_its_source_to_the_last_bit(kind: str, one_by_one: bool) -> None:
    (fused, opt), (left, left_opt) = (group(CONFIGS[kind], one_by_one) for _ in range(2))
    for model, own in ((fused, opt), (left, left_opt)):
        model.seed(range(4))
        train(model, own, range(3))
    places = {name: tensor.data_ptr() for name, tensor in {**fused.stacked, **fused.stacked_buffers}.items()}
    fused.copy({2: 0, 3: 1})
    opt.copy({2: 0, 3: 1})
    assert places == {name: tensor.data_ptr() for name, tensor in {**fused.stacked, **fused.stacked_buffers}.items()}
    expected = [state(left, left_opt, source) for source in (0, 1, 0, 1)]
    same([state(fused, opt, k) for k in range(4)], expected)
    # Vectorized kernels may round by a member's place: so against a group of the same members in the same places.
    left.keep([0, 1, 0, 1])
    left_opt.keep([0, 1, 0, 1])
    same(train(fused, opt, range(3, 7)), train(left, left_opt, range(3, 7)))
    same([state(fused, opt, k) for k in range(4)], [state(left, left_opt, k) for k in range(4)])
    if one_by_one:
        same(state(fused, opt, 2), state(fused, opt, 0))
    torch.testing.assert_close(state(fused, opt, 3), state(fused, opt, 1))


def test_members_can_change_places_and_a_member_of_a_copy_is_what_it_was_before() -> None:
    (fused, opt), (left, left_opt) = (group(CONFIGS["adamw"]) for _ in range(2))
    for model, own in ((fused, opt), (left, left_opt)):
        model.seed(range(4))
        train(model, own, range(2))
    for part in (fused, opt):
        part.copy({0: 1, 1: 0, -1: 1, 2: 2})
        part.copy({})
    places = [1, 0, 2, 1]
    same([state(fused, opt, k) for k in range(4)], [state(left, left_opt, k) for k in places])
    left.keep(places)
    left_opt.keep(places)
    same(train(fused, opt, range(2, 4)), train(left, left_opt, range(2, 4)))
    assert opt.members == left_opt.members


def test_a_copy_is_what_torch_would_train_from_a_copy_of_the_module() -> None:
    configs = [{**config, "grad_clip": None} for config in CONFIGS["adamw"]]
    fused, opt = group(configs)
    fused.eval()  # without dropout, running statistics stay
    train(fused, opt, range(3))
    twin = fused.unfuse(0)
    own = opt.unfuse(0, twin)
    fused.copy({3: 0})
    opt.copy({3: 0})
    for step in range(3, 6):
        for param_group in own.param_groups:
            param_group["lr"] = configs[0]["lr"] / (1 + step)
        own.zero_grad()
        classify(twin, batch(step)).backward()
        own.step()
    train(fused, opt, range(3, 6))
    torch.testing.assert_close(dict(fused.unfuse(3).state_dict()), dict(twin.state_dict()))
    assert isinstance(own, type(optimizer(twin, configs[0])))


def test_a_copy_draws_its_own_numbers_once_it_is_seeded() -> None:
    fused, opt = group(CONFIGS["sgd"])
    fused.seed(range(4))
    train(fused, opt, range(1))
    for part in (fused, opt):
        part.copy({1: 0})
    alike = train(fused, opt, range(1, 2))
    same(alike[:, 0], alike[:, 1])
    fused.seed([0, 1, 2, 3])
    apart = train(fused, opt, range(2, 3))
    assert apart[0, 0] != apart[0, 1]


CHANGES: list[dict[str, Any]] = [
    {"lr": 0.02, "weight_decay": 0.2, "beta1": 0.7},
    {"lr": 0.05, "momentum": 0.5},
    {"lr": 0.02, "weight_decay": 0.1, "alpha": 0.9},
    {"lr": 0.01, "beta2": 0.9},
]


def test_members_go_on_from_a_state_with_hyperparameters_of_their_own() -> None:
    """As `torch.optim` does whose groups are changed in training."""
    fused, opt = group(CONFIGS["mixed"])
    fused.eval()
    train(fused, opt, range(2))
    changed, its_opt = group([{**config, **own} for config, own in zip(CONFIGS["mixed"], CHANGES)])
    changed.eval()
    changed.load_state_dict(fused.state_dict())
    its_opt.load_state_dict(opt.state_dict(), hyperparameters=False)
    twins = [fused.unfuse(k) for k in range(4)]
    for k, (twin, own) in enumerate(zip(twins, CHANGES)):
        alone = opt.unfuse(k, twin)
        for of in alone.param_groups:
            betas = own.get("beta1", 0.9), own.get("beta2", 0.999)
            of.update({name: value for name, value in {**own, "betas": betas}.items() if name in of})
        rates = [0.1 if k == 0 and i == 1 else own["lr"] for i in range(len(alone.param_groups))]
        for step in range(2, 5):
            for of, rate in zip(alone.param_groups, rates):
                of["lr"] = rate / (1 + step)
            alone.zero_grad()
            classify(twin, batch(step)).backward()
            alone.step()
    train(changed, its_opt, range(2, 5))
    for k, twin in enumerate(twins):
        torch.testing.assert_close(dict(changed.unfuse(k).state_dict()), dict(twin.state_dict()))


def test_members_whose_update_rule_changes_have_its_multipliers_of_the_weight_decay() -> None:
    """Muon's factors depend on `adjust_lr_fn`."""
    rates = {"muon": {"0.weight": 2.0}, "muon.original": {"0.weight": 3.0}}
    fused = fuse([nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)) for _ in range(2)])
    both = {"lr_multipliers": rates, "weight_decay_multipliers": rates}

    def made(adjust: str) -> FusedOptimizer:
        return fused_optimizer(fused, [{"optimizer": "muon", "lr": 1.0, "adjust_lr_fn": adjust}] * 2, **both)

    def settings(opt: FusedOptimizer) -> list[tuple[float, float]]:
        return [(group["lr"], group["weight_decay"]) for group in opt.unfuse(0, fused.unfuse(0)).param_groups]

    first, loaded, taking, original = made("match_rms_adamw"), *(made("original") for _ in range(2)), made("original")
    loaded.load_state_dict(first.state_dict(), hyperparameters=False)
    first.take_hyperparameters(taking)
    assert settings(loaded) == settings(first) == settings(original)


@pytest.mark.parametrize("kind", ["sgd", "adagrad"])
def test_a_rate_of_a_part_that_changes_alone_is_taken(kind: str) -> None:
    """It is no hyperparameter of the optimizer, but a multiplier of its rate."""
    torch.manual_seed(0)
    fused = fuse([nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)) for _ in range(2)])
    opt, changed = (fused_optimizer(fused, [{"optimizer": kind, "lr": 0.1, "lr.1": rate}] * 2) for rate in (0.2, 0.4))

    def step(fused: FusedModel, opt: FusedOptimizer) -> None:
        opt.zero_grad()
        fused(torch.ones(5, 4)).square().sum().backward()
        opt.step()

    step(fused, opt)
    loaded, its_opt = copy.deepcopy((fused, changed))
    its_opt.load_state_dict(opt.state_dict(), hyperparameters=False)
    opt.take_hyperparameters(changed)
    for each in ((fused, opt), (loaded, its_opt)):
        step(*each)
    assert torch.equal(fused.stacked["1.weight"], loaded.stacked["1.weight"])


def test_a_schedule_and_a_gradient_are_copied_too() -> None:
    fused, opt = group(CONFIGS["sgd"])
    fused.seed([0] * 4)
    opt.schedule([[1.0, 2.0, 3.0, 4.0], [0.1, 0.2, 0.3, 0.4]])
    fused.map(classify, batch(0)).sum().backward()
    for part in (fused, opt):
        part.copy({0: 3})
    opt.step()
    assert opt.lr_factor_K.tolist() == [4.0, 2.0, 3.0, 4.0]
    same(state(fused, opt, 0), state(fused, opt, 3))


def test_a_recorded_step_is_recorded_anew_where_it_has_read_what_was_copied() -> None:
    fused, opt = group(CONFIGS["sgd"])
    before = fused.changes, opt.changes
    for part in (fused, opt):
        part.copy({1: 1})
    assert before == (fused.changes, opt.changes)
    for part in (fused, opt):
        part.copy({1: 0})
    assert fused.changes > before[0]
    assert opt.changes > before[1]
    step = GraphedStep(lambda given: fused.map(classify, given), fused, opt)
    assert step(batch(0)).shape == (4,)


class Counts(nn.Module):
    """Keeps a tensor of the last batch, and a buffer that it makes as it runs."""

    last: Tensor | None
    seen: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, CLASSES)
        self.last = None
        self.register_buffer("seen", None)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        self.last = out.detach().mean()
        self.seen = self.last if self.seen is None else self.seen + self.last
        return out + self.seen


@pytest.mark.parametrize("one_by_one", [False, True], ids=["fused", "one-by-one"])
def test_what_forward_keeps_is_copied(one_by_one: bool) -> None:
    torch.manual_seed(0)
    fused = fuse([Counts().double() for _ in range(3)], one_by_one=one_by_one)
    fused.map(classify, batch(0))
    before = [copy.deepcopy(fused.unfuse(k)) for k in range(3)]
    fused.copy({0: 2})
    for k, source in enumerate([2, 1, 2]):
        same(dict(fused.unfuse(k).state_dict()), dict(before[source].state_dict()))
        same(fused.unfuse(k).last, before[source].last)
    losses = fused.map(classify, batch(1))
    same(losses[0], losses[2])


def test_a_loss_scale_is_copied() -> None:
    scale = LossScale(3)
    scale.update(torch.tensor([True, False, True]))
    scale.copy({0: 1})
    assert scale.scale_K.tolist() == [2.0**15, 2.0**15, 2.0**16]
    assert scale.steps_K.tolist() == [0, 0, 1]


def test_bad_sources_are_refused_before_anything_is_copied() -> None:
    fused, opt = group(CONFIGS["sgd"])
    before = {name: tensor.clone() for name, tensor in fused.stacked.items()}
    for part in (fused, opt, LossScale(4)):
        with pytest.raises(IndexError, match=r"`sources` has 4, but must be in \[-4, 4\)"):
            part.copy({0: 4})
        with pytest.raises(ValueError, match=r"`sources` is .*, but must be one source for each member"):
            part.copy({0: 1, -4: 2})
        with pytest.raises(ValueError, match=r"`sources` is .*, but must be a dict"):
            part.copy([0, 1])  # type: ignore[arg-type]
    same(dict(fused.stacked), {name: nn.Parameter(tensor) for name, tensor in before.items()})
