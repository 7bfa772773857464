"""Objectives by part against loops with one optimizer of `torch.optim` for each part, as tutorials write them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusion import lr_factor
from fusion.optim import optimizer
from fusion.optim.schedule_free import ScheduleFreeAdamW
from hydro_rasda import RaceConfig, SweepConfig, choice, loguniform, tune, uniform
from hydro_rasda.common.trial import Trial
from hydro_rasda.data import Batch, Shard, Share, make_batches
from hydro_rasda.heats.fusion_kinds import find_kinds
from hydro_rasda.problem.objective import as_objective, joined
from hydro_rasda.problem.precision import in_precision
from hydro_rasda.problem.problem import Problem
from hydro_rasda.settings.config import TuneConfig
from hydro_rasda.training.fused_learner import FusedLearner
from hydro_rasda.training.lr_and_decay_by_parameter import multipliers, optimizer_settings
from hydro_rasda.training.single_learner import SingleLearner
from surrogate import lr_multipliers
from tests.hydro_rasda.ranks import on_ranks

pytestmark = pytest.mark.usefixtures("one_process")

CPU, STEPS, PER_EPOCH = torch.device("cpu"), 20, 5
X = torch.randn(64, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Objectives = Mapping[str, Any]


class GAN(nn.Module):
    """With BatchNorm in the generator, and a parameter that belongs to no part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(3, width, bias=False), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2)
        )
        self.discriminator = nn.Sequential(nn.Linear(2, width), nn.LeakyReLU(0.2), nn.Linear(width, 1))
        self.unmoved = nn.Parameter(torch.ones(2))
        self.double()


def model_fn(config: dict[str, Any], width_ratio: float = 1.0) -> nn.Module:
    return GAN(int(64 * width_ratio))


def discriminator(model: Any, batch: Batch) -> Mapping[str, Tensor]:
    (real,) = batch
    fake = model.generator(torch.randn(len(real), 3, dtype=torch.float64)) * model.unmoved
    return {"loss": F.softplus(-model.discriminator(real)).mean() + F.softplus(model.discriminator(fake)).mean()}


def generator(model: Any, batch: Batch) -> Mapping[str, Tensor]:
    (real,) = batch
    fake = model.generator(torch.randn(len(real), 3, dtype=torch.float64)) * model.unmoved
    return {"loss": F.softplus(-model.discriminator(fake)).mean(), "size": fake.square().mean()}


PARTS: Objectives = {"discriminator": discriminator, "generator": generator}


def problem(width: float = 1.0, objective: Any = PARTS, **settings: Any) -> Problem:
    data = make_batches((X,), "train_data", CPU, 0)
    own = TuneConfig(sweep=SweepConfig(surrogate=width), max_t=4, metric="val_generator_size", **settings)
    made = in_precision(as_objective(objective, F.cross_entropy), own.precision)
    return Problem(model_fn, made, data, data, settings=own, device=CPU)


CONFIGS: list[dict[str, Any]] = [
    {"optimizer": "adamw", "lr": 1e-2, "lr.discriminator": 3e-2, "beta1": 0.5, "schedule": "cosine"},
    {"optimizer": "adamw", "lr": 3e-3, "lr.generator": 1e-2, "weight_decay": 0.3},
    {"optimizer": "adam", "lr": 1e-2, "grad_clip": 0.1, "schedule": "linear", "warmup_epochs": 1.0},
    {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "lr.generator": 0.3, "grad_clip": 0.2},
    {"optimizer": "rmsprop", "lr": 1e-3, "schedule": "wsd"},
    {"optimizer": "adagrad", "lr": 1e-2},
]
TRIALS = [Trial(number, config) for number, config in enumerate(CONFIGS)]


def batches() -> list[tuple[Tensor]]:
    return [(X[16 * (i % 4) : 16 * (i % 4) + 16],) for i in range(STEPS)]


