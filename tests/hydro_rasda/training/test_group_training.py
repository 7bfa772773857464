"""Fused surrogates against a plain loop over `torch.optim`, one model at a time."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fusion import FusedModel, FusionWarning, fuse, lr_factor
from fusion.structure.module_parts import duplicate, is_batched
from hydro_rasda import SweepConfig
from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import Group, Span, Task
from hydro_rasda.data import Share, make_batches
from hydro_rasda.problem.objective import OptimizerSettings, as_objective
from hydro_rasda.problem.problem import Problem
from hydro_rasda.problem.width_argument import Plans
from hydro_rasda.run.run_folder import Store
from hydro_rasda.training import fused_learner
from hydro_rasda.training.fused_learner import FusedLearner
from hydro_rasda.training.group_training import LiveGroup, train_group
from hydro_rasda.training.lr_and_decay_by_parameter import multipliers
from tests.hydro_rasda.models import Config, mlp, stumbles_in_some

pytestmark = pytest.mark.usefixtures("set_aside")  # each time memory runs out, garbage is collected

Pair = tuple[Tensor, Tensor]
EPOCHS = 3

CONFIGS: list[dict[str, Any]] = [
    {"optimizer": "sgd", "lr": 0.1},
    {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2, "schedule": "cosine"},
    {"optimizer": "sgd", "lr": 0.1, "schedule": "wsd", "decay_start": 0.4, "floor": 0.1, "warmup": 0.2},
    {"optimizer": "sgd", "lr": 0.2, "momentum": 0.8, "nesterov": True, "grad_clip": 0.05},
    {"optimizer": "adamw", "lr": 3e-3, "weight_decay": 0.1, "schedule": "step", "step_size": 1, "gamma": 0.5},
    {"optimizer": "adamw", "lr": 1e-2, "beta1": 0.8, "beta2": 0.95, "warmup_epochs": 1.5, "grad_clip": 0.5},
    {"optimizer": "adam", "lr": 1e-2, "eps": 1e-4, "weight_decay": 1e-3, "schedule": "exponential", "gamma": 0.7},
]
TRIALS = {n: Trial(n, {**config, "batch_size": 32}) for n, config in enumerate(CONFIGS)}


def torch_optimizer(module: nn.Module, config: Mapping[str, Any], ratio: float) -> torch.optim.Optimizer:
    """Each parameter in a group of its own, with muP's learning rate and weight decay."""
    kind = config["optimizer"]
    decay = config.get("weight_decay", 0.01 if kind == "adamw" else 0.0)
    factors = multipliers(OptimizerSettings(config), module, ratio)
    groups = [
        {
            "params": [p],
            "lr": config["lr"] * factors["lr_multipliers"][kind][name],
            "weight_decay": decay * factors["weight_decay_multipliers"][kind][name],
        }
        for name, p in module.named_parameters()
    ]
    if kind == "sgd":
        return torch.optim.SGD(groups, momentum=config.get("momentum", 0), nesterov=config.get("nesterov", False))
    adam: type[torch.optim.Adam] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[kind]
    return adam(groups, betas=(config.get("beta1", 0.9), config.get("beta2", 0.999)), eps=config.get("eps", 1e-8))


def alone(problem: Problem, trial: Trial, epochs: int) -> tuple[nn.Module, list[float]]:
    """One surrogate, trained by the book: its weights, and the mean training loss of each epoch."""
    module, config = problem.surrogate(trial), trial.config
    optimizer = torch_optimizer(module, config, problem.settings.sweep.surrogate)
    base = [group["lr"] for group in optimizer.param_groups]
    losses = []
    for epoch in range(epochs):
        batches = list(problem.train_data.epoch(trial.batch_size, epoch))
        total = 0.0
        for i, (x, y) in enumerate(batches):
            factor = lr_factor(config, epoch + i / len(batches), problem.settings.max_t, len(batches))
            for group, lr in zip(optimizer.param_groups, base):
                group["lr"] = lr * factor
            loss = nn.functional.cross_entropy(module(x), y)
            optimizer.zero_grad()
            loss.backward()
            if "grad_clip" in config:
                nn.utils.clip_grad_norm_(module.parameters(), config["grad_clip"])
            optimizer.step()
            total += loss.item() * len(x)
        losses.append(total / sum(len(x) for x, _ in batches))
    return module, losses


def task(members: tuple[int, ...], start: int, stop: int, sources: tuple[str, ...] = ()) -> Task:
    return Task(f"to-{stop}/{members[0]}", (Group("kind", members, fused=True),), sources, Span(start, stop))


