from __future__ import annotations

import ast
import math
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from fusion import lr_factor
from fusion.optim.schedule_free import ScheduleFreeAdamW
from hydro_rasda import RaceConfig, SweepConfig, TuneResult, choice, load, secret
from hydro_rasda.backends.local import LocalBackend
from hydro_rasda.history.lines import Unit
from hydro_rasda.problem.objective import OptimizerSettings
from hydro_rasda.results.recipe import _check_own_weights, recipe_of
from hydro_rasda.results.recipe import given as arguments_of
from tests.hydro_rasda.models import Config, mlp

pytestmark = pytest.mark.usefixtures("one_process")

Pair = tuple[Tensor, Tensor]
Quick = Callable[..., TuneResult]

ADAMW = {"lr": choice([0.003, 0.01]), "optimizer": "adamw", "batch_size": 32}
SGD = {"lr": choice([0.03, 0.1]), "optimizer": "sgd", "batch_size": 32}


def again(text: str, model_fn: Any, data: Any, loss: Any = F.cross_entropy, **given: Any) -> nn.Module:
    """The model that the text of a recipe trains, in a namespace of its own."""
    made: dict[str, Any] = {}
    exec(compile(text, "recipe", "exec", dont_inherit=True), made)
    torch.manual_seed(5)  # whatever was drawn before
    random.seed(5)
    model: nn.Module = made["train"](model_fn, data, loss, device="cpu", **given)
    return model


def assert_same(model: nn.Module, result: TuneResult, rtol: float = 0.0, trial: int | None = None) -> None:
    """Check that a model has the weights that a run handed back: by default to the last bit."""
    assert not model.training
    theirs = result.best_model(trial).state_dict()
    torch.testing.assert_close(model.state_dict(), theirs, rtol=rtol, atol=rtol / 10)


def with_batch_norm(config: Config, width_ratio: float = 1.0) -> nn.Module:
    width = int(32 * width_ratio)
    model = nn.Sequential(nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 10))
    model.register_buffer("mask", torch.full((3,), -torch.inf))  # of which there is no average
    return model


