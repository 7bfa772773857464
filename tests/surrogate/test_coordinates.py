from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from surrogate import coordinate_check, make_surrogate
from surrogate.coordinates import CoordinateCheck
from surrogate.roles_and_multipliers import width_plan
from surrogate.training import make_optimizer
from tests.surrogate.models import ModelFn, cnn, mlp, narrow_heads, transformer

WIDTHS = (1 / 8, 1 / 4, 1 / 2, 1.0)


def tied(config: dict[str, Any], width_ratio: float) -> nn.Module:
    """GPT-2's initial scale, as a tied readout needs it."""
    model = transformer({"tied": True}, width_ratio)
    nn.init.normal_(model.get_parameter("embedding.weight"), std=0.02)
    return model


def wide_mlp(config: dict[str, Any], width_ratio: float) -> nn.Module:
    return mlp({"width": 1024}, width_ratio)


def wide_cnn(config: dict[str, Any], width_ratio: float) -> nn.Module:
    return cnn(config, 4 * width_ratio)


class Depthwise(nn.Module):
    """Residual blocks of a depthwise and a pointwise convolution with GroupNorm of four groups."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, groups=width), nn.Conv2d(width, width, 1), nn.GroupNorm(4, width)
            )
            for _ in range(2)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + torch.relu(block(x))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def depthwise(config: dict[str, Any], width_ratio: float) -> nn.Module:
    """16 channels at the narrowest of `WIDTHS`: with one in each group, GroupNorm would be another function."""
    return Depthwise(round(128 * width_ratio))


def weight_normed(config: dict[str, Any], width_ratio: float) -> nn.Module:
    width = int(512 * width_ratio)
    hidden = weight_norm(nn.Linear(width, width))
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), hidden, nn.ReLU(), weight_norm(nn.Linear(width, 10)))


def objective(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())


def random_batches(model_fn: ModelFn) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    if model_fn in (transformer, narrow_heads, tied):
        tokens = torch.randint(20, (16, 6))
        return [(tokens, tokens.roll(1, 1))] * 5
    x = torch.randn(16, 3, 8, 8) if model_fn in (wide_cnn, depthwise) else torch.randn(64, 64)
    return [(x, torch.randint(10, (len(x),)))] * 5


def check(model_fn: ModelFn, optimizer: str, *, plain: bool, steps: int = 5, **own: float) -> CoordinateCheck:
    config = {"optimizer": optimizer, "lr": 0.1 if optimizer in ("sgd", "asgd") else 0.01, **own}
    batches = random_batches(model_fn)[:1] * steps
    kind = {"plain": True} if plain else {}
    return coordinate_check(model_fn, config, WIDTHS, batches, objective, seeds=2, **kind)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(
    "model_fn",
    # The wide convolutions take as long as all others, of which the depthwise ones are convolutions, too.
    [wide_mlp, pytest.param(wide_cnn, marks=pytest.mark.slow), depthwise, transformer, tied, narrow_heads],
)
def test_surrogates_pass(model_fn: ModelFn, optimizer: str) -> None:
    found = check(model_fn, optimizer, plain=False)
    assert found.passed, found.table()


@pytest.mark.parametrize(("optimizer", "lr"), [("sgd", 0.1), ("adam", 0.002)])
def test_weight_normed_layers_pass(optimizer: str, lr: float) -> None:
    """At larger rates of Adam, a narrow layer's rows become longer in one step, and the norm takes that away again."""
    found = check(weight_normed, optimizer, plain=False, lr=lr)
    assert found.passed, found.table()


@pytest.mark.parametrize(
    ("model_fn", "optimizer"),
    [
        (wide_mlp, "sgd"),
        (wide_mlp, "adam"),
        (wide_cnn, "sgd"),
        (transformer, "sgd"),
        (transformer, "adam"),
        (tied, "sgd"),
        (tied, "adam"),
    ],
)
def test_plain_narrow_models_fail(model_fn: ModelFn, optimizer: str) -> None:
    found = check(model_fn, optimizer, plain=True)
    assert not found.passed, found.table()


def deep(config: dict[str, Any], width_ratio: float) -> nn.Module:
    width = int(512 * width_ratio)
    hidden = [layer for _ in range(2) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), *hidden, nn.Linear(width, 10))


