"""`compute_metrics`, as `Trainer.evaluate` calls it: on the whole validation set, after each epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import EvalPrediction, TrainingArguments
from transformers.utils.generic import find_labels

from hydro_rasda.integrations.transformers.data import base_of
from hydro_rasda.objective import OUTPUTS, TARGETS

PREFIX = "eval_"


@dataclass(frozen=True)
class TrainerMetrics:
    """`metrics` of `tune`, of an `EvalPrediction`; names are those that `Trainer` gives, without its "eval_"."""

    compute_metrics: Callable[[EvalPrediction], Mapping[str, Any]]

    def __call__(self, outputs: Tensor, targets: Tensor) -> Mapping[str, Any]:
        predictions = outputs.float() if outputs.is_floating_point() and outputs.itemsize < 4 else outputs
        found = self.compute_metrics(EvalPrediction(predictions=predictions.numpy(), label_ids=targets.numpy()))
        return {name.removeprefix(PREFIX): value for name, value in found.items()}


@dataclass(frozen=True)
class Predictions:
    """Make the predictions and labels of a batch, which an objective returns for `TrainerMetrics`.

    Attributes:
        labels: `label_names`; None: those of the model's class.
        preprocess: `preprocess_logits_for_metrics`.
    """

    labels: tuple[str, ...] | None = None
    preprocess: Callable[[Tensor, Tensor], Tensor] | None = None

    def __call__(self, model: nn.Module, batch: Mapping[str, Any], returned: Any) -> Mapping[str, Tensor]:
        """Of a batch, for which a model returned this; ValueError if that is several tensors, or it has no labels."""
        base: Any = base_of(model)
        ignored = {"loss", *getattr(base.config, "keys_to_ignore_at_inference", ["past_key_values"])}
        if isinstance(returned, Mapping):
            outputs = {name: value for name, value in returned.items() if name not in ignored}
        else:
            outputs = {f"its output {i}": value for i, value in enumerate(returned) if i}
        names = find_labels(type(base)) if self.labels is None else self.labels
        labels = {name: batch.get(name) for name in names}
        one_each: list[Any] = [*outputs.values(), *labels.values()]
        if len(outputs) != 1 or len(labels) != 1 or not all(isinstance(value, Tensor) for value in one_each):
            told = (
                f"the model returns {', '.join(outputs) or 'nothing'} beside its loss, for labels {', '.join(labels)}"
            )
            raise ValueError(f"{told}; here `compute_metrics` is given one tensor of each")
        logits, target = one_each
        return {OUTPUTS: logits if self.preprocess is None else self.preprocess(logits, target), TARGETS: target}


def predictions_of(args: TrainingArguments, preprocess: Callable[[Tensor, Tensor], Tensor] | None) -> Predictions:
    """Return the `Predictions` that these arguments ask for."""
    return Predictions(None if args.label_names is None else tuple(args.label_names), preprocess)
