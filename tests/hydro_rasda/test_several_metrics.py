"""Several metrics and constraints, from the call to the result, on each backend, resumed and loaded."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from ray.tune.search.optuna import OptunaSearch
from torch import Tensor, nn

from hydro_rasda import AllTrialsFailed, RunExists, SweepConfig, TuneResult, choice, load, loguniform, plots
from hydro_rasda.contracts import Event
from hydro_rasda.plots.page.write import Page
from hydro_rasda.records.report import closing_lines
from hydro_rasda.run.events import EpochEnded, RungDecided
from tests.hydro_rasda.conftest import in_one_process, tuned

pytestmark = pytest.mark.usefixtures("one_process")

Quick = Callable[..., TuneResult]

SPACE: dict[str, Any] = {"lr": loguniform(1e-2, 0.3), "width": choice([16, 32, 64]), "batch_size": 32}
BOTH: dict[str, Any] = {"space": SPACE, "metric": ["val_loss", "macs"], "race": {"top_k": 4}, "full_trainings": 4}


def sized(config: dict[str, Any], width_ratio: float = 1.0) -> nn.Module:
    """64 -> width -> 10: 74 multiply-accumulates for each unit."""
    width = int(config["width"] * width_ratio)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def with_gap(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """A loss, and a metric that is larger for wider models."""
    output = model(batch[0])
    weight = next(iter(model.parameters()))
    gap = output.mean() * 0 + weight.shape[0] / 16
    return {"loss": nn.functional.cross_entropy(output, batch[1]), "gap": gap}


def dominates(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Tell whether a point is in no objective worse (higher) than another point, and is better in at least one."""
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


def without_paths(result: TuneResult) -> list[Any]:
    return [dataclasses.astuple(trial) for trial in result.trials]


RULES = ["halving", "hyperband", "epsilon-net", "median"]


@pytest.mark.parametrize(
    ("metric", "mode", "rule"),
    [
        *(("val_loss", "min", rule) for rule in RULES),
        ("val_accuracy", "max", "halving"),
        *(pytest.param("val_accuracy", "max", rule, marks=pytest.mark.slow) for rule in RULES[1:]),
    ],
)
def test_the_front_holds_every_model_that_no_other_beats(quick: Quick, metric: str, mode: str, rule: str) -> None:
    events: list[Event] = []
    asked = BOTH | {"metric": [metric, "macs"], "mode": [mode, "min"], "sweep": {"rule": rule}}
    result = quick(model_fn=sized, **asked, callbacks=[events.append])
    full, sign = [trial for trial in result.trials if trial.epochs], 1 if mode == "min" else -1
    points = {t.trial: (sign * t.metrics[metric], t.metrics["macs"]) for t in full}
    best = [n for n, point in points.items() if not any(dominates(other, point) for other in points.values())]
    assert sorted(trial.trial for trial in result.pareto) == sorted(best)
    assert [points[t.trial] for t in result.pareto] == sorted(points[t.trial] for t in result.pareto)
    assert all(trial.costs == {"macs": 74.0 * trial.config["width"]} for trial in result.trials)
    for trial in result.pareto:
        model = result.best_model(trial=trial.trial)
        assert sum(p.numel() for p in model.parameters()) == 75 * trial.config["width"] + 10
        assert trial.metrics[metric] == trial.metric
    # A rung's order is that of places: its first is one that no other beats.
    first = next(e for e in events if isinstance(e, RungDecided))
    swept = [e for e in events if isinstance(e, EpochEnded) and (e.heat, e.epoch) == ("sweep", first.epoch)]
    scores = {e.trial: sign * e.metrics[metric] for e in swept}
    rung = {n: (scores[n], result.trials[n].costs["macs"]) for n in first.candidates}
    assert not any(dominates(other, rung[first.kept[0]]) for other in rung.values())


def test_one_metric_goes_the_path_that_it_went(quick: Quick) -> None:
    one = quick(model_fn=sized, space=SPACE)
    assert [trial.trial for trial in one.pareto] == [one.best_trial] or one.pareto[0].metric < one.best_metric
    assert all(trial.costs == {} for trial in one.trials)
    assert one.others == []
    assert one.hypervolume({"val_loss": one.pareto[0].metric + 2.0}) == pytest.approx(2.0)


