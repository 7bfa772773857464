"""Tune the training arguments of a small Llama, made from its configuration, and hand the result to `Trainer`."""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, TrainingArguments

from hydro_rasda import RaceConfig, SweepConfig, choice, loguniform
from hydro_rasda.integrations.transformers import tune_trainer

TOKENS = 32


def sentences(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Return sentences that each count up by their own step, modulo `TOKENS`, so that the next token can be learned."""
    draw = torch.Generator().manual_seed(seed)
    starts, steps = (torch.randint(low, TOKENS, (count, 1), generator=draw) for low in (0, 1))
    tokens = (starts + steps * torch.arange(12)) % TOKENS
    return [{"input_ids": row, "labels": row} for row in tokens]


def main() -> None:
    """Tune, then have `Trainer` evaluate the model that was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", default="runs", help="folder of the run")
    arguments = parser.parse_args()

    config = LlamaConfig(
        vocab_size=TOKENS, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8
    )
    args = TrainingArguments(
        output_dir=arguments.runs,
        num_train_epochs=9,
        per_device_train_batch_size=32,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        load_best_model_at_end=True,
        save_strategy="epoch",
        eval_strategy="epoch",
        report_to="none",
        use_cpu=True,
    )
    result = tune_trainer(
        config,
        args,
        {
            "learning_rate": loguniform(1e-4, 1e-1),
            "weight_decay": loguniform(1e-4, 1),
            "max_grad_norm": choice([0.3, 1]),
        },
        model_class=AutoModelForCausalLM,
        train_dataset=sentences(512, seed=0),
        eval_dataset=sentences(128, seed=1),
        sweep=SweepConfig(surrogate=1 / 4),
        num_samples=16,
        race=RaceConfig(top_k=2),
        name="trainer",
    )
    loss = result.trainer().evaluate()["eval_loss"]
    print(f"best learning rate {result.args.learning_rate:.2g}: validation loss {loss:.4f}")


if __name__ == "__main__":
    main()
