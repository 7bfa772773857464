"""Tune LoRA adapters, their rank included, over one frozen Llama that counts by ones, until it counts by twos."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from hydro_rasda import RaceConfig, choice, loguniform, uniform
from hydro_rasda.integrations.peft import tune_adapters

TOKENS = 32


def counting_by(step: int) -> Tensor:
    """Return one sentence for each token with which a sentence can begin."""
    return (torch.arange(TOKENS)[:, None] + step * torch.arange(8)) % TOKENS


def objective(model: Any, batch: tuple[Tensor]) -> dict[str, Tensor]:
    """Return the loss of predicting the next token."""
    (tokens,) = batch
    logits = model(input_ids=tokens, use_cache=False).logits
    return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())}


def pretrained() -> nn.Module:
    """Train a small Llama that counts by ones."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=TOKENS, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    model: nn.Module = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(100):
        optimizer.zero_grad()
        objective(model, (counting_by(1),))["loss"].backward()
        optimizer.step()
    return model


def main() -> None:
    """Tune, then print the best rank and its loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", default="runs", help="folder of the run")
    arguments = parser.parse_args()

    data = counting_by(2)
    result = tune_adapters(
        pretrained(),
        LoraConfig(target_modules=["q_proj", "v_proj", "up_proj", "down_proj"]),
        {
            "r": choice([1, 2, 4, 8]),
            "lora_alpha": choice([8, 16, 32]),
            "lora_dropout": uniform(0, 0.2),
            "lr": loguniform(1e-3, 1e-1),
            "batch_size": 8,
        },
        train_data=(data,),
        val_data=(data[::4],),
        objective=objective,
        num_samples=16,
        max_t=27,
        race=RaceConfig(top_k=2),
        storage_path=arguments.runs,
        name="adapters",
    )
    trainable = sum(p.numel() for name, p in result.model().named_parameters() if "lora_" in name)
    print(f"best rank {result.lora.r}, {trainable} parameters: validation loss {result.best_metric:.4f}")


if __name__ == "__main__":
    main()