HIDDEN = {
    deep: ("2.weight", "4.weight"),
    wide_mlp: ("2.weight",),
    transformer: ("block.self_attn.in_proj_weight", "block.linear1.weight"),
}
FAULTS = [(model_fn, name) for model_fn, names in HIDDEN.items() for name in names]


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("factor", [0.5, -0.5], ids=["growing", "shrinking"])
@pytest.mark.parametrize(("model_fn", "name"), FAULTS)
def test_one_unscaled_initialization_fails(
    model_fn: ModelFn, name: str, factor: float, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unscaled(*args: Any) -> nn.Module:
        model = make_surrogate(*args)
        with torch.no_grad():
            model.get_parameter(name).mul_(width_plan(model).params[name].width_mult ** factor)
        return model

    monkeypatch.setattr("surrogate.coordinates.make_surrogate", unscaled)
    found = check(model_fn, optimizer, plain=False, steps=1)
    assert not found.passed, found.table()
    assert name.rpartition(".")[0] in (found.growing if factor > 0 else found.shrinking)
    assert found.unscaled == {name: f"starts {'larger' if factor > 0 else 'smaller'} in a wider model"}


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize(("model_fn", "name"), FAULTS)
def test_one_unscaled_rate_fails(model_fn: ModelFn, name: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under Adam: a hidden weight's rate is no other under SGD at any width."""

    def unscaled(model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
        optimizer = make_optimizer(model, config)
        for (found, _), group in zip(model.named_parameters(), optimizer.param_groups):
            group["lr"] = config["lr"] if found == name else group["lr"]
        return optimizer

    monkeypatch.setattr("surrogate.training.make_plain_optimizer", unscaled)
    found = check(model_fn, "adam", plain=False, steps=steps)
    assert not found.passed, found.table()
    assert found.unscaled[name] == "changes more in a wider model, at step 1"
    assert f"parameter {name} changes more" in found.table()


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_rate_that_is_too_low_in_wide_models_fails(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No output grows, so that only the weight's own changes show it."""

    def lowered(model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
        optimizer = make_optimizer(model, config)
        for (found, _), group in zip(model.named_parameters(), optimizer.param_groups):
            group["lr"] /= width_plan(model).params[found].width_mult if found == "2.weight" else 1.0
        return optimizer

    monkeypatch.setattr("surrogate.training.make_plain_optimizer", lowered)
    found = check(deep, optimizer, plain=False)
    assert found.unscaled == {"2.weight": "changes less in a wider model, at each step"}
    assert not found.passed


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_deep_model_passes(optimizer: str) -> None:
    found = check(deep, optimizer, plain=False)
    assert found.passed, found.table()


OTHERS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("adagrad", "adamax", "asgd", "nadam", "rmsprop")},
    "adadelta": {"lr": 1.0, "eps": 1e-12},
    "adafactor": {"lr": 0.05},
    "radam": {"steps": 15},  # of which the first five are not adaptive
}


@pytest.mark.parametrize("optimizer", OTHERS)
def test_other_optimizers_pass_by_adams_rule_or_sgds(optimizer: str) -> None:
    found = check(wide_mlp, optimizer, plain=False, **OTHERS[optimizer])
    assert found.passed, found.table()
    assert not check(wide_mlp, optimizer, plain=True, **OTHERS[optimizer]).passed


class Routed(nn.Module):
    """Each example goes to one of three experts, whose number of examples changes as the gate learns."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.gate = nn.Linear(64, width), nn.Linear(width, 3)
        self.experts, self.head = nn.ModuleList(nn.Linear(width, width) for _ in range(3)), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x).relu()
        share, chosen = self.gate(h).softmax(1).max(1)
        mixed = torch.zeros_like(h)
        for i, expert in enumerate(self.experts):
            mixed[chosen == i] = expert(h[chosen == i]) * share[chosen == i, None]
        logits: Tensor = self.head(h + mixed)
        return logits


def test_experts_whose_number_of_examples_changes_are_left_out() -> None:
    batches = [(torch.randn(32, 64), torch.randint(10, (32,))) for _ in range(4)]
    check = coordinate_check(
        lambda config, ratio: Routed(round(256 * ratio)),
        {"optimizer": "adam", "lr": 0.01},
        (1 / 8, 1 / 2),
        batches,
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        seeds=2,
    )
    assert {"", "embed", "gate", "head"} <= check.size_slopes.keys()
    assert not check.size_slopes.keys() >= {"experts.0", "experts.1", "experts.2"}
    assert check.passed, check.table()


def test_plain_mlp_under_adam_grows_in_proportion_to_the_width() -> None:
    """Each hidden weight moves by lr whatever the fan-in, and the sum over the fan-in is correlated: slope 1."""
    found = check(wide_mlp, "adam", plain=True)
    assert found.size_slopes["4"] == pytest.approx(1.0, abs=0.25)
    assert "4" in found.growing


def test_table_and_plot(tmp_path: Path) -> None:
    found = check(wide_mlp, "adam", plain=False)
    lines = found.table().splitlines()
    assert lines[0].split() == ["module", "0.125", "0.25", "0.5", "1", "size", "slope", "change", "slope"]
    assert lines[-1] == "passed after step 5"
    assert len(lines) == 2 + 6  # five layers and the model's own output
    found.plot(tmp_path / "check.png")
    assert (tmp_path / "check.png").stat().st_size > 1000


def test_the_global_generator_is_left_as_it_was() -> None:
    batches = random_batches(mlp)[:1]
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    coordinate_check(mlp, {"lr": 0.1}, [0.5, 1.0], batches, objective, seeds=1)
    assert torch.equal(torch.rand(1), expected)


def test_an_exploding_model_fails() -> None:
    found = coordinate_check(mlp, {"lr": 1e30}, [0.5, 1.0], random_batches(mlp), objective, seeds=1)
    assert not found.passed


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"`width_ratios` is \[0.5\], but must be at least 2 different"):
        coordinate_check(mlp, {"lr": 0.1}, [0.5], random_batches(mlp), objective)
    with pytest.raises(ValueError, match=r"`batches` is \[\], but must be at least 1 batch"):
        coordinate_check(mlp, {"lr": 0.1}, WIDTHS, [], objective)
