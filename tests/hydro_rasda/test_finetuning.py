"""Weights that no seed changes were trained before: they are tuned at full size, whatever surrogate was asked for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusion import fuse
from hydro_rasda import SweepConfig, TuneResult, loguniform
from hydro_rasda.dry_run.dry_run import dry_run
from hydro_rasda.problem.problem import Problem
from tests import zoo
from tests.hydro_rasda.models import Config, mlp
from tests.hydro_rasda.problems import problem, trials

pytestmark = pytest.mark.usefixtures("one_process")

Quick = Callable[..., TuneResult]
TOKENS = torch.randint(11, (24, 7), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def base() -> nn.Module:
    """GPT-2 of 8 units, as if it had been trained."""
    torch.manual_seed(0)
    return zoo.gpt2()


def next_token(model: Any, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    logits = model(input_ids=batch[0]).logits
    return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())}


def with_adapters(base: nn.Module) -> Callable[[Config], nn.Module]:
    from peft import LoraConfig, get_peft_model

    def model_fn(config: Config) -> nn.Module:
        lora = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        model: nn.Module = get_peft_model(copy.deepcopy(base), lora)
        return model

    return model_fn


def tuned(quick: Quick, model_fn: Callable[..., nn.Module], **arguments: Any) -> TuneResult:
    defaults: dict[str, Any] = {
        "space": {"lr": loguniform(1e-3, 1e-1), "batch_size": 8},
        "train_data": (TOKENS, TOKENS),
        "val_data": (TOKENS[:8], TOKENS[:8]),
        "objective": next_token,
        "num_samples": 3,
        "max_t": 2,
        "sweep": {"surrogate": 1 / 8},
    }
    return quick(model_fn=model_fn, **{**defaults, **arguments})


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
def test_adapters_on_a_frozen_base(quick: Quick, base: nn.Module) -> None:
    with pytest.warns(UserWarning, match=r"same from every seed, .* surrogate of 0.125 .* the model itself is swept"):
        result = tuned(quick, with_adapters(base))
    trained, before = dict(result.best_model().named_parameters()), dict(base.named_parameters())
    frozen = "base_model.model.transformer.h.0.mlp.c_fc.weight"
    assert torch.equal(trained[frozen], before["transformer.h.0.mlp.c_fc.weight"])
    assert any(parameter.any() for name, parameter in trained.items() if "lora_B" in name)


def test_all_weights_of_a_trained_model(quick: Quick, base: nn.Module) -> None:
    """The run is one at full width, however its surrogate was asked for."""
    with pytest.warns(UserWarning, match="same from every seed"):
        first = tuned(quick, lambda config: copy.deepcopy(base))
    again = tuned(quick, lambda config: copy.deepcopy(base), sweep=SweepConfig(surrogate=1), name="full width")
    assert again.best_metric == pytest.approx(first.best_metric)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
def test_a_fused_group_holds_the_frozen_base_once(base: nn.Module) -> None:
    model_fn = with_adapters(base)
    fused = fuse([model_fn({}) for _ in range(3)])
    assert fused.stacked.keys() == {name for name, p in model_fn({}).named_parameters() if p.requires_grad}


def fixed(share: float) -> Callable[..., nn.Module]:
    """An MLP with a fixed table beside it that holds that share of all elements."""
    state = mlp({}).state_dict()
    count = int(sum(value.numel() for value in state.values()) * share / (1 - share))
    table = torch.randn(count, generator=torch.Generator().manual_seed(0))

    class WithTable(nn.Module):
        def __init__(self, width_ratio: float) -> None:
            super().__init__()
            self.body = mlp({}, width_ratio)
            self.table = nn.Parameter(table.clone(), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.body(x)
            return y

    return lambda config, width_ratio=1.0: WithTable(width_ratio)


def seeds_itself(config: Config, width_ratio: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return mlp(config, width_ratio)


def loads(config: Config, width_ratio: float = 1.0) -> nn.Module:
    model = mlp(config, width_ratio)
    if width_ratio == 1:
        model.load_state_dict(seeds_itself({}).state_dict())
    return model


def identity(config: Config, width_ratio: float = 1.0) -> nn.Module:
    """Its hidden weight starts at the identity, biases at zero: constants, not knowledge."""
    model = mlp(config, width_ratio)
    nn.init.eye_(model.get_parameter("2.weight"))
    return model


@pytest.mark.parametrize(
    ("model_fn", "expected"),
    [(mlp, False), (identity, False), (fixed(0.05), False), (fixed(0.5), True), (seeds_itself, True), (loads, True)],
)
def test_what_counts_as_pretrained(model_fn: Callable[..., nn.Module], expected: bool) -> None:
    assert dry_run(problem(model_fn), trials()).pretrained is expected


def test_nobody_asks_at_full_width() -> None:
    built: list[float] = []

    def counts(config: Config, width_ratio: float = 1.0) -> nn.Module:
        built.append(width_ratio)
        return seeds_itself(config, width_ratio)

    whole: Problem = problem(counts, surrogate=1)
    assert not dry_run(whole, trials()).pretrained
    before = len(built)
    built.clear()
    assert dry_run(problem(counts), trials()).pretrained
    assert len(built) <= before


def test_a_backbone_that_model_fn_keeps_is_not_trained_by_one_trial_for_the_next(quick: Quick) -> None:
    kept = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU())
    before = copy.deepcopy(kept.state_dict())

    def wraps(config: Config) -> nn.Module:
        return nn.Sequential(kept, nn.Linear(32, 10))

    def copies(config: Config) -> nn.Module:
        return nn.Sequential(copy.deepcopy(kept), nn.Linear(32, 10))

    arguments: dict[str, Any] = {
        "space": {"lr": loguniform(1e-2, 1.0)},
        "num_samples": 4,
        "sweep": SweepConfig(surrogate=1, fusion=1),
    }
    with_kept, with_copies = (quick(model_fn=f, name=f.__name__, **arguments) for f in (wraps, copies))
    with_kept.best_model()
    assert all(torch.equal(value, before[name]) for name, value in kept.state_dict().items())
    assert all(parameter.grad is None for parameter in kept.parameters())
    assert [t.history for t in with_kept.trials] == [t.history for t in with_copies.trials]


def test_a_surrogate_of_one_unit_is_refused_before_any_work(quick: Quick, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'0.weight' is \(1, 64\) in the surrogate .* falls to one unit"):
        quick(sweep=SweepConfig(surrogate=1 / 32))
    assert not (tmp_path / "run").exists()


def in_parts(config: dict[str, Any]) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 10))


def by_parts(model: Any, batch: Any) -> dict[str, Tensor]:
    return {"loss": nn.functional.cross_entropy(model[1](model[0](batch[0])), batch[1])}


def test_a_model_without_a_width_of_which_only_parts_are_called_is_told_so(quick: Quick) -> None:
    """No call shows how its sizes depend on each other. It was told of an operator that got None."""
    with pytest.raises(ValueError, match=r"by itself \(`objective` calls parts of it, but never the model itself"):
        quick(model_fn=in_parts, objective=by_parts, loss_fn=None)
