"""`tune_module(trainer=partial(Trainer, ...))`: Lightning's trainer fits a module in every heat, as it would alone."""

from __future__ import annotations

import logging
import re
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from hydro_rasda import RaceConfig, SweepConfig, choice, loguniform
from hydro_rasda.integrations.lightning import LightningResult, tune_module

pytestmark = [
    pytest.mark.usefixtures("one_process"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"),
]

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(48, 8, generator=GENERATOR, dtype=torch.float64)
TRAIN, VALIDATION = DataLoader(TensorDataset(X), 8), DataLoader(TensorDataset(X[:16]), 8)
EPOCHS = 6


class Autoencoder(pl.LightningModule):
    """Two optimizers by hand: the encoder's, with a schedule, and the decoder's, which takes two steps to its one."""

    def __init__(self, config: dict[str, Any], width_ratio: float = 1.0) -> None:
        super().__init__()
        self.automatic_optimization = False
        width = int(32 * width_ratio)
        self.encoder = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.decoder = nn.Linear(width, 8)
        self.config = config

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.decoder(self.encoder(batch[0])), batch[0])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        encoder, decoder = optimizers
        for steps in ([decoder], [decoder, encoder]):
            for each in steps:
                each.zero_grad()
            self.manual_backward(self.loss(batch))
            for each in steps:
                each.step()

    def on_train_epoch_end(self) -> None:
        schedule: Any = self.lr_schedulers()
        schedule.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/mse", self.loss(batch))

    def configure_optimizers(self) -> Any:
        encoder = torch.optim.Adam(self.encoder.parameters(), self.config["rate"])
        decoder = torch.optim.SGD(self.decoder.parameters(), 0.1, momentum=0.5)
        return [encoder, decoder], [CosineAnnealingLR(encoder, EPOCHS)]


class Rates(pl.Callback):
    """A callback of the user's: the encoder's learning rates by its width, of its optimizer and of its schedule."""

    def __init__(self, seen: dict[int, tuple[list[float], list[float]]]) -> None:
        self.seen = seen

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        groups = trainer.optimizers[0].param_groups
        rates = [group["initial_lr"] for group in groups], pl_module.lr_schedulers().base_lrs
        self.seen[pl_module.decoder.in_features] = rates


def tuned(tmp_path: Path, space: dict[str, Any], module_fn: Any = Autoencoder, **options: Any) -> LightningResult:
    given: dict[str, Any] = {
        "trainer": partial(pl.Trainer, max_epochs=EPOCHS),
        "train_dataloaders": TRAIN,
        "val_dataloaders": VALIDATION,
        "monitor": "val/mse",
        "num_samples": 4,
        "sweep": SweepConfig(surrogate=1 / 4),
        "storage_path": tmp_path,
        "progress": False,
        "race": RaceConfig(top_k=2, keep="last"),
    }
    return tune_module(module_fn, space, **{**given, **options})


def double(config: dict[str, Any], width_ratio: float = 1.0) -> Autoencoder:
    return Autoencoder(config, width_ratio).double()


class OnPlateau(Autoencoder):
    """One optimizer, whose rate falls at each epoch that is not twice as good as the best one."""

    def __init__(self, config: dict[str, Any], width_ratio: float = 1.0) -> None:
        super().__init__(config, width_ratio)
        self.automatic_optimization = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # type: ignore[override]
        return self.loss(batch)

    def on_train_epoch_end(self) -> None:
        pass

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), self.config["rate"])
        scheduler = ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val/mse"}}


