"""The result of a search, for `Trainer`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import Trainer, TrainingArguments

from hydro_rasda.integrations.result import LibraryResult
from hydro_rasda.integrations.transformers.space import with_values
from hydro_rasda.results.result import TuneResult


@dataclass(frozen=True, repr=False)
class TrainerResult(LibraryResult):
    """The outcome of `tune_trainer`: a `TuneResult`, with what `Trainer` needs besides.

    Attributes:
        args: The training arguments, with the best values put in; `best_config` has them by the library's own names,
            and what the model was built from.
    """

    args: TrainingArguments
    _inputs: dict[str, Any] = field(default_factory=dict)
    _finish: Callable[[nn.Module], nn.Module] | None = None

    def model(self) -> nn.Module:
        """`best_model()`, whose LoRA adapters, where it has any from `peft.adapters`, have their own ranks."""
        model = self.best_model()
        return model if self._finish is None else self._finish(model)

    def trainer(self, **arguments: Any) -> Trainer:
        """A `Trainer` with the trained model, the best arguments, and the data, collator and metrics that were given.

        `evaluate()` and `predict()` work at once; `train()` would go on from the trained weights.

        Args:
            arguments: Others of `Trainer`, or in place of those.
        """
        return Trainer(**{"model": self.model(), "args": self.args, **self._inputs, **arguments})


def make_trainer_result(
    tuned: TuneResult,
    args: TrainingArguments,
    inputs: dict[str, Any],
    finish: Callable[[nn.Module], nn.Module] | None,
) -> TrainerResult:
    """Put the best configuration into a copy of the arguments."""
    best = copy.copy(args)
    for name, value in with_values(args, tuned.best_config).items():
        setattr(best, name, value)
    return TrainerResult(**vars(tuned), args=best, _inputs=inputs, _finish=finish)