@pytest.fixture(scope="module")
def whole(digits: Any, tmp_path_factory: pytest.TempPathFactory) -> TuneResult:
    """A run for both metrics, which no test changes."""
    with in_one_process():
        return tuned(digits, tmp_path_factory.mktemp("whole"), model_fn=sized, **BOTH)


def test_a_run_that_was_interrupted_ends_as_the_whole_one(quick: Quick, whole: TuneResult) -> None:
    def interrupt(event: Event) -> None:
        if isinstance(event, RungDecided) and not event.recalled:
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            quick(model_fn=sized, **BOTH, name="cut", callbacks=[Raising(interrupt)])
    resumed = quick(model_fn=sized, **BOTH, name="cut")
    assert without_paths(resumed) == without_paths(whole)


class Raising:
    """A callback whose interrupts end the run, as one from a terminal would."""

    def __init__(self, act: Callable[[Event], None]) -> None:
        self.on_event = act


def test_a_loaded_run_has_the_same_front(whole: TuneResult) -> None:
    loaded = load(whole.path)
    reference = {"val_loss": 3.0, "macs": 1e4}
    assert [t.trial for t in loaded.pareto] == [t.trial for t in whole.pareto]
    assert loaded.hypervolume(reference) == whole.hypervolume(reference) > 0
    with pytest.raises(ValueError, match=r"`reference` is \{'val_loss': 3\.0\}, but must be a dict with a number"):
        loaded.hypervolume({"val_loss": 3.0})
    assert list(loaded.dataframe()["macs"]) == [trial.costs["macs"] for trial in whole.trials]
    study = loaded.to_optuna()
    assert {trial.number for trial in study.best_trials} == {trial.trial for trial in whole.pareto}


def test_figure_page_and_last_lines_show_the_front(quick: Quick, whole: TuneResult) -> None:
    drawn = plots.front(whole)
    joined = next(trace for trace in drawn.data if trace.name == "the front")
    assert sorted(joined.x) == sorted(trial.costs["macs"] for trial in whole.pareto)
    html = Page(whole).html()
    assert "<h2>Front</h2>" in html
    assert "On the front of the full-size models" in html
    assert any(re.search(r"\d of them (is|are) on the front of all \d", message.text) for message in whole.messages)
    lines = "\n".join(closing_lines(whole, "runs/run"))
    assert all(f"trial {trial.trial} (val_loss" in lines for trial in whole.pareto)
    alone = quick(model_fn=sized, space=SPACE, name="one")
    assert plots.front(alone).layout.annotations[0].text == "one metric alone was asked for"
    assert "<h2>Front</h2>" not in Page(alone).html()


def test_a_bound_on_a_cost_trains_nothing_beyond_it(quick: Quick) -> None:
    sweep = SweepConfig(constraints={"params": (None, 75 * 32 + 10), "wide": lambda config: config["width"] > 16})
    result = quick(model_fn=sized, space=SPACE, sweep=sweep)
    assert [trial.config["width"] for trial in result.trials] == [32] * 9
    assert len({trial.config["lr"] for trial in result.trials}) == 9
    grown = quick(model_fn=sized, space=SPACE, sweep=sweep, num_samples=12)
    assert [trial.config for trial in grown.trials[:9]] == [trial.config for trial in result.trials]
    assert [trial.config["width"] for trial in grown.trials] == [32] * 12
    with pytest.raises(RunExists, match=r"constraints"):
        quick(model_fn=sized, space=SPACE, sweep=SweepConfig(constraints={"params": (None, 9.0)}))
    other = SweepConfig(constraints={"params": (None, 75 * 32 + 10), "wide": lambda config: config["width"] > 24})
    with pytest.raises(RunExists, match=r"another: `sweep\.constraints` has other values or functions than the run's"):
        quick(model_fn=sized, space=SPACE, sweep=other, num_samples=12)


@pytest.mark.parametrize("constraints", [{"params": (None, 9.0)}, lambda config: False])
def test_a_space_where_nothing_fits_is_refused(quick: Quick, constraints: Any) -> None:
    with pytest.raises(ValueError, match=r"`sweep\.constraints` leaves nothing to try: none of 900 configurations"):
        quick(model_fn=sized, space=SPACE, sweep=SweepConfig(constraints=constraints))