@pytest.mark.filterwarnings("ignore:the model's initial weights are the same from every seed")
@pytest.mark.parametrize("kind", [Autoencoder, OnPlateau])
def test_a_module_comes_to_the_weights_that_it_has_alone(
    kind: type[Autoencoder], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Over rungs, at each of which `fit` is left and resumed, without a message of Lightning's about the checkpoint."""
    start = {name: value.clone() for name, value in kind({"rate": 0.1}).double().state_dict().items()}

    def same(config: dict[str, Any], width_ratio: float = 1.0) -> Autoencoder:
        module = kind(config, width_ratio).double()
        if width_ratio == 1:
            module.load_state_dict(start)
        return module

    caplog.set_level(logging.INFO)
    result = tuned(tmp_path, {"rate": loguniform(1e-3, 1e-2)}, same)
    assert "weights_only" not in caplog.text
    alone = same(result.config)
    trainer = pl.Trainer(max_epochs=EPOCHS, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(alone, TRAIN, VALIDATION)
    for name, value in result.module().state_dict().items():
        torch.testing.assert_close(value, alone.state_dict()[name], rtol=0, atol=1e-12)
    assert result.best_metric == pytest.approx(float(trainer.callback_metrics["val/mse"]))
    assert result.metric == "val_mse"


def test_narrow_modules_have_the_rates_of_their_width_before_schedulers_read_them(tmp_path: Path) -> None:
    """For Adam, muP's rate of hidden matrices is inversely proportional to the width (Tensor Programs V, table 8)."""
    seen: dict[int, tuple[list[float], list[float]]] = {}

    def make(**given: Any) -> pl.Trainer:
        return pl.Trainer(max_epochs=EPOCHS, callbacks=[Rates(seen)], **given)

    tuned(tmp_path, {"rate": choice([0.002])}, double, trainer=make, num_samples=1)
    assert set(seen) == {8, 32}
    assert seen[32] == ([0.002], [0.002])
    for rates in seen[8]:
        assert sorted(rates) == [0.002, 0.008]


def test_patience_of_a_trial_ends_no_other(tmp_path: Path) -> None:
    """The first trial is best at once, so that its score would end the others, which only begin slowly."""
    stopping = pl.callbacks.EarlyStopping("val/mse", patience=2)
    left_out = pl.callbacks.LearningRateMonitor(), pl.callbacks.DeviceStatsMonitor(), pl.callbacks.TQDMProgressBar()
    saving = [pl.callbacks.ModelCheckpoint(tmp_path), *left_out]
    make = partial(pl.Trainer, max_epochs=EPOCHS, callbacks=[stopping, *saving])
    sweep = SweepConfig(surrogate=1 / 4, first=[{"rate": 1e-2}])
    result = tuned(
        tmp_path, {"rate": loguniform(1e-9, 1e-8)}, double, trainer=make, sweep=sweep, race=RaceConfig(top_k=4)
    )
    assert [record.epochs for record in result.trials if record.epochs]
    assert (stopping.wait_count, stopping.best_score.isinf().item()) == (0, True)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"trainer": lambda **_: None}, "`trainer` is 'NoneType', but must be a Trainer of `lightning.pytorch`"),
        ({"trainer": lambda: pl.Trainer()}, "makes one, but the call fails: TypeError"),
        ({"trainer": partial(pl.Trainer, max_epochs=-1)}, "`trainer` is 'max_epochs=-1', but must be one with epochs"),
        (
            {"trainer": partial(pl.Trainer, max_epochs=EPOCHS, check_val_every_n_epoch=2)},
            "`trainer` is 'check_val_every_n_epoch=2', but must be one that logs 'val/mse' after each epoch",
        ),
        ({"monitor": "val/loss"}, "val_loss"),
        ({"sweep": SweepConfig(rule="pbt")}, "`sweep.rule` is 'pbt', but must be another one where a trainer is run"),
        ({"trainer": 3}, "`trainer` is 3, but must be a Trainer of `lightning.pytorch`, or a function"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(tmp_path: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=re.escape(told)):
        tuned(tmp_path, {"rate": choice([0.002])}, double, num_samples=1, **options)


def test_without_a_width_the_sweep_is_of_the_full_width_and_says_so(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="swept at its full width .* give `module_fn` an argument `width_ratio`"):
        result = tuned(tmp_path, {"rate": choice([0.002])}, lambda config: Autoencoder(config).double(), num_samples=1)
    decoder: Any = result.module().decoder
    assert decoder.in_features == 32


@pytest.mark.slow
def test_on_ray_it_is_the_same(tmp_path: Path) -> None:
    space = {"rate": loguniform(1e-3, 1e-2)}
    here = tuned(tmp_path / "here", space, double)
    there = tuned(tmp_path / "there", space, double, backend="ray")
    assert (there.best_trial, there.best_metric) == (here.best_trial, here.best_metric)


def test_keys_of_the_space_are_the_modules_own(tmp_path: Path) -> None:
    """Values that the library would refuse if it read them."""
    space = {"rate": choice([0.002]), "schedule": "on plateau", "optimizer": choice(["one", "two"])}
    assert tuned(tmp_path, space, double, num_samples=1).config["schedule"] == "on plateau"


class Made(pl.LightningDataModule):
    """Makes its data when it is set up, as Lightning's guide does."""

    def setup(self, stage: str) -> None:
        self.data = TensorDataset(X)

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, 8)

    def val_dataloader(self) -> Any:
        return DataLoader(self.data, 8)


def test_the_same_call_goes_on_with_its_run_though_fit_writes_to_the_data_module(tmp_path: Path) -> None:
    given: dict[str, Any] = {"datamodule": Made(), "train_dataloaders": None, "val_dataloaders": None, "name": "run"}
    for count in (1, 2):
        result = tuned(tmp_path, {"rate": loguniform(1e-3, 1e-2)}, double, num_samples=count, **given)
        assert len(result.trials) == count
