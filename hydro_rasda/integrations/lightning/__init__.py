"""Tuning for users of Lightning: a `LightningModule`'s steps and optimizers as they are."""

from hydro_rasda.integrations.lightning.tune import LightningResult, tune_module

__all__ = ["LightningResult", "tune_module"]
