from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from hydro_rasda import SweepConfig
from hydro_rasda.heats.cost_limits import Costs, all_fit
from hydro_rasda.problem.problem import Problem
from hydro_rasda.run.run_folder import Store
from hydro_rasda.run.state import Run

BUILT: list[int] = []


def sized(config: dict[str, Any]) -> nn.Module:
    BUILT.append(config["width"])
    if config["width"] > 100:
        raise RuntimeError("too wide")
    return nn.Sequential(nn.Linear(64, config["width"]), nn.Linear(config["width"], 10))


def keeps(config: dict[str, Any]) -> nn.Module:
    model = sized(config)
    model.config = config  # type: ignore[assignment]
    return model


def macs(width: int) -> dict[str, float]:
    return {"macs": 74.0 * width}


@pytest.fixture
def asked(problem: Problem) -> Problem:
    BUILT.clear()
    return replace(problem.with_settings(sweep=SweepConfig(constraints={"macs": (None, 1000)})), model_fn=sized)


def opened(problem: Problem, path: Path) -> Run:
    return Run(problem, Store.open(path / "run", {}, "auto"))


def test_a_structure_is_measured_once_in_the_life_of_a_run(asked: Problem, tmp_path: Path) -> None:
    configs = [{"lr": lr, "width": width} for width in (4, 8) for lr in (0.1, 0.2, 0.3)]
    run = opened(asked, tmp_path)
    with run.store:
        costs = Costs(run)
        assert [costs.of(config) for config in configs] == [macs(4)] * 3 + [macs(8)] * 3
        assert BUILT == [4, 8]
    run = opened(asked, tmp_path)
    with run.store:
        assert [Costs(run).of(config) for config in configs] == [macs(4)] * 3 + [macs(8)] * 3
    assert BUILT == [4, 8]


def test_functions_of_one_name_are_measured_apart(asked: Problem, tmp_path: Path) -> None:
    builds = [lambda: sized({"width": 4}), lambda: sized({"width": 8})]
    run = opened(replace(asked, model_fn=lambda config: config["build"]()), tmp_path)
    with run.store:
        assert [Costs(run).of({"lr": 0.1, "build": build}) for build in builds] == [macs(4), macs(8)]


def test_batches_in_other_parts_are_measured_anew(asked: Problem, tmp_path: Path) -> None:
    """Memory and time of a step depend on them."""
    run = opened(asked, tmp_path)
    with run.store:
        costs = Costs(run)
        for lr, parts in ((0.1, 1), (0.1, 8), (0.2, 8)):
            costs.of({"lr": lr, "width": 8, "accumulate": parts})
    assert BUILT == [8, 8]


def test_a_model_that_keeps_its_configuration_is_measured_for_each(asked: Problem, tmp_path: Path) -> None:
    run = opened(replace(asked, model_fn=keeps), tmp_path)
    with run.store:
        costs = Costs(run)
        assert [costs.of({"lr": lr, "width": 4}) for lr in (0.1, 0.2)] == [macs(4)] * 2


def test_a_model_that_cannot_be_built_breaks_every_bound(asked: Problem, tmp_path: Path) -> None:
    run = opened(asked, tmp_path)
    with run.store:
        fits = all_fit({"macs": (None, 1e12)}, Costs(run))
        assert fits is not None
        with pytest.warns(UserWarning, match="a configuration cannot be measured, and so breaks the bounds on macs: "):
            assert not fits({"lr": 0.1, "width": 101})
        assert fits({"lr": 0.1, "width": 8})


def test_all_constraints_hold_at_once(asked: Problem, tmp_path: Path) -> None:
    run = opened(asked, tmp_path)
    with run.store:
        constraints: Any = {"macs": (None, 1000), "fast": lambda config: config["lr"] > 0.1, "val_loss": (None, 1.0)}
        fits = all_fit(constraints, Costs(run))
        assert fits is not None
        found = [fits({"lr": lr, "width": width}) for lr in (0.1, 0.2) for width in (8, 80)]
        assert found == [False, False, True, False]
        assert 80 not in BUILT[:1]  # one that a function refuses is not built


def test_what_only_training_tells_constrains_no_configuration() -> None:
    assert all_fit({"val_gap": (None, 1.0)}) is None
    assert all_fit(None) is None
    assert all_fit({"macs": (None, 1.0)}) is None  # not known yet


def test_a_function_that_raises_is_named() -> None:
    fits = all_fit(lambda config: bool(config["depth"] < 3))
    assert fits is not None
    with pytest.raises(ValueError, match=r"`sweep\.constraints` fails for {'lr': 0.1} with KeyError: 'depth'"):
        fits({"lr": 0.1})


@pytest.mark.parametrize("returned", ["no", None, 1, [True]])
def test_a_function_that_returns_no_bool_is_named(returned: Any) -> None:
    """A text is true, and a function without `return` refuses all."""
    fits = all_fit({"small": lambda config: returned})
    assert fits is not None
    with pytest.raises(
        ValueError, match=rf"`sweep\.constraints\['small'\]\(config\)` is {re.escape(repr(returned))}, but"
    ):
        fits({"lr": 0.1})


def test_a_function_may_return_a_bool_of_numpy() -> None:
    below: Any = lambda config: np.float64(config["lr"]) < 1  # noqa: E731
    fits = all_fit(below)
    assert fits is not None
    assert fits({"lr": 0.1})


def test_a_function_cannot_change_a_configuration() -> None:
    fits, config = all_fit(lambda config: config.pop("lr") > 0), {"lr": 0.1}
    assert fits is not None
    assert fits(config)
    assert config == {"lr": 0.1}
