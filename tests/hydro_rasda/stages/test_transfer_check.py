"""The transfer check compares surrogates with real full-size trainings, and says what it found."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from hydro_rasda import SweepConfig, TuneResult, choice, loguniform, uniform
from tests.hydro_rasda.models import Config, mlp

Quick = Callable[..., TuneResult]
ROOM = Path(__file__).parents[1]


class Gain(nn.Module):
    """Multiplies what comes in."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


def learns_only_wide(config: Config, width_ratio: float = 1.0) -> nn.Module:
    """At full width the gain helps; below it the gain is turned around, so that surrogates rank upside down."""
    gain = config["gain"] if width_ratio == 1 else 1 - config["gain"]
    return nn.Sequential(mlp(config, width_ratio), Gain(3 * gain))


def test_no_check_unless_asked_for(quick: Quick) -> None:
    assert quick().transfer is None


def test_check_at_full_width_agrees_with_itself(quick: Quick) -> None:
    """The surrogates are the targets: the same initial weights and batches, fused or not, rank alike."""
    result = quick(sweep=SweepConfig(surrogate=1, check_transfer=True))
    assert result.transfer is not None
    assert result.transfer.rho == pytest.approx(1.0)
    assert result.transfer.regret[1] == pytest.approx(0.0, abs=1e-4)
    assert result.transfer.verdict == "trusted"


def test_what_two_seeds_of_one_configuration_differ_by_counts_as_no_regret(quick: Quick, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transfer = quick(sweep=SweepConfig(check_transfer=True)).transfer
    lines = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    values = {line["key"]: line["value"] for line in lines if line.get("key", "").startswith("check/")}
    (again,) = (key for key in values if key.endswith("/again"))
    spread = abs(values[again] - values[again.replace("/again", "/first")])
    assert transfer is not None
    assert transfer.tolerance == pytest.approx(spread)
    assert spread > 0


def test_a_ranking_upside_down_is_not_trusted(quick: Quick) -> None:
    space = {"lr": choice([0.01]), "optimizer": "sgd", "gain": uniform(0.0, 1.0)}
    with pytest.warns(UserWarning, match="transfer to full size is") as told:
        result = quick(model_fn=learns_only_wide, space=space, num_samples=12, sweep=SweepConfig(check_transfer=True))
    assert {Path(warning.filename) for warning in told} == {ROOM / "conftest.py"}, "it names the call of `tune`"
    assert result.transfer is not None
    assert result.transfer.rho < 0.5
    assert result.transfer.verdict != "trusted"


def test_the_check_is_a_part_of_the_run(quick: Quick) -> None:
    """A resumed run reads it, and the verdict does not depend on it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, again = quick(sweep=SweepConfig(check_transfer=True)), quick(sweep=SweepConfig(check_transfer=True))
    assert first.transfer == again.transfer
    assert first.transfer is not None
    assert not math.isnan(first.transfer.rho)


def test_it_is_said_where_surrogates_decide_nothing(quick: Quick) -> None:
    def told(**settings: Any) -> list[str]:
        said: list[str] = []
        quick(callbacks=[lambda event: said.append(getattr(event, "text", ""))], max_t=1, **settings)
        return [text for text in said if "`sweep.surrogate=1`" in text]

    (few,) = told(num_samples=2, name="few")
    assert few.startswith(
        "all 2 configurations can become finalists, whatever their surrogates say: `sweep.surrogate=1`"
    )
    assert not told(num_samples=2, sweep=SweepConfig(surrogate=1), name="wide")
    assert not told(num_samples=3, name="more")


def test_regularizers_tuned_on_a_narrow_surrogate_are_warned_of(quick: Quick) -> None:
    space = {"lr": loguniform(1e-3, 0.3), "weight_decay": loguniform(1e-6, 1e-2), "dropout": 0.1}
    with pytest.warns(
        UserWarning, match="the best weight_decay at 0.125 of the width may not suit the full model"
    ) as told:
        quick(space=space, sweep={"surrogate": 1 / 8})
    assert Path(told[0].filename) == ROOM / "conftest.py", "it names the call of `tune`"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quick(space=space, sweep=SweepConfig(surrogate=1 / 2), name="wider")