def by_the_book(asked: Problem, trial: Trial, factors: float, objectives: Objectives = PARTS) -> nn.Module:
    """Train with one optimizer for each part; no parameter is ever frozen, and no graph is cut."""
    model, config = asked.surrogate(trial), trial.config
    further = multipliers(optimizer_settings(asked.objective, model, config), model, factors)
    own = {part: [p for name, p in model.named_parameters() if name.startswith(f"{part}.")] for part in objectives}
    optimizers = {}
    for part, parameters in own.items():
        whole = optimizer(model, config, **further)
        for group in whole.param_groups:
            group["params"] = [p for p in group["params"] if any(p is mine for mine in parameters)]
        optimizers[part] = whole, [group["lr"] for group in whole.param_groups]
    model.train()
    torch.manual_seed(trial.number)
    for i, batch in enumerate(batches()):
        for part, objective in objectives.items():
            taking, rates = optimizers[part]
            for group, rate in zip(taking.param_groups, rates):
                group["lr"] = rate * lr_factor(config, i / PER_EPOCH, 4, PER_EPOCH)
            model.zero_grad()
            objective(model, batch)["loss"].backward()
            if "grad_clip" in config:
                nn.utils.clip_grad_norm_(own[part], config["grad_clip"])
            taking.step()
    return model


Made = tuple[dict[str, Any], Callable[..., torch.optim.Optimizer], dict[str, Any]]
"""Settings of a part's optimizer as keys, and the optimizer of torch's with its arguments."""


def amsgrad(params: Any, lr: float, beta2: float = 0.999) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=lr, betas=(0.9, beta2), amsgrad=True)


ADAM: Made = {"optimizer": "adam", "lr": 1e-2, "beta1": 0.5}, torch.optim.Adam, {"betas": (0.5, 0.999)}
ADAMW: Made = {"optimizer": "adamw", "lr": 3e-3, "weight_decay": 0.3}, torch.optim.AdamW, {"weight_decay": 0.3}
RMSPROP: Made = {"optimizer": "rmsprop", "lr": 3e-3, "alpha": 0.9}, torch.optim.RMSprop, {"alpha": 0.9}
ADAMAX: Made = {"optimizer": "adamax", "lr": 1e-2, "eps": 1e-6}, torch.optim.Adamax, {"eps": 1e-6}
ADAGRAD: Made = {"optimizer": "adagrad", "lr": 1e-2}, torch.optim.Adagrad, {}
OWN: Made = (
    {"optimizer": amsgrad, "lr": 3e-3, "beta2": 0.99},
    torch.optim.Adam,
    {"betas": (0.9, 0.99), "amsgrad": True},
)
SGD: Made = (
    {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True},
    torch.optim.SGD,
    {"momentum": 0.9, "nesterov": True},
)
PAIRS: list[tuple[Made, Made, dict[str, Any]]] = [
    (ADAM, RMSPROP, {"schedule": "cosine"}),
    (ADAMW, SGD, {"schedule": "linear", "warmup_epochs": 1.0, "grad_clip": 0.1}),
    (ADAM, SGD, {"grad_clip": 0.2}),
    (SGD, ADAM, {}),
    (ADAMAX, ADAGRAD, {}),
    (ADAGRAD, OWN, {"schedule": "wsd"}),
    (OWN, ADAMW, {}),
]
"""Optimizers of generator and discriminator, and keys of the whole model."""


def of_pair(generators: Made, discriminators: Made, more: dict[str, Any]) -> dict[str, Any]:
    parts = {"generator": generators[0], "discriminator": discriminators[0]}
    return {"lr": 1.0, **more, **{f"{key}.{part}": value for part, own in parts.items() for key, value in own.items()}}


OWN_TRIALS = [Trial(number, of_pair(*pair)) for number, pair in enumerate(PAIRS)]


