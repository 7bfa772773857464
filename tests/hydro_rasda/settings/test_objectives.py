from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from hydro_rasda import SweepConfig
from hydro_rasda.settings.config import TuneConfig
from hydro_rasda.settings.objectives import Comparison, bounds_of, functions_of, split_metrics


def test_one_metric_has_no_objectives() -> None:
    assert split_metrics("val_loss", "min") == ("val_loss", "min", ())
    comparison = TuneConfig().comparison
    assert not comparison.by_place
    assert (comparison.costs, comparison.trained) == ((), ("val_loss",))


def test_the_first_metric_of_training_stands_for_all() -> None:
    objectives = (("macs", "min"), ("val_accuracy", "max"), ("val_loss", "min"))
    names, modes = ["macs", "val_accuracy", "val_loss"], ["min", "max", "min"]
    assert split_metrics(names, modes) == ("val_accuracy", "max", objectives)
    assert split_metrics(["macs", "val_loss"], "min")[2] == (("macs", "min"), ("val_loss", "min"))


@pytest.mark.parametrize(
    ("metric", "mode", "told"),
    [
        (["val_loss"], "min", "`metric` is .* a name, or a list of two or more different ones"),
        (["val_loss", "val_loss"], "min", "`metric` is .* a list of two or more different ones"),
        ([1, 2], "min", "`metric` is .* a name, or a list"),
        (["macs", "params"], "min", "`metric` is .* a metric that training measures, such as 'val_loss'"),
        ("macs", "min", "`metric` is 'macs', but must be the name of a metric that training measures"),
        (["val_loss", "macs"], ["min"], "`mode` is .* or a list of 2 of them"),
        (["val_loss", "macs"], ["min", "least"], "`mode` is 'least'"),
    ],
)
def test_lists_that_are_refused(metric: Any, mode: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        split_metrics(metric, mode)


def fits(config: Mapping[str, Any]) -> bool:
    return bool(config["lr"] < 1)


def test_constraints_are_bounds_and_functions() -> None:
    both: Any = {"macs": (None, 1e9), "val_gap": [0, 1], "small": fits}
    assert bounds_of(both) == {"macs": (None, 1e9), "val_gap": (0, 1)}
    assert functions_of(both) == {"sweep.constraints['small']": fits}
    assert (bounds_of(fits), functions_of(fits)) == ({}, {"sweep.constraints": fits})
    assert (bounds_of(None), functions_of(None)) == ({}, {})
    comparison = TuneConfig(sweep=SweepConfig(constraints=both)).comparison
    assert comparison.by_place
    assert (comparison.costs, comparison.trained) == (("macs",), ("val_loss", "val_gap"))


@pytest.mark.parametrize(
    ("constraints", "told"),
    [
        (3, r"`sweep\.constraints` is 3, but must be None, a dict such as"),
        ({"macs": 3}, r"`sweep\.constraints\['macs'\]` is 3, but must be \(lowest, highest\), or a function"),
        ({"macs": (2, 1)}, r"`sweep\.constraints\['macs'\]` is \(2, 1\), but must be a pair"),
        ({"macs": (None, None)}, r"a pair \(lowest, highest\) of finite numbers"),
        ({"macs": (0, math.inf)}, r"a pair \(lowest, highest\) of finite numbers"),
        ({3: (0, 1)}, "a dict whose keys are names"),
        (lambda: True, r"`sweep\.constraints` is <function"),
    ],
)
def test_constraints_that_are_refused(constraints: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        SweepConfig(constraints=constraints)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"stop_at": 0.1, "objectives": (("val_loss", "min"), ("macs", "min"))}, "`stop_at` is 0.1, but must be None"),
        (
            {"stop_at": 0.1, "sweep": SweepConfig(constraints={"val_gap": (None, 1.0)})},
            r"`stop_at` is 0.1, but must be None where .*, or `sweep\.constraints` bounds a metric of training",
        ),
        ({"sweep": SweepConfig(rule="epsilon-net")}, r"`sweep\.rule` is 'epsilon-net', but must be another one"),
    ],
)
def test_settings_that_do_not_go_together(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        TuneConfig(**arguments)


def test_a_bound_of_a_cost_goes_with_stop_at() -> None:
    TuneConfig(stop_at=0.1, sweep=SweepConfig(constraints={"macs": (None, 1.0)}))


def test_bounds_alone_have_feasible_trials_win() -> None:
    comparison = Comparison((("val_loss", "min"),), {"val_gap": (None, 0.1), "macs": (None, 9.0)})
    values = {
        0: {"val_loss": 0.1, "val_gap": 0.3, "macs": 5.0},
        1: {"val_loss": 0.9, "val_gap": 0.1, "macs": 5.0},
        2: {"val_loss": 0.8, "val_gap": 0.0, "macs": 5.0},
        3: {"val_loss": math.nan, "val_gap": 0.0, "macs": 5.0},
    }
    places = comparison.places(values)
    assert (places[2], places[1], places[0], math.isnan(places[3])) == (0, 1, 2, True)
    assert comparison.best({0: values[0], 1: values[1], 2: values[2]}) == [1, 2]
    assert comparison.best({0: values[0]}) == [0]  # none keeps them
    assert comparison.front(values) == [2]


def test_workers_get_the_bounds_alone() -> None:
    constraints: dict[str, tuple[None, float] | Callable[..., bool]] = {"macs": (None, 1.0), "own": fits}
    kept = TuneConfig(sweep=SweepConfig(constraints=constraints)).plain().sweep.constraints
    assert kept == {"macs": (None, 1.0)}


def test_a_trial_without_a_value_does_not_empty_the_front() -> None:
    """It alone keeps the bound."""
    comparison = Comparison((("val_loss", "min"), ("val_auc", "max")), {"val_gap": (None, 0.1)})
    values = {
        0: {"val_loss": 0.1, "val_auc": math.nan, "val_gap": 0.0},
        1: {"val_loss": 0.2, "val_auc": 0.9, "val_gap": 0.2},
        2: {"val_loss": 0.1, "val_auc": 0.95, "val_gap": 0.3},
    }
    assert comparison.front(values) == [1]
    assert comparison.front({0: values[0]}) == []