class Configured(nn.Module):
    """A model that reads what the library does not, and whose parts have names."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, width), nn.Linear(width, 10, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(x).relu())
        return y


def in_parts(config: Config, width_ratio: float) -> nn.Module:
    return Configured(int(32 * width_ratio), config["shape"]["bias"])


class Deeper(Configured):
    def __init__(self, width: int) -> None:
        super().__init__(width, True)
        self.middle = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.middle(self.body(x).relu()))
        return y


def deeper(config: Config, width_ratio: float = 1.0) -> nn.Module:
    return Deeper(int(32 * width_ratio))


def own_optimizer(params: Any, lr: float, amsgrad: bool = False) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=lr, amsgrad=amsgrad)


def decaying(params: Any, lr: float, weight_decay: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(params, lr=lr, weight_decay=weight_decay)


def own_schedule(step: int, steps: int) -> float:
    return 1 - 0.9 * step / steps


SPACES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "momentum and cosine": (
        mlp,
        {**SGD, "momentum": 0.9, "nesterov": True, "schedule": "cosine", "weight_decay": 0.001},
        {},
    ),
    "warm-up, linear, clipping, dropout": (
        mlp,
        {
            **ADAMW,
            "schedule": "linear",
            "warmup_epochs": 1.5,
            "grad_clip": 0.5,
            "dropout": 0.2,
            "floor": 0.1,
        },
        {"race": RaceConfig(ema=0.1)},
    ),
    "last weights": (
        mlp,
        {**ADAMW, "optimizer": "adam", "schedule": "step", "step_size": 2},
        {"race": RaceConfig(keep="last")},
    ),
    "batch statistics in parts": (
        with_batch_norm,
        # The last of 320 examples are a batch of 5, of which no part may have a single one.
        {**SGD, "batch_size": 35, "accumulate": 3, "schedule": "exponential", "gamma": 0.5},
        {},
    ),
    "rates of parts": (
        in_parts,
        {**ADAMW, "lr.head": 0.001, "lr.head.bias": 0.02, "shape": {"bias": True}, "optimizer": "rmsprop"},
        {"race": RaceConfig(ema=0)},
    ),
    "optimizers of parts": (
        deeper,
        {**ADAMW, "lr.head.bias": 0.02, "optimizer.head": "sgd", "momentum.head": 0.9, "lr.head": 0.1}
        | {"beta1.middle": 0.5, "independent_weight_decay.middle": True, "weight_decay.middle": 1e-4}
        | {"optimizer.middle.0": "adagrad", "schedule": "cosine"},
        {},
    ),
    "schedule-free part": (
        deeper,
        {**ADAMW, "optimizer.head": "schedule_free_sgd", "lr.head": 0.3, "warmup_epochs": 1.0},
        {},
    ),
    "muon and prodigy of parts": (
        deeper,
        {**ADAMW, "optimizer.middle": "muon", "lr.adamw": 0.003, "optimizer.head": "prodigy", "lr.head": 1.0}
        | {"d0.head": 1e-3},
        {},
    ),
    "muon": (mlp, {**ADAMW, "optimizer": "muon", "lr.adamw": 0.003, "schedule": "cosine", "beta2": 0.95}, {}),
    "rates by role": (mlp, {**ADAMW, "lr.embedding": 0.02, "lr.head": 0.001, "lr.0.bias": 0.004}, {}),
    "lion": (mlp, {**ADAMW, "optimizer": "lion", "lr": choice([1e-3, 3e-4]), "beta2": 0.95, "weight_decay": 0.1}, {}),
    "adafactor": (mlp, {**ADAMW, "optimizer": "adafactor", "lr": choice([0.05, 0.02]), "beta2_decay": -0.7}, {}),
    "prodigy": (
        in_parts,
        {
            **ADAMW,
            "lr": choice([1.0, 0.5]),
            "optimizer": "prodigy",
            "d0": 1e-3,
            "lr.head": 0.3,
            "safeguard_warmup": True,
        }
        | {"shape": {"bias": True}},
        {},
    ),
    "schedule-free": (mlp, {**SGD, "optimizer": "schedule_free_sgd", "momentum": 0.8, "warmup": 0.1}, {}),
    "schedule-free, last": (
        in_parts,
        {**ADAMW, "optimizer": "schedule_free_adamw", "lr.head": 0.02, "weight_decay": 0.1, "shape": {"bias": True}},
        {"race": RaceConfig(keep="last"), "sweep": SweepConfig(surrogate=1)},
    ),
    "independent decay": (mlp, {**ADAMW, "independent_weight_decay": True, "weight_decay": 1e-4}, {}),
    "shares of the training": (
        mlp,
        {**SGD, "schedule": "wsd", "decay_start": choice([0.3, 0.6]), "floor": 0.05, "warmup": 0.2},
        {},
    ),
    "bfloat16": (mlp, {**ADAMW, "schedule": "one_cycle"}, {"precision": "bf16"}),
    "float16": (mlp, {**SGD, "momentum": 0.9, "grad_clip": 1.0}, {"precision": "fp16"}),
}


@pytest.mark.parametrize("name", SPACES)
def test_it_trains_what_was_handed_back(name: str, quick: Quick, digits: tuple[Pair, Pair]) -> None:
    """To the last bit, on one thread: order, dropout, rates, averages and the epoch at which it ends; loaded, too.

    Parts and scaled losses are added up in another order than the run's, and a sweep at full width trains fused models.
    """
    model_fn, space, settings = SPACES[name]
    result = quick(model_fn=model_fn, space=space, num_samples=2, **settings)
    text = result.recipe()
    assert "rasda" not in text
    assert "fusion" not in text.replace("confusion", "")
    made = {node.name for node in ast.parse(text).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    unused = {name for name in made - {"train"} if len(re.findall(rf"\b{name}\b", text)) == 1}
    assert unused == set()
    rtol = 1e-4 if name in ("batch statistics in parts", "float16", "schedule-free, last") else 0.0
    assert_same(again(text, model_fn, digits[0]), result, rtol)
    if name == "rates by role":
        with pytest.raises(ValueError, match="its model alone tells which parameters have learning rates by role"):
            load(result.path).recipe()
    elif model_fn is not in_parts:  # of which a loaded run does not know that it takes a second argument
        assert_same(again(load(result.path).recipe(), model_fn, digits[0]), result, rtol)


def of_body(model: Any, batch: Pair, config: Config) -> dict[str, Tensor]:
    x, y = batch
    return {"loss": F.cross_entropy(model(x), y, label_smoothing=config["smoothing"])}


def of_head(model: Any, batch: Pair) -> dict[str, Tensor]:
    x, y = batch
    return {"loss": F.multi_margin_loss(model(x + 0.1 * torch.randn_like(x)), y)}


@pytest.mark.parametrize(
    ("more", "arguments"),
    [
        ({"optimizer.head": "rmsprop", "lr.head": 0.003, "schedule": "linear", "grad_clip": 0.5, "accumulate": 2}, {}),
        ({"optimizer.head": own_optimizer, "amsgrad": False}, {}),
        ({"optimizer.head": "sgd", "lr.head": 0.1, "grad_clip": 0.5}, {"precision": "fp16"}),
    ],
)
def test_parts_take_turns(more: Config, arguments: Any, quick: Quick, digits: tuple[Pair, Pair]) -> None:
    objective = {"head": of_head, "body": of_body}
    given = {"optimizer_head": own_optimizer} if callable(more.get("optimizer.head")) else {}
    result = quick(model_fn=deeper, space={**ADAMW, "smoothing": 0.1, **more}, objective=objective, **arguments)
    rtol = 1e-4 if arguments else 0.0
    assert_same(again(result.recipe(), deeper, digits[0], objective, **given), result, rtol)
    if given:
        with pytest.raises(ValueError, match=r"`optimizer\.head` is a function, of"):
            load(result.path).recipe()
    else:
        assert_same(again(load(result.path).recipe(), deeper, digits[0], objective), result, rtol)


def test_the_winners_schedule_is_had_as_torchs(quick: Quick) -> None:
    space = {**SGD, "schedule": "linear", "decay_start": choice([0.25, 0.5]), "floor": 0.1, "warmup": 0.1}
    result = quick(space=space, num_samples=2)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=result.best_config["lr"])
    for epochs in (None, 8):
        scheduler = result.as_lambda_lr(optimizer, steps_per_epoch=3, epochs=epochs)
        rates = []
        for _ in range(3 * (epochs or 4)):
            rates += scheduler.get_last_lr()
            optimizer.step()
            scheduler.step()
        found = [
            result.best_config["lr"] * lr_factor(result.best_config, i / 3, epochs or 4, 3) for i in range(len(rates))
        ]
        assert rates == pytest.approx(found)
        assert rates[-1] < rates[len(rates) // 4]


def test_it_ends_after_the_winning_epoch_and_another_trial_can_be_had(quick: Quick, digits: tuple[Pair, Pair]) -> None:
    """Few examples are overfitted: the schedule is that of all epochs, and the weights of an early one count."""
    few = tuple(t[:80] for t in digits[0])
    space = {"lr": choice([0.1, 0.2]), "optimizer": "adamw", "batch_size": 16, "schedule": "cosine"}
    result = quick(space=space, train_data=few, num_samples=4, max_t=9, full_trainings=4)
    kept = {n: trial.kept_epoch for n, trial in enumerate(result.trials) if trial.epochs}
    assert len(kept) == 2
    assert kept[result.best_trial] < 9
    for number, epoch in kept.items():
        text = result.recipe(number)
        assert f"EPOCHS = {epoch}  #" in text
        assert "MAX_T = 9  #" in text
        model = again(text, mlp, few)
        assert_same(model, result, trial=number)
        loss = F.cross_entropy(model(digits[1][0]), digits[1][1]).item()
        assert loss == pytest.approx(result.trials[number].metric, rel=1e-5)


class Shaken(Dataset[dict[str, Tensor]]):
    """Digits with noise, drawn from each of the global generators."""

    def __init__(self, pair: Pair) -> None:
        self.x, self.y = pair

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        noise = torch.rand(64) + random.random() + float(np.random.rand())
        return {"x": self.x[row] + 0.1 * noise, "y": self.y[row]}


def smoothed(model: nn.Module, batch: Any, config: Any) -> dict[str, Tensor]:
    """An objective of one's own, which reads the configuration."""
    x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
    return {"loss": F.cross_entropy(model(x), y, label_smoothing=config["smoothing"])}