def with_two_optimizers(asked: Problem, number: int, width: float) -> nn.Module:
    """Train a GAN as tutorials do: two optimizers of torch's, which step in turn, and a loop around them."""
    model, (generators, discriminators, config) = asked.surrogate(OWN_TRIALS[number]), PAIRS[number]
    optimizers, rates = {}, {}
    for part, (keys, kind, arguments) in (("generator", generators), ("discriminator", discriminators)):
        name = keys["optimizer"] if isinstance(keys["optimizer"], str) else "adam"
        factors = dict.fromkeys(dict(model.named_parameters()), 1.0) if width == 1 else lr_multipliers(model, name)
        decay = arguments.get("weight_decay", 0.0)
        groups = [
            {"params": [p], "lr": keys["lr"] * factors[of], "weight_decay": decay / factors[of]}
            for of, p in model.named_parameters()
            if of.startswith(part)
        ]
        optimizers[part] = kind(groups, lr=1.0, **arguments)
        rates[part] = [group["lr"] for group in groups]
    model.train()
    torch.manual_seed(number)
    for i, batch in enumerate(batches()):
        for part, objective in PARTS.items():
            for group, rate in zip(optimizers[part].param_groups, rates[part]):
                group["lr"] = rate * lr_factor(config, i / PER_EPOCH, 4, PER_EPOCH)
            optimizers[part].zero_grad()
            objective(model, batch)["loss"].backward()
            if "grad_clip" in config:
                nn.utils.clip_grad_norm_(getattr(model, part).parameters(), config["grad_clip"])
            optimizers[part].step()
    return model


def share(batch: tuple[Tensor]) -> Share:
    return Share(batch, len(batch[0]), 1.0)


def fused_learner(asked: Problem, trials: Sequence[Trial]) -> FusedLearner:
    learner = FusedLearner([asked.surrogate(t) for t in trials], [t.config for t in trials], asked)
    learner.train_mode(True)
    learner.seed([trial.number for trial in trials])
    return learner


def assert_same(found: nn.Module, wanted: nn.Module) -> None:
    for (name, one), other in zip(found.state_dict().items(), wanted.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12, msg=lambda told: f"{name}: {told}")  # noqa: B023


@pytest.mark.parametrize("width", [1.0, 0.125])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_fused_parts_equal_loops_with_an_optimizer_each(width: float, one_by_one: bool) -> None:
    asked = problem(width)
    learner = fused_learner(asked, TRIALS)
    learner.fused.one_by_one = one_by_one
    for i, batch in enumerate(batches()):
        metrics = learner.step(share(batch), i / PER_EPOCH, PER_EPOCH)
    assert set(metrics) == {"loss", "discriminator_loss", "generator_loss", "generator_size"}
    torch.testing.assert_close(metrics["loss"], metrics["discriminator_loss"] + metrics["generator_loss"])
    for k, trial in enumerate(TRIALS):
        assert_same(learner.fused.unfuse(k), by_the_book(asked, trial, width))


@pytest.mark.parametrize("width", [1.0, 0.125])
def test_optimizers_of_parts_equal_two_of_torchs_in_turn(width: float) -> None:
    asked = problem(width)
    learner = fused_learner(asked, OWN_TRIALS)
    for i, batch in enumerate(batches()):
        learner.step(share(batch), i / PER_EPOCH, PER_EPOCH)
    for k in range(len(PAIRS)):
        assert_same(learner.fused.unfuse(k), with_two_optimizers(asked, k, width))


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_optimizers_of_parts_go_on_at_full_size(number: int) -> None:
    """Fused, then alone, then alone from a checkpoint: as two optimizers of torch's all along."""
    asked, (trial, config) = problem(), (OWN_TRIALS[number], OWN_TRIALS[number].config)
    fused = fused_learner(asked, OWN_TRIALS)
    for i, batch in enumerate(batches()[:6]):
        fused.step(share(batch), i / PER_EPOCH, PER_EPOCH)
    before = fused.member_state(number)
    learners = [SingleLearner(asked.target(trial), config, asked.objective, 4) for _ in range(2)]
    learners[0].load(before)
    learners[0].train_mode(True)
    for i, batch in enumerate(batches()[6:], 6):
        if i == 12:
            learners[1].load(learners[0].state())
            learners[1].train_mode(True)
        for learner in (fused, learners[i >= 12]):
            learner.seed([i] * (len(PAIRS) if learner is fused else 1))
            learner.step(share(batch), i / PER_EPOCH, PER_EPOCH)
    assert_same(learners[1].model, fused.fused.unfuse(number))


