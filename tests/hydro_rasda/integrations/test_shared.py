"""Parts of a call of `tune`, in the integrations."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from hydro_rasda import RaceConfig, SweepConfig, loguniform
from hydro_rasda.integrations.lightning import tune_module
from hydro_rasda.integrations.peft import tune_adapters
from hydro_rasda.integrations.shared import narrow_or_full, with_fresh_callbacks, without_default_ema
from hydro_rasda.integrations.transformers import tune_trainer

CALLS: dict[str, Callable[..., Any]] = {
    "tune_trainer": lambda **given: tune_trainer(nn.Identity, None, {}, train_dataset=[], eval_dataset=[], **given),
    "tune_module": lambda **given: tune_module(nn.Identity, {}, trainer=None, **given),  # type: ignore[arg-type]
    "tune_adapters": lambda **given: tune_adapters(nn.Identity(), None, {}, **given),
}


@pytest.mark.parametrize("name", CALLS)
def test_unknown_arguments_are_refused_before_all_else(name: str) -> None:
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'surrogate'"):
        CALLS[name](surrogate=0.5)


def test_nothing_is_averaged_unless_it_is_asked_for() -> None:
    assert without_default_ema(RaceConfig(top_k=2)) == RaceConfig(top_k=2, ema=0)
    assert without_default_ema(RaceConfig(ema=0.1)) == RaceConfig(ema=0.1)


def test_a_model_that_cannot_be_narrow_is_swept_at_full_width() -> None:
    class OfOneWidth(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    def example() -> torch.Tensor:
        return torch.ones(2, 8)

    asked = SweepConfig(surrogate=0.5, fusion=4)
    assert narrow_or_full(asked, nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), example) is asked
    with pytest.warns(
        UserWarning, match=r"swept at its full width \(`sweep=SweepConfig\(surrogate=1\)`\), not at 0.5: "
    ):
        assert narrow_or_full(asked, OfOneWidth(), example) == SweepConfig(surrogate=1, fusion=4)


def test_callbacks_that_have_a_copy_are_copied() -> None:
    lock, stateful = threading.Lock(), [1]
    single: Callable[..., Any] = partial(dict, callbacks=lock)
    made: dict[str, Any] = with_fresh_callbacks(partial(dict, callbacks=[stateful, lock], max_epochs=3))()
    assert made == {"callbacks": [stateful, lock], "max_epochs": 3}
    assert made["callbacks"][0] is not stateful
    assert with_fresh_callbacks(single)() == {"callbacks": [lock]}
    assert with_fresh_callbacks(dict) is dict


@pytest.mark.parametrize("surrogate", [0.5, 0.25])
def test_adapters_are_swept_over_the_whole_base(surrogate: float) -> None:
    sweep, space = SweepConfig(surrogate=surrogate), {"lr": loguniform(1e-3, 0.1)}
    with pytest.raises(ValueError, match=r"`sweep\.surrogate` is .*, but must be 1, or left out: the base is trained"):
        tune_adapters(nn.Identity(), None, space, sweep=sweep)