class Endless(IterableDataset[Any]):
    """A stream of shuffled digits, which does not say how many there are."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair

    def __iter__(self) -> Iterator[Any]:
        x, y = self.pair
        return iter([(x[row], y[row]) for row in torch.randperm(len(y)).tolist()])


@pytest.mark.parametrize("form", ["dataset", "loader", "stream"])
def test_other_forms_of_data(form: str, quick: Quick, digits: tuple[Pair, Pair]) -> None:
    """Examples come in the run's order, and draw the run's random numbers, as the model does."""
    pairs: dict[str, Any] = {
        "dataset": Shaken(digits[0]),
        "loader": lambda size: DataLoader(TensorDataset(*digits[0]), size, shuffle=True),
        "stream": lambda size: DataLoader(Endless(digits[0]), size),
    }
    space = {**ADAMW, "schedule": "cosine", "warmup_epochs": 1, "smoothing": choice([0.0, 0.1]), "dropout": 0.2}
    few = {"num_samples": 2, "max_t": 3}
    result = quick(space=space, train_data=pairs[form], val_data=digits[1], objective=smoothed, **few)
    assert_same(again(result.recipe(), mlp, pairs[form], smoothed), result)
    assert_same(again(load(result.path).recipe(), mlp, pairs[form], smoothed), result)


def test_an_optimizer_of_the_users_own_with_modes(quick: Quick, digits: tuple[Pair, Pair]) -> None:
    def own(params: Any, lr: float) -> torch.optim.Optimizer:
        return ScheduleFreeAdamW(params, lr)

    result = quick(space={**ADAMW, "optimizer": own}, num_samples=2, sweep=SweepConfig(surrogate=1))
    assert result.averaged is None
    assert_same(again(result.recipe(), mlp, digits[0], optimizer=own), result, rtol=1e-4)


def test_parts_share_an_optimizer_of_the_users_own(quick: Quick, digits: tuple[Pair, Pair]) -> None:
    """With other arguments: the function is called for each of them."""
    space = {**ADAMW, "optimizer": decaying, "weight_decay": 0.1, "weight_decay.head": 0.0}
    result = quick(model_fn=deeper, space=space, num_samples=2, max_t=2)
    assert_same(again(result.recipe(), deeper, digits[0], optimizer=decaying), result)


def test_what_cannot_be_written_is_an_argument(quick: Quick, digits: tuple[Pair, Pair]) -> None:
    """Functions, and secrets: no text has those; a loaded run has not the functions either."""
    space = {**ADAMW, "optimizer": own_optimizer, "schedule": own_schedule, "amsgrad": True}
    space["hf_token"] = secret("hush-hush")
    result = quick(space=space, num_samples=2, sweep=SweepConfig(surrogate=1))
    text = result.recipe()
    assert "hush" not in text
    assert "def train(model_fn, train_data, loss_fn, *, optimizer, schedule, hf_token, device=None):" in text
    assert "optimizer.eval()" not in text
    given = {"optimizer": own_optimizer, "schedule": own_schedule, "hf_token": "hush-hush"}
    assert_same(again(text, mlp, digits[0], **given), result, rtol=1e-4)
    with pytest.raises(ValueError, match=r"a loaded run knows the name alone \(own_optimizer\)"):
        load(result.path).recipe()


@pytest.mark.parametrize("lr", [0.01, 0.1])
def test_what_a_sweep_at_full_width_trained_is_not_averaged(quick: Quick, digits: tuple[Pair, Pair], lr: float) -> None:
    """Fused with others, in sums of another order; averages begin where full-size training takes over.

    With the lower rate they are worse than the weights that training left, so that the recipe has none.
    """
    space, race = {**ADAMW, "lr": choice([lr, 1.01 * lr])}, RaceConfig(ema=0.2)
    result = quick(space=space, num_samples=4, sweep=SweepConfig(surrogate=1), race=race, max_t=6)
    assert result.averaged == (lr == 0.1)
    text = result.recipe()
    begun = [int(line.split()[-1][:-1]) for line in text.splitlines() if "if epoch >= " in line]
    epochs = [line["epoch"] for line in result.trials[result.best_trial].history if line["heat"] == "race"]
    assert begun == ([min(epochs) - 1] if result.averaged else [])
    assert_same(again(text, mlp, digits[0]), result, rtol=1e-4)


class Centred(nn.Module):
    """A layer that puts another tensor in the place of its buffer, as codebooks of moving averages do."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return x - self.mean