@pytest.mark.parametrize("trials", [TRIALS, OWN_TRIALS[:6]])
def test_fused_parts_go_on_after_keep_copy_concat_and_load(trials: Sequence[Trial]) -> None:
    """Members that were dropped, copied over, joined and loaded train as if nothing had been done to them."""
    asked = problem()
    wanted = fused_learner(asked, trials)
    some, others = fused_learner(asked, trials[:3]), fused_learner(asked, trials[3:])
    for i, batch in enumerate(batches()):
        if i == 8:
            some.keep([2, 1, 1])
            some.copy({2: 0})
            some.concat(others)
            fresh = fused_learner(asked, [trials[1], trials[2], trials[5]])
            fresh.load(some.state(), positions=[1, 2, 5])
            some = fresh
        if i % PER_EPOCH == 0 or i == 8:
            wanted.seed(range(6))
            some.seed([0, 1, 2] if i < 8 else [1, 2, 5])
            others.seed([3, 4, 5])
        for learner in (wanted, some) if i >= 8 else (wanted, some, others):
            learner.step(share(batch), i / PER_EPOCH, PER_EPOCH)
    for k, number in enumerate((1, 2, 5)):
        assert_same(some.fused.unfuse(k), wanted.fused.unfuse(number))


@pytest.mark.parametrize("trial", TRIALS[:4])
def test_parts_at_full_size_equal_loops_with_an_optimizer_each(trial: Trial) -> None:
    asked = problem()
    learner = SingleLearner(asked.target(trial), trial.config, asked.objective, 4)
    learner.train_mode(True)
    learner.seed([trial.number])
    for i, batch in enumerate(batches()):
        learner.step(share(batch), i / PER_EPOCH, PER_EPOCH)
    assert_same(learner.model, by_the_book(asked, trial, 1.0))
    assert all(parameter.requires_grad for parameter in learner.model.parameters())


class DQN(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2)).double()
        self.target = copy.deepcopy(self.online)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.steps: Tensor


def follow(model: Any, batch: Batch) -> Mapping[str, Tensor]:
    """Update the target a little in each step, and wholly in each seventh."""
    (state,) = batch
    with torch.no_grad():
        goal = state[:, 0] + 0.9 * model.target(state + 0.1).max(1).values
        if model.training:
            model.steps += 1
            for slow, fast in zip(model.target.parameters(), model.online.parameters()):
                slow += 0.05 * (fast - slow)
                slow.copy_(torch.where(model.steps % 7 == 0, fast, slow))
    return {"loss": F.smooth_l1_loss(model.online(state)[:, 1], goal), "size": goal.mean()}


def test_a_target_network_follows_in_each_fused_member() -> None:
    asked = replace(problem(objective=follow), model_fn=lambda config, width_ratio=1.0: DQN(int(32 * width_ratio)))
    trials = [Trial(k, {"lr": 0.003 * (k + 1), "weight_decay": 0.1}) for k in range(3)]
    learner = fused_learner(asked, trials)
    for batch in batches():
        learner.step(share(batch), 0.0, PER_EPOCH)
    for k, trial in enumerate(trials):
        model = asked.surrogate(trial)
        taking = torch.optim.AdamW(model.get_submodule("online").parameters(), trial.config["lr"], weight_decay=0.1)
        for batch in batches():
            model.zero_grad()
            follow(model, batch)["loss"].backward()
            taking.step()
        assert_same(learner.fused.unfuse(k), model)


