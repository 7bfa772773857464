from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from hydro_rasda import RaceConfig, TuneResult, choice, loguniform
from hydro_rasda.contracts import Group, GroupTask, Span, Widths
from hydro_rasda.problem import Problem
from hydro_rasda.run.run_folder import Store
from hydro_rasda.stages.fusion_groups import find_kinds
from hydro_rasda.stages.wider_groups import find_wider, form
from hydro_rasda.training.group_training import train_group
from hydro_rasda.trial import Trial
from tests.hydro_rasda.models import Config

Quick = Callable[..., TuneResult]


def of_width(config: Config, width_ratio: float = 1.0) -> nn.Module:
    """64 -> width -> width -> 10, as many times as the configuration says, perhaps with a norm."""
    width = int(config["width"] * width_ratio)
    norm = [nn.LayerNorm(width)] if config.get("norm") else []
    return nn.Sequential(
        nn.Linear(64, width), *norm, nn.ReLU(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10)
    )


def kinds_of(problem: Problem, *configs: Config) -> tuple[list[str], dict[str, Trial]]:
    trials = [Trial(n, {"lr": 0.1, "batch_size": 32, **config}) for n, config in enumerate(configs)]
    kinds = find_kinds(problem, trials, 0).value
    return list(kinds.values()), {kind: trials[n] for n, kind in kinds.items()}


@pytest.mark.parametrize("children", [0, 1])
def test_each_kind_knows_the_next_wider_one(problem: Problem, children: int) -> None:
    sized = replace(problem, model_fn=of_width)
    kinds, examples = kinds_of(sized, {"width": 32}, {"width": 64}, {"width": 16}, {"width": 64, "batch_size": 64})
    found = find_wider(sized, examples, children).value
    assert {kind: wider for kind, (wider, _) in found.items()} == {kinds[2]: kinds[0], kinds[0]: kinds[1]}
    assert form(kinds[0]) == form(kinds[1]) != form(kinds[3])
    units = {width: 64 * width + width + width * width + width + 10 * width + 10 for width in (8, 16, 32)}
    assert [share for _, share in found.values()] == [units[8] / units[16], units[16] / units[32]]


def test_models_that_normalize_over_units_have_no_wider_one(problem: Problem) -> None:
    sized = replace(problem, model_fn=of_width)
    kinds, examples = kinds_of(sized, {"width": 32, "norm": True}, {"width": 64, "norm": True})
    assert form(kinds[0]) == form(kinds[1])
    assert find_wider(sized, examples, 0).value == {}


def test_no_model_is_compared_where_the_objective_sets_optimizers(problem: Problem) -> None:
    class Own:
        def __call__(self, model: Any, batch: Any) -> Any:
            return problem.objective(model, batch)

        def optimizer_settings(self, model: Any, config: Any) -> Any:
            raise AssertionError("the kinds are known")

    sized = replace(problem, model_fn=of_width)
    _, examples = kinds_of(sized, {"width": 32}, {"width": 64})
    assert find_wider(replace(sized, objective=Own()), examples, 0).value == {}


CONFIGS: list[dict[str, Any]] = [
    {"width": 32, "optimizer": "sgd", "lr": 0.1, "momentum": 0.9},
    {"width": 64, "optimizer": "sgd", "lr": 0.05},
    {"width": 32, "optimizer": "adamw", "lr": 3e-3, "grad_clip": 0.5},
    {"width": 64, "optimizer": "muon", "lr": 0.01},
    {"width": 64, "optimizer": "adafactor", "lr": 0.01},
]
TRIALS = {n: Trial(n, {**config, "batch_size": 32}) for n, config in enumerate(CONFIGS)}


def test_padded_members_train_and_go_on_as_alone(problem: Problem) -> None:
    """They change from padded groups to groups of their own, and back, and into copies."""
    sized = replace(problem, model_fn=of_width)
    checkpoints: dict[str, Any] = {}
    history: dict[int, list[Any]] = {n: [] for n in TRIALS}

    def train(key: str, members: tuple[int, ...], span: Span, sources: tuple[str, ...], widest: int | None) -> None:
        group = Group("kind", members, fused=True, widest=None if widest is None else TRIALS[widest])
        task = GroupTask(key, (group,), sources, span)
        # A process that trains a group knows of no other trials.
        own = {number: TRIALS[number] for number in members}
        outcome = train_group(sized, own, task, lambda key: {"parts": checkpoints[key]})
        assert outcome.failures == {}
        checkpoints[key] = outcome.checkpoint
        for number, of in outcome.history.items():
            history[number] += of

    train("all", (0, 1, 2, 3, 4), Span(0, 1), (), widest=1)
    assert len(checkpoints["all"]) == 1, "they trained as one"
    train("narrow", (2,), Span(1, 2), ("all",), widest=None)
    train("as wide", (0,), Span(1, 2), ("all",), widest=1)
    train("wide", (1, 3, 4), Span(1, 2), ("all",), widest=None)
    train("again", (0, 1, 3, 2, 4), Span(2, 3), ("narrow", "as wide", "wide"), widest=4)
    for number, trial in TRIALS.items():
        task = GroupTask("alone", (Group("kind", (number,), fused=False),), (), Span(0, 3))
        alone = train_group(sized, {number: trial}, task, pytest.fail)
        for (epoch, metrics), (same, expected) in zip(history[number], alone.history[number], strict=True):
            assert (epoch, metrics) == (same, pytest.approx(expected, rel=1e-3))


SPACE: dict[str, Any] = {
    "lr": loguniform(1e-2, 0.3),
    "optimizer": choice(["sgd", "adamw"]),
    "width": choice([32, 64]),
    "batch_size": 64,
}


def groups_of(result: TuneResult) -> list[list[int]]:
    units = Store.read(result.path).units().items()
    return [group for key, unit in units if "/group-" in key for group in unit.value["groups"]]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("surrogate", [0.5, 1])
def test_a_sweep_over_widths_has_half_the_groups_and_the_same_scores(
    quick: Quick, monkeypatch: pytest.MonkeyPatch, surrogate: float
) -> None:
    asked: dict[str, Any] = {
        "model_fn": of_width,
        "space": SPACE,
        "num_samples": 8,
        "sweep": {"surrogate": surrogate, "fusion": "auto"},
        "race": RaceConfig(grace_period=1),
    }
    ends = {1: 100.0, 8: 800.0}

    def measured(pays: bool) -> Callable[..., dict[str, Widths]]:
        throughput = ends if pays else {1: 100.0, 8: 100.0}
        return lambda problem, kinds, *others: {kind: Widths(8, 2, throughput) for kind in kinds}

    found = {}
    for pays in (True, False):
        monkeypatch.setattr("hydro_rasda.training.device.planned_widths", measured(pays))
        found[pays] = quick(**asked, name=str(pays))
    width_of = {record.trial: record.config["width"] for record in found[True].trials}
    widths = [{width_of[number] for number in group} for group in groups_of(found[True])]
    assert {32, 64} in widths
    assert len(groups_of(found[True])) < len(groups_of(found[False]))
    for one, other in zip(found[True].trials, found[False].trials, strict=True):
        assert one.surrogate_metric == pytest.approx(other.surrogate_metric, rel=1e-3)
        assert one.status == other.status
    model: Any = found[True].best_model()
    assert model[0].weight.shape == (found[True].best_config["width"], 64)
    again = quick(**asked, name="True")
    assert again.trials == found[True].trials