def centred(config: Config, width_ratio: float = 1.0) -> nn.Module:
    width = int(32 * width_ratio)
    return nn.Sequential(Centred(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def test_buffers_that_are_replaced_keep_their_last_value(quick: Quick, digits: tuple[Pair, Pair]) -> None:
    space = {"lr": choice([0.5, 0.6]), "momentum": 0.9, "optimizer": "sgd", "batch_size": 16}
    result = quick(model_fn=centred, space=space, num_samples=2, race=RaceConfig(ema=0.3))
    assert result.averaged
    assert_same(again(result.recipe(), centred, digits[0]), result)


def test_it_is_code_of_no_name_or_value_of_a_run(quick: Quick, tmp_path: Path) -> None:
    """Whatever names and texts a run has, none of them is run, and nothing of the library is needed."""
    evil = '"""\nraise SystemExit(7)\n# \u2028raise SystemExit(8)'
    result = quick(space={**ADAMW, evil: evil, "class": print}, num_samples=2, max_t=2, name="a'b")
    text = result.recipe()
    ast.parse(text)
    imports = {name.name for node in ast.parse(text).body if isinstance(node, ast.Import) for name in node.names}
    assert imports <= {"copy", "random", "zlib", "numpy", "torch"}
    (tmp_path / "recipe.py").write_text(text, encoding="utf-8")
    script = "import sys, recipe; print([m for m in sys.modules if m.startswith(('hydro', 'fusion', 'surrogate'))])"
    command = [sys.executable, "-c", script]
    told = subprocess.run(command, cwd=tmp_path, env={"PATH": ""}, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


def steered(loss_fn: Any) -> Any:
    """An objective that says how parameters are updated."""

    class Steered:
        def __call__(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
            return {"loss": loss_fn(model(batch[0]), batch[1])}

        def optimizer_settings(self, model: nn.Module, config: Config) -> OptimizerSettings:
            return OptimizerSettings(config)

    return Steered()


def own_loop(worker: Any) -> None:
    model = mlp(worker.config)
    while True:
        worker.report({"val_loss": 1.0}, {"model": model.state_dict()})


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"train": own_loop, "loss_fn": F.cross_entropy}, r"`train` trained it"),
        ({"objective": steered(F.cross_entropy)}, r"its objective says by itself .* \(`optimizer_settings`\)"),
    ],
)
def test_what_no_plain_loop_repeats_is_refused(arguments: dict[str, Any], why: str, quick: Quick) -> None:
    result = quick(space=ADAMW, num_samples=2, max_t=2, **arguments)
    assert result.averaged is (None if "train" in arguments else True)
    with pytest.raises(ValueError, match=f"no plain loop trains trial {result.best_trial} again: {why}"):
        result.recipe()
    narrow = next(trial.trial for trial in quick(space=ADAMW, name="other").trials if not trial.epochs)
    with pytest.raises(ValueError, match="must be one of the finalists"):
        recipe_of(load(result.path), result._problem, narrow)


