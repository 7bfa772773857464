"""What each integration asks `tune` for, as content: run as a module, this prints it."""

from __future__ import annotations

import contextlib
import importlib
import json
import tempfile
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2LMHeadModel, TrainingArguments

from hydro_rasda import SweepConfig, choice, loguniform
from hydro_rasda.integrations.lightning import tune_module
from hydro_rasda.integrations.peft import adapters, tune_adapters
from hydro_rasda.integrations.transformers import tune_trainer
from hydro_rasda.run.fingerprint import content, data_digest
from hydro_rasda.space.space import describe
from tests import zoo

TOKENS = torch.arange(8 * 6).reshape(8, 6) % 11
TEXT = [{"input_ids": row, "labels": row} for row in TOKENS]
LORA = LoraConfig(r=2, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    return zoo.gpt2()


def next_token(model: Any, batch: Tensor) -> dict[str, Tensor]:
    logits = model(input_ids=batch, use_cache=False).logits
    return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())}


def hits(prediction: Any) -> dict[str, float]:
    return {"hits": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}


class Classifier(pl.LightningModule):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.rate = nn.Linear(8, 3), config["rate"]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.body(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.body(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), self.rate)


def with_trainer(model: Any, space: dict[str, Any], **options: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(output_dir=folder, use_cpu=True, report_to="none", num_train_epochs=2)
        tune_trainer(
            model, args, space, train_dataset=TEXT, eval_dataset=TEXT[:4], sweep=SweepConfig(surrogate=1), **options
        )


def with_lightning() -> None:
    data = DataLoader(TensorDataset(torch.ones(8, 8), torch.arange(8) % 3), 4)
    silent = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    off: dict[str, Any] = dict.fromkeys(silent, False)
    trainer = pl.Trainer(max_epochs=2, accelerator="cpu", **off)
    space = {"rate": loguniform(1e-3, 1e-1)}
    tune_module(
        Classifier, space, trainer=trainer, train_dataloaders=data, val_dataloaders=data, sweep=SweepConfig(surrogate=1)
    )


def with_peft() -> None:
    space = {"r": choice([1, 2]), "lr": loguniform(1e-2, 1e-1), "batch_size": 4}
    tune_adapters(gpt2(), LORA, space, train_data=(TOKENS,), val_data=(TOKENS[:4],), objective=next_token)


RATE = {"learning_rate": loguniform(1e-3, 1e-1)}
CALLS: dict[str, tuple[str, Callable[[], None]]] = {
    "model_init": ("transformers", lambda: with_trainer(gpt2, RATE, compute_metrics=hits)),
    "PretrainedConfig": (
        "transformers",
        lambda: with_trainer(gpt2().config, {**RATE, "attn_pdrop": choice([0.0, 0.1])}, model_class=GPT2LMHeadModel),
    ),
    "adapters and Trainer": ("transformers", lambda: with_trainer(adapters(gpt2(), LORA), RATE)),
    "peft": ("peft", with_peft),
    "lightning": ("lightning", with_lightning),
}


class Asked(Exception):
    """In place of a run."""


def asked(integration: str, call: Callable[[], None]) -> dict[str, Any]:
    """What `tune` is called with."""
    found: dict[str, Any] = {}

    def tune(model_fn: Any, space: Any, **arguments: Any) -> None:
        found.update(arguments, model_fn=model_fn, space=space)
        raise Asked

    package = f"hydro_rasda.integrations.{integration}"
    module = importlib.import_module(package if integration == "peft" else f"{package}.tune")
    with patch.object(module, "tune", tune), contextlib.suppress(Asked):
        call()
    return found


def identity(arguments: dict[str, Any]) -> dict[str, Any]:
    functions = {name: content(arguments.get(name)) for name in ("model_fn", "objective", "metrics")}
    data = {name: data_digest(arguments[name], 4) for name in ("train_data", "val_data")}
    return {**functions, **data, "space": describe(arguments["space"]), "values": content(arguments["space"])}


if __name__ == "__main__":
    print(json.dumps({name: identity(asked(*call)) for name, call in CALLS.items()}))
