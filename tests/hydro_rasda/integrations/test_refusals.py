"""Hooks, settings, callbacks and loaders of Lightning, one by one: each that is not followed is told."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

from hydro_rasda.integrations.lightning.refusals import HOOKS, unfollowed, unfollowed_by, unfollowed_loader

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


class Plain(pl.LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any: ...

    def validation_step(self, batch: Any, batch_idx: int) -> Any: ...

    def configure_optimizers(self) -> Any: ...


@pytest.mark.parametrize("hook", HOOKS)
def test_each_hook_that_a_module_overrides(hook: str) -> None:
    module: Any = type("Own", (Plain,), {hook: lambda *given: None})()
    assert unfollowed(module) == [f"Own.{hook}(): it is overridden"]


def test_modules_without_a_step_or_with_an_optimization_of_their_own() -> None:
    assert unfollowed(Plain()) == []
    manual = Plain()
    manual.automatic_optimization = False
    assert unfollowed(manual) == ["Plain: its optimization is manual (`automatic_optimization=False`)"]
    steps = ("training_step", "validation_step", "configure_optimizers")
    assert unfollowed(pl.LightningModule()) == [f"LightningModule.{step}(): it is missing" for step in steps]


FOLLOWED: dict[str, Any] = {
    "max_epochs": 3,
    "max_steps": -1,
    "min_epochs": None,
    "min_steps": None,
    "max_time": None,
    "limit_train_batches": 1.0,
    "limit_val_batches": 1.0,
    "overfit_batches": 0.0,
    "fast_dev_run": False,
    "accumulate_grad_batches": 1,
    "reload_dataloaders_every_n_epochs": 0,
    "gradient_clip_val": 1.0,
    "gradient_clip_algorithm": None,
    "precision": "32-true",
    "callbacks": [],
}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, []),
        ({"min_epochs": 1, "overfit_batches": 0, "precision": "bf16-mixed", "callbacks": [ModelCheckpoint()]}, []),
        ({"gradient_clip_val": None, "gradient_clip_algorithm": "value"}, []),
        *(
            ({name: value}, [f"Trainer({name}={value!r})"])
            for name, value in {
                "max_steps": 100,
                "min_epochs": 2,
                "min_steps": 10,
                "max_time": "00:12:00:00",
                "limit_train_batches": 0.5,
                "limit_val_batches": 1,
                "overfit_batches": 0.1,
                "fast_dev_run": True,
                "reload_dataloaders_every_n_epochs": 1,
            }.items()
        ),
        ({"accumulate_grad_batches": 2}, ["Trainer(accumulate_grad_batches=2): use the key `accumulate` of the space"]),
        ({"gradient_clip_algorithm": "value"}, ["Trainer(gradient_clip_algorithm='value'): norms are clipped"]),
        ({"max_epochs": None}, ["Trainer(max_epochs=None): a number of epochs >= 1"]),
        ({"max_epochs": 0}, ["Trainer(max_epochs=0): a number of epochs >= 1"]),
        ({"max_epochs": 1}, []),
        ({"precision": 64}, ["Trainer(precision=64): one of 32-true, 32, bf16-mixed, 16-mixed"]),
        ({"callbacks": [EarlyStopping("val_loss")]}, ["EarlyStopping: a callback"]),
    ],
    ids=lambda changes: " ".join(changes) if isinstance(changes, dict) else "",
)
def test_each_setting_of_a_trainer(changes: dict[str, Any], told: list[str]) -> None:
    assert unfollowed_by(SimpleNamespace(**{**FOLLOWED, **changes})) == told


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(())


def test_loaders_that_cannot_be_made_again() -> None:
    data = TensorDataset(torch.ones(4))
    assert unfollowed_loader("it", DataLoader(data, 2)) == unfollowed_loader("it", DataLoader(data, shuffle=True)) == []
    assert unfollowed_loader("it", [data]) == ["it: a list, but must be one DataLoader"]
    assert unfollowed_loader("it", DataLoader(Endless(), 2)) == ["it: its data set has no length"]
    assert unfollowed_loader("it", DataLoader(TensorDataset(torch.ones(0)), 2)) == ["it: its data set is empty"]
    own = ["it: it has a sampler of its own, which other batch sizes would need, too"]
    assert unfollowed_loader("it", DataLoader(data, 2, sampler=SubsetRandomSampler([0, 1]))) == own
    assert unfollowed_loader("it", DataLoader(data, batch_size=None)) == own