def no_sources(key: str) -> Mapping[str, Any]:
    raise KeyError(key)


def losses_of(history: Mapping[int, Any], number: int, name: str = "train_loss") -> list[float]:
    return [metrics[name] for _, metrics in history[number]]


def weights(problem: Problem, checkpoint: list[dict[str, Any]], number: int) -> dict[str, Tensor]:
    (part,) = [part for part in checkpoint if number in part["members"]]
    modules = [problem.surrogate(TRIALS[n]) for n in part["members"]]
    learner = FusedLearner(modules, [TRIALS[n].config for n in part["members"]], problem)
    learner.load(part["state"])
    return dict(learner.fused.unfuse(part["members"].index(number)).named_parameters())


def assert_close(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=2e-4, atol=2e-5, msg=lambda m: f"{name}: {m}")  # noqa: B023


def test_fused_equals_one_by_one(problem: Problem) -> None:
    outcome = train_group(problem, TRIALS, task(tuple(TRIALS), 0, EPOCHS), no_sources)
    assert outcome.failures == {}
    for number, trial in TRIALS.items():
        module, losses = alone(problem, trial, EPOCHS)
        assert losses_of(outcome.history, number) == pytest.approx(losses, rel=1e-4)
        assert_close(weights(problem, outcome.checkpoint, number), dict(module.named_parameters()))
        with torch.no_grad():
            metrics = problem.objective(module, next(problem.val_data.in_order(1000)))
        last = outcome.history[number][-1]
        assert last[0] == EPOCHS
        assert last[1]["val_loss"] == pytest.approx(metrics["loss"].item(), rel=1e-4)
        assert last[1]["val_accuracy"] == pytest.approx(metrics["accuracy"].item())


def test_members_differ_and_learn(problem: Problem) -> None:
    outcome = train_group(problem, TRIALS, task(tuple(TRIALS), 0, EPOCHS), no_sources)
    curves = [losses_of(outcome.history, n) for n in TRIALS]
    assert len({tuple(curve) for curve in curves}) == len(TRIALS)
    assert sum(curve[-1] < curve[0] for curve in curves) == len(TRIALS)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "run", {}, "auto") as store:
        yield store


def test_regrouping_from_checkpoint_files_equals_unbroken_training(problem: Problem, store: Store) -> None:
    unbroken = train_group(problem, TRIALS, task((0, 1, 2, 3, 4, 5), 0, EPOCHS), no_sources)

    def run(one: Task) -> Any:
        outcome = train_group(problem, TRIALS, one, store.load)
        store.save(one.key, {"parts": outcome.checkpoint})
        return outcome

    first = [task((0, 3, 4), 0, 1), task((1, 2, 5), 0, 1)]
    for one in first:
        run(one)
    regrouped = task((1, 0, 4, 3), 1, 2, (first[0].key, first[1].key))  # trials 2 and 5 are halved away
    run(regrouped)
    last = run(task((4, 1), 2, EPOCHS, (regrouped.key,)))
    for number in (1, 4):
        assert losses_of(last.history, number) == pytest.approx(losses_of(unbroken.history, number)[2:], rel=1e-4)
        assert_close(
            weights(problem, last.checkpoint, number),
            weights(problem, unbroken.checkpoint, number),
        )


