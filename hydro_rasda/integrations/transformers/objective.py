"""The loss, metrics, schedule and weight decay of `Trainer`, as an objective of `tune`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import EvalPrediction, Trainer, TrainingArguments, get_scheduler
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import LabelSmoother
from transformers.utils.generic import find_labels

from hydro_rasda.data import Batch
from hydro_rasda.integrations.transformers.arguments import SCHEDULED, schedule_types, warmup_of, word
from hydro_rasda.integrations.transformers.data import base_of
from hydro_rasda.problem.loss_weight import IGNORED, LOSS_WEIGHT, LossCalls
from hydro_rasda.problem.objective import OUTPUTS, TARGETS, OptimizerSettings

PREFIX = "eval_"


@dataclass(frozen=True)
class TrainerMetrics:
    """The `metrics` of `tune`, made from `compute_metrics`. Names of metrics lose `Trainer`'s prefix "eval_"."""

    compute_metrics: Callable[[EvalPrediction], Mapping[str, Any]]

    def __call__(self, outputs: Tensor, targets: Tensor) -> Mapping[str, Any]:
        predictions = outputs.float() if outputs.is_floating_point() and outputs.itemsize < 4 else outputs
        found = self.compute_metrics(EvalPrediction(predictions=predictions.numpy(), label_ids=targets.numpy()))
        return {name.removeprefix(PREFIX): value for name, value in found.items()}


@dataclass(frozen=True)
class Predictions:
    """Makes the predictions and labels of a batch, which an objective returns for `TrainerMetrics`.

    `labels` are the `label_names`; None stands for those of the model's class. `preprocess` is
    `preprocess_logits_for_metrics`.
    """

    labels: tuple[str, ...] | None = None
    preprocess: Callable[[Tensor, Tensor], Tensor] | None = None

    def __call__(self, model: nn.Module, batch: Mapping[str, Any], returned: Any) -> Mapping[str, Tensor]:
        """Return predictions and labels from the batch and the value that the model returned for it.

        Raises ValueError unless there is exactly one tensor of each.
        """
        base: Any = base_of(model)
        config = getattr(base, "config", None)
        ignored = {"loss", *getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])}
        if isinstance(returned, Mapping):
            outputs = {name: value for name, value in returned.items() if name not in ignored}
        else:
            outputs = {f"its output {i}": value for i, value in enumerate(returned) if i}
        names = find_labels(type(base)) if self.labels is None else self.labels
        targets: list[Any] = [batch.get(name) for name in names]
        logits: Any = tuple(outputs.values())
        logits = logits[0] if len(logits) == 1 else logits
        labelled = len(targets) == 1 and isinstance(targets[0], Tensor)
        if labelled and outputs and self.preprocess is not None:
            logits = self.preprocess(logits, targets[0])
        if not labelled or not isinstance(logits, Tensor):
            told = f"the model returns {', '.join(outputs) or 'nothing'} beside its loss, for labels {', '.join(names)}"
            one = (
                "`compute_metrics` is given one tensor of each; `preprocess_logits_for_metrics` may make one of several"
            )
            raise ValueError(f"{told}; here {one}")
        return {OUTPUTS: logits, TARGETS: targets[0]}


def predictions_of(args: TrainingArguments, preprocess: Callable[[Tensor, Tensor], Tensor] | None) -> Predictions:
    """Return the `Predictions` that these arguments ask for."""
    return Predictions(None if args.label_names is None else tuple(args.label_names), preprocess)


@dataclass(frozen=True)
class TrainerSchedule:
    """The `schedule(step, steps)` of `Trainer`: the factor of the learning rate at `step`, from 0.

    A `warmup` below 1 is a share of all steps. Some kinds need the learning rate `lr` itself. `options` are the
    `lr_scheduler_kwargs` as pairs.
    """

    kind: str
    warmup: float
    lr: float
    options: tuple[tuple[str, Any], ...] = ()

    def __call__(self, step: int, steps: int) -> float:
        warmup = int(self.warmup) if self.warmup >= 1 else math.ceil(steps * self.warmup)
        return float(_factor(self.kind, warmup, steps, self.lr, self.options)(step))


@lru_cache(maxsize=1024)
def _factor(
    kind: str, warmup: int, steps: int, lr: float, options: tuple[tuple[str, Any], ...]
) -> Callable[[int], float]:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=lr)
    made = get_scheduler(kind, optimizer, warmup, steps, scheduler_specific_kwargs=dict(options) or None)
    factor: Callable[[int], float] = made.lr_lambdas[0]
    return factor