def test_a_schedule_free_part_is_evaluated_and_handed_on_at_its_averages() -> None:
    asked = problem()
    config = {"optimizer": "adam", "lr": 0.01, "optimizer.generator": "schedule_free_adamw", "lr.generator": 0.003}
    fused, alone = fused_learner(asked, [Trial(0, config)] * 2), asked.surrogate(Trial(0, config))
    parts = {
        "discriminator": torch.optim.Adam(alone.get_submodule("discriminator").parameters(), 0.01),
        "generator": ScheduleFreeAdamW(alone.get_submodule("generator").parameters(), 0.003),
    }
    fused.seed([1, 1])
    torch.manual_seed(1)
    for batch in batches():
        fused.step(share(batch), 0.0, PER_EPOCH)
        for part, objective in PARTS.items():
            alone.zero_grad()
            objective(alone, batch)["loss"].backward()
            parts[part].step()
    assert_same(fused.fused.unfuse(1), alone)
    single = SingleLearner(asked.target(Trial(0, config)), config, asked.objective, 4)
    single.load(fused.member_state(1))
    assert_same(single.model, alone)
    parts["generator"].eval()  # type: ignore[attr-defined]
    for learner, model in ((fused, lambda: fused.fused.unfuse(0)), (single, lambda: single.model)):
        with learner.evaluating():
            assert_same(model(), alone)
    handed = GAN(64)
    handed.load_state_dict(single.state()["model"])
    assert_same(handed, alone)


def critic(model: Any, batch: Batch) -> Mapping[str, Tensor]:
    (x,) = batch
    error = (model.discriminator(x) - x.prod(1, keepdim=True)).square().mean(1)
    return {"loss": (error * (x[:, 0] > 0)).sum() / (x[:, 0] > 0).sum().clamp(min=1), "weight": (x[:, 0] > 0).sum()}


def actor(model: Any, batch: Batch) -> Mapping[str, Tensor]:
    (x,) = batch
    moves = model.generator(torch.cat([x, x[:, :1]], 1))
    return {"loss": model.discriminator(x + moves).mean() + moves.square().mean()}


WEIGHED: Objectives = {"discriminator": critic, "generator": actor}


def by_learner(rank: int, world: int, parts: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    shard, model = Shard(rank, world), GAN(8)
    model.generator[1] = nn.Identity()
    config = {"lr": 0.01, "grad_clip": 0.3, "accumulate": parts, "optimizer.generator": "rmsprop"}
    objective = as_objective(WEIGHED, F.cross_entropy)
    learner = SingleLearner(model, config, objective, 4, shard)
    learner.train_mode(True)
    for i in range(6):
        batch = X[10 * i : 10 * i + 10]
        part = shard.part(len(batch))
        learner.step(Share((batch[part.rows],), part.examples, part.weight), 0.0, 1.0)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("parts", [1, 3])
def test_ranks_take_turns_together(parts: int) -> None:
    alone = by_learner(0, 1, 1)
    for found in (by_learner(0, 1, parts), *on_ranks(2, by_learner, parts)):
        assert found.keys() == alone.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, alone[name], rtol=1e-9, atol=1e-12)


def test_each_metric_of_a_part_has_its_own_weight() -> None:
    one = torch.tensor(1.0)
    found = joined({"a": {"loss": one, "size": one, "weight/size": 2 * one}, "b": {"loss": 3 * one, "weight": 4 * one}})
    assert {name: value.item() for name, value in found.items()} == {
        **{"a_loss": 1.0, "a_size": 1.0, "weight/a_size": 2.0},
        **{"b_loss": 3.0, "weight/b_loss": 4.0, "loss": 4.0},
    }


def small(config: dict[str, Any], width_ratio: float = 1.0) -> nn.Module:
    return GAN(int(32 * width_ratio))


SPACE: dict[str, Any] = {"lr": loguniform(1e-3, 1e-2), "lr.discriminator": loguniform(1e-3, 1e-2), "batch_size": 16}


def asking(objective: Any, space: Mapping[str, Any] = SPACE, **more: Any) -> Any:
    given: dict[str, Any] = {"metric": "val_generator_size", "num_samples": 4, "max_t": 4, "progress": False, **more}
    return tune(small, space, train_data=(X,), val_data=(X,), objective=objective, **given)


