"""Tuning for users of `transformers.Trainer`: its `TrainingArguments` mean here what they mean there."""

from hydro_rasda.integrations.transformers.tune import TrainerResult, tune_trainer

__all__ = ["TrainerResult", "tune_trainer"]
