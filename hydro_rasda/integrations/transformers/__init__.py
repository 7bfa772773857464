"""Tuning for users of `transformers.Trainer`. `TrainingArguments` have the same meaning as for `Trainer`."""

from hydro_rasda.integrations.transformers.tune import TrainerResult, tune_trainer

__all__ = ["TrainerResult", "tune_trainer"]
