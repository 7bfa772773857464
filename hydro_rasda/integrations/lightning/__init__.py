"""Tuning for users of Lightning: steps and optimizers of a `LightningModule` are used unchanged."""

from hydro_rasda.integrations.lightning.tune import LightningResult, tune_module

__all__ = ["LightningResult", "tune_module"]