@dataclass(frozen=True)
class TrainerObjective:
    """`Trainer.compute_loss` as an objective. A batch has all examples over which `Trainer` accumulates gradients.

    `schedule` and `warmup` are used if the configuration has none. `options` are the `lr_scheduler_kwargs` as pairs.
    In evaluation, `predictions` makes the outputs for `compute_metrics`.
    """

    reads: ClassVar[frozenset[str]] = frozenset(SCHEDULED)

    smoothing: float
    schedule: str
    warmup: float
    options: tuple[tuple[str, Any], ...]
    predictions: Predictions | None = None

    def __call__(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        if not isinstance(batch, Mapping):
            raise ValueError(f"`data_collator` made a {type(batch).__name__}, but must make a dict of a model's inputs")
        inputs = dict(batch)
        smoothed = inputs.pop("labels") if self.smoothing and "labels" in batch and _of_one_label(model) else None
        items = _items(model, batch) if _accepts_loss_kwargs(type(base_of(model))) else None
        if items is not None:
            inputs["num_items_in_batch"] = items.clamp(min=1)
        with LossCalls() as calls:
            outputs = model(**inputs)
        metrics: dict[str, Tensor] = {}
        if smoothed is None:
            if isinstance(outputs, Mapping) and "loss" not in outputs:
                got = f"the model returns {', '.join(outputs)} for a batch of {', '.join(batch)}"
                raise ValueError(f"{got}, but must return a loss: the data may have no labels")
            loss: Tensor = outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
            metrics["loss"] = loss
            calls.weigh(metrics, None, told=False)
        else:
            shifted = type(base_of(model)).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
            if items is None:
                items = (smoothed[..., 1:] if shifted else smoothed).ne(IGNORED).sum()
            smoother = LabelSmoother(epsilon=self.smoothing)
            metrics["loss"] = smoother(outputs, smoothed, shift_labels=shifted, num_items_in_batch=items.clamp(min=1))
        if items is not None:
            metrics.setdefault(LOSS_WEIGHT, items)
        if self.predictions is None or model.training:
            return metrics
        return {**metrics, **self.predictions(model, batch, outputs)}

    def optimizer_settings(self, model: nn.Module, config: Mapping[str, Any]) -> OptimizerSettings:
        """Return settings with `Trainer`'s schedule, which includes the warm-up, and its choice of decayed weights."""
        kind, warmup = config.get("lr_scheduler_type", self.schedule), config.get("warmup_steps", self.warmup)
        schedule = TrainerSchedule(word(kind), float(warmup), float(config["lr"]), self.options)
        decaying = set(Trainer.get_decay_parameter_names(None, model))
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        spared = {name: 0.0 for name in trained if name not in decaying}
        own = {**config, "schedule": schedule, "warmup": 0.0, "warmup_epochs": 0.0}
        return OptimizerSettings(own, weight_decay_factors=spared)


def _items(model: Any, batch: Mapping[str, Any]) -> Tensor | None:
    """Count the labels of a batch as `Trainer` does. `Trainer` divides the sum of losses by this number.

    No position predicts the first token, but `Trainer` leaves it out only for models that it knows as causal language
    models. It does not know GPT-2, so GPT-2's loss in `Trainer` is a little smaller than the mean.
    """
    base = base_of(model)
    if not isinstance(labels := batch.get("labels"), Tensor):
        return None
    if isinstance(shifted := batch.get("shift_labels"), Tensor):
        labels = shifted
    elif LOSS_MAPPING.get(getattr(base, "loss_type", None)) is ForCausalLMLoss:
        labels = labels if getattr(base.config, "is_encoder_decoder", False) else labels[..., 1:]
    return labels.ne(IGNORED).sum()


def _of_one_label(model: Any) -> bool:
    """Tell whether each label is one class, because `Trainer` does not smooth multi-label targets."""
    config = getattr(base_of(model), "config", None)
    return bool(getattr(config, "problem_type", None) != "multi_label_classification")


def _accepts_loss_kwargs(model_class: type[nn.Module]) -> bool:
    if hasattr(model_class, "accepts_loss_kwargs"):
        return bool(model_class.accepts_loss_kwargs)
    return any(p.kind == p.VAR_KEYWORD for p in inspect.signature(model_class.forward).parameters.values())


def trainer_objective(args: TrainingArguments, predictions: Predictions | None = None) -> TrainerObjective:
    """Return the objective that these training arguments ask for."""
    options = tuple(dict(args.lr_scheduler_kwargs or {}).items())
    kind = word(args.lr_scheduler_type)
    return TrainerObjective(args.label_smoothing_factor, kind, warmup_of(args), options, predictions)


def schedules_refused(args: TrainingArguments, searched: Sequence[Any]) -> list[str]:
    """Return the reasons why kinds of schedules do not accept `lr_scheduler_kwargs`.

    `searched` has the kinds that the space names. If it is empty, the kind of the training arguments is tried.
    """
    options, refused = tuple(dict(args.lr_scheduler_kwargs or {}).items()), []
    for kind in dict.fromkeys(map(word, searched or [args.lr_scheduler_type])):
        try:
            if kind in schedule_types():
                TrainerSchedule(kind, 0.0, 1.0, options)(0, 100)
        except Exception as error:  # a schedule may raise anything for missing or unknown options
            told = f"lr_scheduler_kwargs={dict(options)!r} does not make it, {type(error).__name__}: {error}"
            refused.append(f"lr_scheduler_type={kind!r}: {told}")
    return refused