def test_trials_that_were_halved_away_are_not_built_or_fused_again(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = train_group(problem, TRIALS, task((0, 3, 4), 0, 1), no_sources)
    built: list[Config] = []

    def model_fn(config: Config, width_ratio: float) -> nn.Module:
        built.append(config)
        return mlp(config, width_ratio)

    asked = replace(problem, model_fn=model_fn)
    widths: list[int] = []

    def counted(modules: Sequence[nn.Module]) -> FusedModel:
        widths.append(len(modules))
        return fuse(modules)

    monkeypatch.setattr(fused_learner, "fuse", counted)
    train_group(asked, TRIALS, task((4,), 1, 2, ("first",)), lambda key: {"parts": first.checkpoint})
    assert widths == [1]
    assert TRIALS[4].config in built
    assert TRIALS[0].config not in built
    assert TRIALS[3].config not in built


class Follows(nn.Module):
    """A second model is the mean of the first one's past, as in BYOL."""

    def __init__(self, online: nn.Module) -> None:
        super().__init__()
        self.online, self.slow = online, duplicate(online).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.online.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        out: Tensor = self.online(x) + 0.5 * self.slow(x)
        return out


def test_what_forward_writes_to_is_looked_for_once(problem: Problem) -> None:
    """A group that goes on calls the objective for all members at once alone, and its dry run leaves no trace."""
    separately: list[bool] = []

    def objective(model: nn.Module, batch: Any) -> Any:
        separately.append(not is_batched(next(model.parameters())))
        return problem.objective(model, batch)

    asked = replace(
        problem.with_settings(sweep=SweepConfig(surrogate=1)),
        model_fn=lambda config: Follows(mlp(config)),
        objective=objective,
    )
    members = (0, 1, 2)
    unbroken = train_group(asked, TRIALS, task(members, 0, EPOCHS), no_sources)
    first = train_group(asked, TRIALS, task(members, 0, 1), no_sources)
    assert any(separately)
    separately.clear()
    last = train_group(asked, TRIALS, task(members, 1, EPOCHS, ("first",)), lambda key: {"parts": first.checkpoint})
    assert separately
    assert not any(separately)
    for number in members:
        assert losses_of(last.history, number) == losses_of(unbroken.history, number)[1:]


def test_initial_weights_do_not_depend_on_company(problem: Problem) -> None:
    def initial(members: tuple[int, ...]) -> dict[str, Tensor]:
        modules = [problem.surrogate(TRIALS[n]) for n in members]
        learner = FusedLearner(modules, [TRIALS[n].config for n in members], problem)
        return dict(learner.fused.unfuse(members.index(3)).named_parameters())

    reference = initial((3,))
    for members in ((0, 3), (5, 3, 1), tuple(TRIALS)):
        for name, value in initial(members).items():
            assert torch.equal(value, reference[name])


def test_a_member_that_diverges_leaves_the_others_alone(problem: Problem) -> None:
    wild = {**TRIALS, 2: Trial(2, {**TRIALS[2].config, "lr": 1e30, "grad_clip": None})}
    outcome = train_group(problem, wild, task((0, 1, 2, 3, 4), 0, EPOCHS), no_sources)
    tame = train_group(problem, TRIALS, task((0, 1, 2, 3, 4), 0, EPOCHS), no_sources)
    assert not torch.isfinite(torch.tensor(losses_of(outcome.history, 2))).any()
    for number in (0, 1, 3, 4):
        assert losses_of(outcome.history, number) == losses_of(tame.history, number)
        assert losses_of(outcome.history, number, "val_loss") == losses_of(tame.history, number, "val_loss")


def test_training_stops_where_all_members_have_diverged(problem: Problem) -> None:
    wild = {n: Trial(n, {"optimizer": "sgd", "lr": 1e30, "batch_size": 32}) for n in (0, 1)}
    outcome = train_group(problem, wild, task((0, 1), 0, EPOCHS), no_sources)
    assert [len(history) for history in outcome.history.values()] == [1, 1]


def test_only_the_member_that_raises_fails(problem: Problem) -> None:
    stumbling = replace(problem, model_fn=stumbles_in_some)
    trials = {n: Trial(n, {**TRIALS[n].config, "stumbles": float(n == 1)}) for n in (0, 1, 3)}
    outcome = train_group(stumbling, trials, task((0, 1, 3), 0, 1), no_sources)
    assert set(outcome.failures) == {1}
    assert "this forward pass cannot be done" in outcome.failures[1]
    assert [len(outcome.history[n]) for n in (0, 1, 3)] == [1, 0, 1]
    assert [part["members"] for part in outcome.checkpoint] == [[0], [3]]


class Tallying(nn.Module):
    """Writes into a tensor that is no buffer."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.seen = body, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        self.seen.add_(y.detach().abs().mean())
        return y / (1 + self.seen)


class Seeing(nn.Module):
    """Takes a number for a sign of being a plain number, which it is not in a fused model."""

    def __init__(self, body: nn.Module, scale: float) -> None:
        super().__init__()
        self.body, self.scale = body, scale

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y * (self.scale if type(self.scale) is float else 1.0)


def check_as_alone(asked: Problem, fused: bool, members: list[list[int]], warning: str) -> None:
    """Check that two trials train in these groups, as each does alone, from the beginning and from a checkpoint."""
    kept: dict[str, Any] = {}
    for start, sources in ((0, ()), (1, ("to-1/0",))):
        one = replace(task((0, 1), start, start + 1, sources), groups=(Group("kind", (0, 1), fused),))
        with pytest.warns(FusionWarning, match=warning) if warning else nullcontext():
            together = train_group(asked, TRIALS, one, kept.__getitem__)
        assert [part["members"] for part in together.checkpoint] == members
        for n in (0, 1):
            by_itself = replace(task((n,), start, start + 1, sources), groups=(Group("kind", (n,), False),))
            alone = train_group(asked, TRIALS, by_itself, kept.__getitem__)
            assert together.history[n] == alone.history[n]
        kept[one.key] = {"parts": together.checkpoint}


def test_members_that_would_compute_something_else_train_by_themselves(problem: Problem) -> None:
    asked = replace(problem, model_fn=lambda config, width_ratio: Seeing(mlp(config, width_ratio), 2 + config["lr"]))
    check_as_alone(asked, True, [[0], [1]], "2 trials train each by itself: of 2 members, fused and alone differ")


@pytest.mark.parametrize("fused", [True, False])
def test_members_that_write_into_a_tensor_that_is_no_buffer_train_one_after_another(
    problem: Problem, fused: bool
) -> None:
    asked = replace(problem, model_fn=lambda config, width_ratio: Tallying(mlp(config, width_ratio)))
    check_as_alone(asked, fused, [[0, 1]], "members train one after another" * fused)


def test_members_of_different_structures_train_by_themselves(problem: Problem) -> None:
    """They are in one group where a model function that builds at random was believed not to."""
    odd = {n: Trial(n, {**TRIALS[n].config, "activation": "tanh" if n == 1 else "relu"}) for n in (0, 1, 3)}
    together = train_group(problem, odd, task((0, 1, 3), 0, 1), no_sources)
    assert [part["members"] for part in together.checkpoint] == [[0], [1], [3]]
    for n in odd:
        assert together.history[n] == train_group(problem, odd, task((n,), 0, 1), no_sources).history[n]


def test_out_of_memory_halves_the_group_and_loses_nothing(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for two members: six end as twos and ones, with what such groups get that train so from the start."""
    step, failed, held = FusedLearner.step, list[weakref.ref[FusedLearner]](), list[FusedLearner | None]()

    def step_of_two(learner: FusedLearner, share: Share, epoch: float, steps: float) -> Mapping[str, Tensor]:
        held.extend(other for each in failed if (other := each()) is not learner)
        if learner.fused.K > 2 and epoch > 1:
            learner.itself = learner  # type: ignore[attr-defined]
            failed.append(weakref.ref(learner))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(learner, share, epoch, steps)

    monkeypatch.setattr(FusedLearner, "step", step_of_two)
    outcome = train_group(problem, TRIALS, task(tuple(range(6)), 0, 2), no_sources)
    assert not outcome.failures
    assert set(held) == {None}, "a group that failed is freed before the next one trains"
    assert [part["members"] for part in outcome.checkpoint] == [[0, 1], [2], [3, 4], [5]]
    pair = train_group(problem, TRIALS, task((0, 1), 0, 2), no_sources)
    assert {n: outcome.history[n] for n in (0, 1)} == pair.history


class Greedy(nn.Module):
    """Runs out of memory, by torch's own error, above so many examples at once."""

    def __init__(self, body: nn.Module, most: int) -> None:
        super().__init__()
        self.body, self.most = body, most

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most:
            torch.empty(2**60, dtype=torch.uint8)
        y: Tensor = self.body(x)
        return y


def greedy(problem: Problem, most: int) -> Problem:
    model_fn = lambda config, width_ratio: Greedy(mlp(config, width_ratio), most)  # noqa: E731
    return replace(problem, model_fn=model_fn, plans=Plans())


def test_a_single_trial_that_does_not_fit_trains_in_micro_batches(problem: Problem) -> None:
    """Memory for 40 examples: a step of 32 fits, validation on 128 does in 4 parts, which then train as the whole."""
    asked = greedy(problem, 40)
    with pytest.warns(UserWarning, match="does not fit memory with whole batches of 32: it trains .* in micro-batches"):
        outcome = train_group(asked, TRIALS, task((2, 4), 0, 2), no_sources)
    assert outcome.failures == {}
    assert [part["members"] for part in outcome.checkpoint] == [[2], [4]]
    whole = train_group(problem, TRIALS, task((2, 4), 0, 2), no_sources)
    for number in (2, 4):
        (part,) = [part for part in outcome.checkpoint if number in part["members"]]
        (other,) = [part for part in whole.checkpoint if number in part["members"]]
        assert losses_of(outcome.history, number) == pytest.approx(losses_of(whole.history, number), rel=1e-4)
        for name in ("val_loss", "val_accuracy"):
            theirs = losses_of(whole.history, number, name)
            assert losses_of(outcome.history, number, name) == pytest.approx(theirs, rel=1e-4)
        trained = part["state"]["model"]
        for name, tensor in other["state"]["model"].items():
            own = trained[name.replace("own.", "own.body.")][0]
            torch.testing.assert_close(own, tensor[other["members"].index(number)], rtol=2e-4, atol=2e-5)


def test_a_trial_that_trains_in_two_micro_batches_says_so(problem: Problem) -> None:
    """Memory for 64 examples: validation on 128 fits in 2 parts."""
    with pytest.warns(UserWarning, match="does not fit memory with whole batches of 32: it trains .* in micro-batches"):
        outcome = train_group(greedy(problem, 64), TRIALS, task((2,), 0, 1), no_sources)
    assert outcome.failures == {}


def test_a_single_trial_that_does_not_fit_with_one_example_fails(problem: Problem) -> None:
    with pytest.warns(UserWarning, match="in micro-batches"):
        outcome = train_group(greedy(problem, 0), TRIALS, task((0, 1), 0, 1), no_sources)
    assert set(outcome.failures) == {0, 1}
    assert "can't allocate memory" in outcome.failures[0]


def test_a_batch_whose_examples_cannot_be_told_apart_is_not_split(problem: Problem) -> None:
    """Tensors of 8 and of 3 rows: a batch of graphs, say."""
    tried: list[int] = []

    def batches(batch_size: int) -> list[Any]:
        return [(torch.ones(8, 64), torch.ones(3))]

    def objective(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        tried.append(len(batch[0]))
        return {"loss": model(batch[0]).mean() * batch[1].mean()}

    data = make_batches(batches, "train_data", problem.device, 0)
    outcome = train_group(
        replace(greedy(problem, 4), train_data=data, val_data=data, objective=objective),
        TRIALS,
        task((0,), 0, 1),
        no_sources,
    )
    assert "can't allocate memory" in outcome.failures[0]
    assert tried == [8]


def test_it_stops_when_asked_after_the_first_epoch(problem: Problem) -> None:
    told: list[int] = []
    outcome = train_group(
        problem, TRIALS, task((0, 1), 0, EPOCHS), no_sources, lambda: True, lambda epoch, metrics: told.append(epoch)
    )
    assert told == [1]
    assert [epoch for epoch, _ in outcome.history[0]] == [1]


def test_members_learn_from_batches_in_parts(problem: Problem) -> None:
    config = {"lr": 0.1, "optimizer": "sgd", "batch_size": 48}
    whole = {n: Trial(n, {**config, "lr": 0.1 / (n + 1)}) for n in range(2)}
    parts = {n: Trial(n, {**trial.config, "accumulate": 5}) for n, trial in whole.items()}
    expected, found = (train_group(problem, of, task((0, 1), 0, 2), no_sources).history for of in (whole, parts))
    for number in whole:
        for (_, a), (_, b) in zip(expected[number], found[number], strict=True):
            assert a == pytest.approx(b, rel=1e-4)


def smoothed(output: Tensor, target: Tensor, config: Mapping[str, Any]) -> Tensor:
    """A float that an operator insists on as a number, one in arithmetic, and a word to branch on."""
    loss = nn.functional.cross_entropy(output, target, label_smoothing=config["smoothing"])
    penalty = output.square().mean() if config["penalty"] == "square" else output.abs().mean()
    total: Tensor = loss + config["scale"] * penalty
    return total


def test_members_read_their_own_configuration(problem: Problem) -> None:
    told = replace(problem, objective=as_objective(None, smoothed))
    values = [(0.0, 0.1), (0.2, 0.1), (0.1, 0.5)]
    trials = {
        n: Trial(n, {"lr": 0.1, "batch_size": 32, "smoothing": s, "scale": w, "penalty": "square"})
        for n, (s, w) in enumerate(values)
    }
    together = train_group(told, trials, task((0, 1, 2), 0, 2), no_sources)
    assert not together.failures
    for number in trials:
        by_itself = train_group(told, trials, task((number,), 0, 2), no_sources)
        for (_, a), (_, b) in zip(together.history[number], by_itself.history[number], strict=True):
            assert a == pytest.approx(b, rel=1e-4)
    losses = [history[0][1]["train_loss"] for history in together.history.values()]
    assert len(set(losses)) == 3


def convolutional(config: Config, width_ratio: float = 1.0) -> nn.Module:
    """BatchNorm, and dropout of its own."""
    width = int(16 * width_ratio)
    layers = nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(config["dropout"])
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *layers, nn.Flatten(), nn.Linear(64 * width, 10))


def counting(config: Config, width_ratio: float = 1.0) -> nn.Module:
    """Counts its forward passes, and trains less with each."""

    class Counts(nn.Sequential):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            y: Tensor = super().forward(x)
            return y / self.calls

    return Counts(mlp(config, width_ratio))


POPULATION = {
    n: {**config, "batch_size": 32, "dropout": 0.05 * n, "smoothing": 0.1 / (n + 1), "scale": 0.1, "penalty": "square"}
    for n, config in enumerate([*CONFIGS[:6], {"optimizer": "rmsprop", "lr": 1e-3}])
}
INTERVALS: list[tuple[tuple[int, ...], dict[int, int], dict[str, float]]] = [
    ((0, 1, 2, 3, 4, 5, 6), {0: 2, 5: 4}, {"lr": 0.01, "dropout": 0.3}),
    ((0, 1, 2, 3, 4, 5, 6), {}, {}),
    ((1, 0, 4, 6, 5), {0: 5, 4: 6}, {"lr": 2e-3}),
    ((6,), {}, {}),
]
"""Of each interval after the first: who trains on, who does as a copy of whom, and the values that copies change."""


@pytest.mark.parametrize("model_fn", [mlp, pytest.param(convolutional, marks=pytest.mark.slow), counting])
@pytest.mark.parametrize("told", [False, True])
def test_copies_in_place_equal_a_rebuild_from_checkpoints_to_the_last_bit(
    problem: Problem, monkeypatch: pytest.MonkeyPatch, model_fn: Any, told: bool
) -> None:
    """Weights, random numbers, schedules, all kinds of optimizers; `counting` cannot go on in place."""
    objective = as_objective(None, smoothed) if told else problem.objective
    asked = replace(problem, model_fn=model_fn, plans=Plans(), objective=objective)
    built: list[int] = []

    def counted(modules: Sequence[nn.Module]) -> FusedModel:
        built.append(len(modules))
        return fuse(modules)

    monkeypatch.setattr(fused_learner, "fuse", counted)

    def trained(live: LiveGroup | None) -> list[Any]:
        trials = {n: Trial(n, config) for n, config in POPULATION.items()}
        one, found = task(tuple(POPULATION), 0, 1), []
        kept: dict[str, Any] = {}
        for at, (members, copies, changes) in enumerate([*INTERVALS, ((), {}, {})], 1):
            found.append(train_group(asked, trials, one, kept.__getitem__, live=live))
            kept[one.key] = copy.deepcopy({"parts": found[-1].checkpoint})
            sources = {number: trials[source].config for number, source in copies.items()}
            trials |= {number: Trial(number, {**config, **changes}) for number, config in sources.items()}
            one = replace(task(members or (0,), at, at + 1, (one.key,)), copies=copies)
        return [(outcome.history, kept) for outcome in found]

    rebuilt, count = trained(None), len(built)
    assert count == len(INTERVALS) + 1
    in_place = trained(LiveGroup())
    assert len(built) - count == (count if model_fn is counting else 1)
    assert [history for history, _ in in_place] == [history for history, _ in rebuilt]
    for found, expected in zip(*(tree_leaves(outcomes[-1][1]) for outcomes in (in_place, rebuilt)), strict=True):
        assert torch.equal(found, expected) if isinstance(found, Tensor) else found == expected


class Scaled(nn.Sequential):
    def __init__(self, scale: float, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.scales = (scale,)  # in a tuple, a float counts as structure

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y * self.scales[0]


def test_a_copy_of_another_structure_is_built_anew(problem: Problem) -> None:
    asked = replace(problem, model_fn=lambda config, width_ratio=1.0: Scaled(config["scale"], mlp(config, width_ratio)))

    def history(live: LiveGroup | None) -> Any:
        trials = {n: Trial(n, {**POPULATION[0], "scale": 0.1}) for n in (0, 1)}
        first, kept = task((0, 1), 0, 1), dict[str, Any]()
        kept[first.key] = {"parts": train_group(asked, trials, first, kept.__getitem__, live=live).checkpoint}
        trials[1] = Trial(1, {**trials[0].config, "scale": 3.0})
        second = replace(task((1,), 1, 2, (first.key,)), copies={1: 0})
        return train_group(asked, trials, second, copy.deepcopy(kept).__getitem__, live=live).history

    assert history(LiveGroup()) == history(None)