def test_weights_of_another_trial_are_refused() -> None:
    swept = {"sweep/to-2/group-0": Unit({"members": [0, 1], "copies": {"1": 0}})}
    _check_own_weights(0, 2, swept)
    _check_own_weights(1, 0, swept)  # its full-size model began anew
    perturbed = {"race/trial-1/to-2": Unit({"checkpoint": None, "origin": 0, "mutable": {"lr": 0.1}})}
    _check_own_weights(11, 0, perturbed)
    for number, epochs, units in ((1, 2, swept), (1, 0, perturbed)):
        with pytest.raises(ValueError, match="it went on from another trial's weights"):
            _check_own_weights(number, epochs, units)


@pytest.mark.slow
@pytest.mark.parametrize("grows", [False, True])
def test_several_workers(grows: bool, quick: Quick, digits: tuple[Pair, Pair]) -> None:
    """So many workers train as one would; where more are added, batch and learning rate grow, which is refused."""
    asked = RaceConfig(workers=1, max_workers=2, grace_period=1) if grows else RaceConfig(workers=2, max_workers=2)
    result = quick(space=ADAMW, num_samples=2, race=asked, backend=LocalBackend(["cpu"] * 2))
    if grows:
        told = r"workers were added in training, which its batch \(32 and then 64 examples\).*max_workers"
        with pytest.raises(ValueError, match=told):
            result.recipe()
        return
    assert "2 workers shared each batch" in result.recipe()
    assert_same(again(result.recipe(), mlp, digits[0]), result, rtol=1e-3)


def test_names_of_keys_hide_nothing_that_the_loop_calls() -> None:
    keys = ["copy", "max", "lr_factor", "rows_of", "functools", "act"]
    assert arguments_of(dict.fromkeys(keys, len)) == {key: key if key == "act" else f"{key}_" for key in keys}


def test_a_recipe_clips_at_infinity(quick: Quick, digits: tuple[Pair, Pair]) -> None:
    """Which leaves gradients as they are."""
    result = quick(space={**SGD, "grad_clip": math.inf}, num_samples=2, max_t=2)
    assert_same(again(result.recipe(), mlp, digits[0], grad_clip=math.inf), result)
