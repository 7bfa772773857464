"""Tune a LightningModule on scikit-learn's digits, as it is: its steps, its optimizer, its schedule."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hydro_rasda import choice, loguniform
from hydro_rasda.integrations.lightning import tune_module

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Classifier(LightningModule):
    """A 3-layer MLP, trained over one cycle of the learning rate."""

    def __init__(self, learning_rate: float, weight_decay: float, width: int = 256) -> None:
        super().__init__()
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.body = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map pixels [N, 64] to logits [N, 10]."""
        logits: Tensor = self.head(self.body(x))
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log loss and accuracy."""
        logits = self(batch[0])
        self.log("val_loss", F.cross_entropy(logits, batch[1]))
        self.log("val_acc", (logits.argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> Any:
        """Return AdamW, and a schedule of one cycle."""
        optimizer = torch.optim.AdamW(self.parameters(), self.learning_rate, weight_decay=self.weight_decay)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.learning_rate, int(self.trainer.estimated_stepping_batches), cycle_momentum=False
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def module_fn(config: dict[str, Any]) -> Classifier:
    """Build the module of a configuration."""
    return Classifier(config["learning_rate"], config["weight_decay"])


def main() -> None:
    """Tune, then have Lightning validate the module that was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", default="runs", help="folder of the run")
    arguments = parser.parse_args()

    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    validation = DataLoader(TensorDataset(x[1257:], y[1257:]), 128)
    result = tune_module(
        module_fn,
        {
            "learning_rate": loguniform(1e-4, 1e-1),
            "weight_decay": loguniform(1e-4, 1e-1),
            "batch_size": choice([32, 64]),
        },
        trainer=Trainer(max_epochs=9, gradient_clip_val=1.0, **QUIET),
        train_dataloaders=DataLoader(TensorDataset(x[:1257], y[:1257]), 32, shuffle=True),
        val_dataloaders=validation,
        monitor="val_acc",
        mode="max",
        num_samples=32,
        storage_path=arguments.runs,
        name="lightning",
    )
    (measured,) = Trainer(**QUIET).validate(result.module(), validation, verbose=False)
    print(f"best learning rate {result.config['learning_rate']:.2g}: validation accuracy {measured['val_acc']:.4f}")


if __name__ == "__main__":
    main()