def test_a_bound_on_a_metric_loses_against_any_that_keeps_it(quick: Quick) -> None:
    asked: dict[str, Any] = {"model_fn": sized, "objective": with_gap, "space": SPACE, "race": {"top_k": 3}}
    free = quick(**asked, full_trainings=3, name="free", sweep=SweepConfig(surrogate=1))
    bounded = quick(**asked, full_trainings=3, sweep=SweepConfig(surrogate=1, constraints={"val_gap": (None, 1.0)}))
    assert free.trials[free.best_trial].config["width"] > 16
    assert bounded.trials[bounded.best_trial].config["width"] == 16
    assert bounded.best_metric > free.best_metric
    assert load(bounded.path).best_trial == bounded.best_trial
    assert {trial.config["width"] for trial in bounded.trials} > {16}  # they did train
    hard = quick(**asked, name="none", sweep=SweepConfig(surrogate=1, constraints={"val_gap": (None, 0.5)}))
    assert hard.trials[hard.best_trial].config["width"] == 16  # breaks it least
    assert "No full-size model keeps all bounds" in "\n".join(closing_lines(hard, "runs/none"))


def test_an_epsilon_net_and_other_rules_sweep_by_places(quick: Quick) -> None:
    for rule in ("epsilon-net", "pbt"):
        result = quick(model_fn=sized, **BOTH, sweep=SweepConfig(rule=rule), name=rule)
        assert result.pareto
        again = quick(model_fn=sized, **BOTH, sweep=SweepConfig(rule=rule), name=rule)
        assert without_paths(again) == without_paths(result)
        assert all(t.costs == {"macs": 74.0 * t.config["width"]} for t in result.trials)
    # Finalists by schedules that the population found were dropped at the first look: they had no costs.
    new = [trial for trial in result.trials if not trial.sweep_epochs]
    assert new
    assert all(math.isfinite(trial.metrics["macs"]) for trial in new)
    assert [t.unread for t in load(result.path).trials] == [t.unread for t in result.trials]


@pytest.mark.slow  # the quick test above has two of them
@pytest.mark.parametrize("rule", ["hyperband", "median", "none"])
def test_all_rules_sweep_by_places(quick: Quick, rule: Any) -> None:
    assert quick(model_fn=sized, **BOTH, sweep=SweepConfig(rule=rule)).pareto


def test_optuna_learns_from_all_metrics(quick: Quick) -> None:
    told: list[Any] = []

    class Noting(OptunaSearch):  # type: ignore[misc]
        def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
            told.append(result)
            super().on_trial_complete(trial_id, result, error)

    Noting.__name__ = "OptunaSearch"
    sweep = SweepConfig(searcher=Noting(seed=0), constraints=lambda config: config["width"] < 64)
    result = quick(model_fn=sized, **BOTH, sweep=sweep)
    assert {trial.config["width"] for trial in result.trials} <= {16, 32}
    scored = [each for each in told if each is not None]
    assert len(scored) == 9
    assert all(each["macs"] in (74 * 16, 74 * 32) and each["val_loss"] > 0 for each in scored)


def test_names_that_training_does_not_measure_are_refused(quick: Quick) -> None:
    with pytest.raises(ValueError, match=r"`metric` is 'val_f1', but must be one of .* or a cost of the model: params"):
        quick(model_fn=sized, space=SPACE, metric=["val_loss", "val_f1"])
    sweep = SweepConfig(constraints={"val_f1": (0.5, None)})
    told = r"`sweep\.constraints` is 'val_f1', but must be one of \[.*\], or a cost of the model: params, macs, "
    with pytest.raises(ValueError, match=told):
        quick(model_fn=sized, space=SPACE, sweep=sweep)
    first = SweepConfig(first=[{"width": 64}], constraints={"params": (None, 2500)})
    with pytest.raises(ValueError, match=r"`sweep\.first\[0\]` is .* but must be one that meets `sweep\.constraints`"):
        quick(model_fn=sized, space=SPACE, sweep=first)


def test_a_function_of_the_users_reports_all_metrics(quick: Quick) -> None:
    def train(worker: Any) -> None:
        worker.report({"val_loss": 1.0, "train_loss": 1.0}, {"model": sized(worker.config).state_dict()})

    asked: dict[str, Any] = {"metric": ["val_loss", "val_accuracy"], "mode": ["min", "max"]}
    with pytest.raises(AllTrialsFailed, match="the number 'val_accuracy', which is `tune`'s `metric`"):
        quick(model_fn=sized, space=SPACE, **asked, train=train, loss_fn=nn.functional.cross_entropy)