def doubled(model: Any, batch: Batch) -> Mapping[str, Tensor]:
    return {name: 2 * value for name, value in generator(model, batch).items()}


def test_tune_trains_a_gan(tmp_path: Any) -> None:
    result = asking(PARTS, storage_path=str(tmp_path), precision="bf16")
    assert math.isfinite(result.best_metric)
    assert result.best_trial is not None
    assert {"val_discriminator_loss", "train_generator_size"} <= set(result.trials[result.best_trial].history[-1])
    assert "for turn in objective:" in result.recipe()
    with pytest.raises(ValueError, match="objective"):
        asking({**PARTS, "generator": doubled}, storage_path=str(tmp_path), precision="bf16", name=result.path.name)


def test_tune_trains_parts_by_optimizers_of_their_own(tmp_path: Any) -> None:
    by = choice([{"optimizer.discriminator": choice(["adam", "rmsprop", own_sgd])}, {"weight_decay.generator": 0.1}])
    result = asking(PARTS, {**SPACE, "by": by}, storage_path=str(tmp_path), num_samples=8)
    assert math.isfinite(result.best_metric)
    assert {(trial.error, trial.unread) for trial in result.trials} == {(None, ())}
    if not callable(result.best_config.get("optimizer.discriminator")):
        assert "optimizers.append(optimizer)" in result.recipe()


def test_trials_in_which_the_same_parts_have_optimizers_are_one_group() -> None:
    own: list[dict[str, Any]] = [{}, {"lr.generator": 0.1}, {"optimizer.generator": "sgd"}, {"beta1.generator": 0.5}]
    kinds = find_kinds(problem(0.5), [Trial(k, {"lr": 0.1, **more}) for k, more in enumerate(own)], 0).value
    assert len(kinds) == 4
    assert kinds[0] == kinds[1] != kinds[2] == kinds[3]


def own_sgd(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=0.5)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (
            {"optimizer.critic": "sgd"},
            r"`optimizer\.critic` is 'sgd', .* the model are \['discriminator', 'gen",
        ),
        ({"optimizer.generator": "sgd", "beta1.generator": 0.5}, "of 'generator', sgd, does not read it"),
        ({"beta1.generator": uniform(0.5, 1.5)}, r"`space\['beta1.generator'\]` is .*, but must be in \[0, 1\)"),
        ({"optimizer": {"generator": "sgd"}}, "the key `optimizer.PART` gives"),
    ],
)
def test_optimizers_of_parts_that_cannot_be_are_refused(tmp_path: Any, more: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        asking(PARTS, {**SPACE, **more}, storage_path=str(tmp_path))


def nothing(model: Any, batch: Batch) -> Mapping[str, Tensor]:
    return {"loss": model.discriminator(batch[0]).mean()}


class Settled:
    def __call__(self, model: Any, batch: Batch) -> Mapping[str, Tensor]:
        return generator(model, batch)

    def optimizer_settings(self, model: nn.Module, config: Mapping[str, Any]) -> Any: ...


@pytest.mark.parametrize(
    ("objective", "more", "told"),
    [
        ({}, {}, "a dict of these by names of parts of the model"),
        ({"": generator}, {}, "a dict of these by names of parts of the model"),
        ({"generator": None}, {}, r"`objective\['generator'\]` is None"),
        (
            {**PARTS, "critic": generator},
            {},
            r"`objective` is 'critic', but must be .* such as \['discriminator', 'gen",
        ),
        ({**PARTS, "generator": lambda model, batch: 3.0}, {}, "`objective` returned a float, but must return a dict"),
        ({**PARTS, "generator": nothing}, {}, "the loss of 'generator' of a batch .* cannot be differentiated"),
        ({**PARTS, "generator": Settled()}, {}, "one without `optimizer_settings`"),
        (PARTS, {"race": RaceConfig(strategy="fsdp")}, "the parts of a model that ranks split cannot take turns"),
    ],
)
def test_objectives_that_cannot_take_turns_are_refused(tmp_path: Any, objective: Any, more: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        asking(objective, storage_path=str(tmp_path), **more)
