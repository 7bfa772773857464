"""Objectives: a loss and metrics of a batch, written for ONE model, run for many."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusion.evaluate.microbatch import WEIGHT, is_weight
from fusion.keys import KEYS, is_of_part, is_read
from hydro_rasda.data import Batch, fresh
from hydro_rasda.problem.loss_weight import IGNORED, LossCalls, whole
from hydro_rasda.problem.objective_parts import ByPart, GivenObjective, check_dict

Objective = Callable[[nn.Module, Batch], Mapping[str, Tensor]]
"""`objective(model, batch) -> {"loss": scalar, ...}`. `model` is a real module, `batch` whatever the data yields.

`loss` is the mean over the batch; it is differentiated. Any further scalars are metrics. All are averaged over the
examples, unless there is a scalar "weight", such as the number of targets that are not ignored. Then they are averaged
by it. "weight/NAME" is the weight of the metric NAME alone. Of a loss that makes one mean of `F.cross_entropy` or
`F.nll_loss`, the weight is known without. Under fusion it runs once for K models (`torch.func.vmap`): no `.item()`, no
branch on a tensor's values.

An object may also have a method `optimizer_settings(model, config) -> OptimizerSettings`, and, as `reads`, the keys of
its own that this reads of a configuration.
"""


@dataclass(frozen=True)
class OptimizerSettings:
    """How the parameters of one model are updated.

    Attributes:
        config: Keys for optimizer, schedule and clipping (`fusion.keys`); the batch size stays the
            configuration's.
        lr_factors: By name of a parameter, what its learning rate is multiplied by; 1 where absent.
    """

    config: Mapping[str, Any]
    lr_factors: Mapping[str, float] = field(default_factory=dict)
    weight_decay_factors: Mapping[str, float] = field(default_factory=dict)


LossFn = Callable[..., Tensor]
"""`loss_fn(output [N, ...], target [N, ...]) -> scalar`, such as those of `torch.nn.functional`."""

OUTPUTS, TARGETS = "outputs", "targets"
"""Further keys of an objective's result, for `tune(metrics=...)`, which looks at a whole data set: examples first."""


def scalars(metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the result of an objective without outputs and targets."""
    return {name: value for name, value in metrics.items() if name not in (OUTPUTS, TARGETS)}


_CONFIG = "_hydro_rasda_config"
FEW = 8  # examples on which a loss is tried again: more would count as memory that training takes


def takes_config(function: Callable[..., Any]) -> bool:
    """Return whether a function has an argument called `config`."""
    try:
        return "config" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # what is written in C need not have a signature
        return False


def give_config(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Have a model carry what an objective may read of its configuration: under fusion, each member its own.

    Fused, one objective runs for all members. The attributes of a module are shared by the members of a group, but for
    floats, of which each has its own (`fusion.evaluate.per_member_floats`). So the values that the objective reads
    must be there.
    """
    setattr(model, _CONFIG, config)


def steering(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of a configuration, what an objective may read: all but what the library reads itself."""
    ours = {key for key in config if is_of_part(key) or (key in KEYS and is_read(key, config))}
    return {key: copy.deepcopy(value) for key, value in config.items() if key not in ours}


class OwnConfig(Mapping[str, Any]):
    """The argument `config` of an objective: it can be read, not written."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def __getitem__(self, key: str) -> Any:
        try:
            return self._config[key]
        except KeyError:
            told = f"{key!r}: an objective's `config` has the keys {sorted(self._config)}"
            raise KeyError(f"{told}; what the library reads itself, such as 'lr', is not among them") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._config)

    def __len__(self) -> int:
        return len(self._config)


def config_of(model: nn.Module) -> OwnConfig:
    """Return the configuration that `give_config` gave a model."""
    return OwnConfig(getattr(model, _CONFIG))


@dataclass(frozen=True)
class Written:
    """An objective of (model, batch), made of a user's, with the weight of its loss.

    Attributes:
        configured: True if it also takes the configuration.
        checked: True to warn where the weight cannot be known.
    """

    objective: Callable[..., Mapping[str, Tensor]]
    configured: bool = False
    checked: bool = False

    def __call__(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        config = {"config": config_of(model)} if self.configured else {}
        with LossCalls() as calls:
            metrics = self.objective(model, fresh(batch), **config)
        if not isinstance(metrics, Mapping):
            return metrics  # refused by whoever checks it
        metrics = dict(metrics)
        calls.weigh(metrics, None, self.checked)
        return metrics

    @property
    def optimizer_settings(self) -> Any:
        """The user's own method, or None."""
        return getattr(self.objective, "optimizer_settings", None)

    @property
    def reads(self) -> frozenset[str]:
        """The keys that the user's says it reads."""
        return getattr(self.objective, "reads", frozenset())


def as_objective(objective: GivenObjective | None, loss_fn: LossFn, collected: bool = False) -> Objective:
    """An objective of (model, batch), made of what a user gave: one that may take the configuration, too, or a loss.

    With a loss, `collected` asks for outputs and targets, too.
    """
    if objective is None:
        return replace(supervised(loss_fn), collected=collected)
    if isinstance(objective, Mapping):
        return ByPart({part: Written(own, takes_config(own)) for part, own in objective.items()})
    return Written(objective, takes_config(objective))


def unmeasured(model: nn.Module, batch: Batch) -> NoReturn:
    """Stand for the objective of a run whose models the user's own function trains and measures."""
    raise ValueError("no loss is known of a run that `train` alone trains: measure `best_model()` as `train` does")


def reads_config(objective: Objective) -> bool:
    """Return whether an objective, as it was given, reads the configuration."""
    return isinstance(objective, (Written, Supervised, ByPart)) and objective.configured


@dataclass(frozen=True)
class Supervised:
    """The objective for batches `(inputs, target)`; see `supervised`.

    Attributes:
        checked: True to look at the targets' values first, which takes a model and a batch at a time.
        configured: True if the loss has an argument `config`.
        collected: True to return outputs and targets, too.
    """

    loss_fn: LossFn = F.cross_entropy
    checked: bool = False
    configured: bool = False
    collected: bool = False

    def __call__(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        inputs, target = _pair(fresh(batch))
        output = model(inputs)
        if not isinstance(output, Tensor):
            raise ValueError(
                f"the model returns a {type(output).__name__}, but `loss_fn` needs a tensor; give "
                "`objective=`, a function of (model, batch) that returns a dict with the loss"
            )
        config = {"config": config_of(model)} if self.configured else {}
        loss_fn = partial(self.loss_fn, **config)
        if self.checked:
            _check_rows(output, target)
        differ, floats = output.shape != target.shape, target.is_floating_point()
        if differ and ((floats and _of_torch(self.loss_fn)) or (self.checked and _mixes(loss_fn, output, target))):
            raise ValueError(
                f"target of shape {tuple(target.shape)} for a model output of shape {tuple(output.shape)}: a "
                f"{'floating-point ' * floats}target must have the output's shape, or `loss_fn` must bring them "
                "together, such as by output.squeeze(-1)"
            )
        if self.checked and (self.loss_fn is F.cross_entropy or isinstance(self.loss_fn, nn.CrossEntropyLoss)):
            _check_classes(output, target, self.loss_fn)
        with LossCalls() as calls:
            metrics = {"loss": loss_fn(output, target)}
        if self.checked:
            _check_loss(metrics["loss"], loss_fn, output, target)
        if floats:
            if output.squeeze().shape == target.squeeze().shape:
                metrics["mae"] = (output.reshape(target.shape) - target).abs().mean()
        elif (dim := _class_dim(output, target, self.loss_fn)) is not None:
            counted = whole(target) != calls.ignored
            number = counted.sum()
            right = (output.argmax(dim) == target) & counted
            metrics |= {"accuracy": right.sum() / number.clamp(min=1), f"{WEIGHT}/accuracy": number}
        calls.weigh(metrics, target, self.checked)
        if self.collected:
            metrics |= {OUTPUTS: output, TARGETS: target}
        return metrics


def supervised(loss_fn: LossFn = F.cross_entropy) -> Supervised:
    """The objective for batches `(inputs, target)`.

    Classification also reports `accuracy`. The integer target [N, ...] then has the shape of the output without its
    classes. These are the second dimension [N, C, ...], as for torch's losses, or the last [N, ..., C], as in language
    models. Ignored targets do not count. Regression (a floating-point target of the output's shape, but for dimensions
    of size 1) reports `mae`, the mean absolute error.

    Args:
        loss_fn: Mean loss of a batch; one with an argument `config` is given the configuration, see `tune`. If classes
            could be either dimension, they are the second for a loss of torch's, and the last for any other.

    Returns:
        The objective. It raises ValueError where a floating-point target [N, ...] has another shape than the output,
        and the loss is one of torch's: broadcasting one against the other would train on nonsense. In a dry run
        (`checked`) any other loss that broadcasts them is found, too.
    """
    return Supervised(loss_fn, configured=takes_config(loss_fn))


def checked(objective: Objective) -> Objective:
    """The objective for a dry run: one that also looks at the values of targets."""
    if isinstance(objective, ByPart):
        return ByPart({part: replace(own, checked=True) for part, own in objective.parts.items()})
    return replace(objective, checked=True) if isinstance(objective, (Supervised, Written)) else objective


def _of_torch(loss_fn: LossFn) -> bool:
    function = loss_fn.func if isinstance(loss_fn, partial) else loss_fn
    return getattr(function, "__module__", "").startswith("torch.nn.")


def _mixes(loss_fn: Callable[..., Tensor], output: Tensor, target: Tensor) -> bool:
    """Return whether a loss compares each output with all targets: their values count in it, but not their order.

    It is given values of its own, since outputs of a readout that begins at zero are all alike.
    """
    if target.ndim == 0 or len(target) < 2:
        return False
    if output.ndim and len(output) == len(target):
        output, target = output[:FEW], target[:FEW]
    drawn = torch.Generator().manual_seed(0)
    outputs, targets, others = (torch.rand(of.shape, generator=drawn).to(of.device) for of in (output, target, target))
    try:
        loss, turned, other = (loss_fn(outputs, given).detach() for given in (targets, targets.roll(1, 0), others))
    except Exception:  # not for such values; for the user's own it may be
        return False
    return torch.allclose(loss, turned, rtol=1e-4) and not torch.allclose(loss, other, rtol=1e-4)


def _class_dim(output: Tensor, target: Tensor, loss_fn: LossFn) -> int | None:
    """The dimension of the output that holds the classes of an integer target; None where there is none."""
    for dim in (1, -1) if _of_torch(loss_fn) else (-1, 1):
        # Under vmap, too, these are the shapes of one model's.
        if output.ndim > 1 and output.movedim(dim, -1).shape[:-1] == target.shape and output.shape[dim] > 1:
            return dim
    return None


def _check_classes(output: Tensor, target: Tensor, loss_fn: LossFn) -> None:
    """Check that cross-entropy measures something: of one class it is always 0, and torch says nothing."""
    told = f"`loss_fn` is cross_entropy{' (the default)' * (loss_fn is F.cross_entropy)}, but "
    regression = "give loss_fn=F.mse_loss for regression"
    if output.ndim < 2 or output.shape[1] == 1:
        fault = f"an output of shape {tuple(output.shape)} has one class, of which it is always 0; "
        binary = "for two classes, two outputs, or F.binary_cross_entropy_with_logits and a floating-point target"
        raise ValueError(f"{told}{fault}{regression}; {binary}")
    if target.is_floating_point():
        off = (target.sum(1) - 1).abs().max()
        if bool((target < 0).any()) or not bool(off < 0.01):  # half precision rounds
            raise ValueError(f"{told}the rows of the floating-point target are no probabilities; {regression}")
        return
    ignored = getattr(loss_fn, "ignore_index", IGNORED)
    wrong = target[((target < 0) | (target >= output.shape[1])) & (whole(target) != ignored)]
    if len(wrong):
        classes = f"the output's {output.shape[1]} classes, from 0 to {output.shape[1] - 1}"
        raise ValueError(f"{told}a target is {int(wrong[0])}, none of {classes}")


def _check_rows(output: Tensor, target: Tensor) -> None:
    """Check that a model does not answer for a whole batch at once, which a loss may compare with each target."""
    examples = len(target) if target.ndim else 1
    if output.ndim > 1 and len(output) == 1 and examples not in output.shape:
        shapes = f"an output of shape {tuple(output.shape)} for {examples} targets {tuple(target.shape)}"
        raise ValueError(f"the model returns {shapes}, but must return a row for each example")


def _check_loss(loss: object, loss_fn: LossFn, output: Tensor, target: Tensor) -> None:
    """Check that it is a scalar, and no sum over the batch: that would grow with the batch size of a trial."""
    if not isinstance(loss, Tensor) or loss.ndim:
        returned = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ValueError(f"`loss_fn` returned {returned}, but must return a scalar tensor, the mean loss of the batch")
    if not torch.is_grad_enabled():  # one batch, which the dry run differentiates, tells enough
        return
    output, target = output.detach()[:FEW], target[:FEW] if target.ndim else target
    try:
        once, twice = loss_fn(output, target), loss_fn(torch.cat([output, output]), torch.cat([target, target]))
    except Exception:  # one that takes batches of one size alone
        return
    if not torch.allclose(twice, once, rtol=1e-2) and torch.allclose(twice, 2 * once, rtol=1e-4):
        rule = "must return the mean loss of the batch, such as by reduction='mean'"
        raise ValueError(f"`loss_fn` returned twice the loss for the same examples twice, as a sum does, but {rule}")


def _pair(batch: Batch) -> tuple[object, Tensor]:
    if isinstance(batch, (tuple, list)) and len(batch) == 2 and isinstance(batch[1], Tensor):
        return batch[0], batch[1]
    raise ValueError(
        f"a batch is a {type(batch).__name__}, but `loss_fn` needs (inputs, target); for other batches give "
        "`objective=`, a function of (model, batch) that returns a dict with the loss"
    )


def check_metrics(metrics: object) -> None:
    """Check what an objective returned for one model and one batch: a dict of scalar tensors with a "loss"."""
    check_dict("`objective`", metrics)
    assert isinstance(metrics, Mapping)
    if "loss" not in metrics:
        named = sorted(name for name in metrics if not is_weight(name))  # weights may be the library's
        raise ValueError(f'`objective` returned {named}, but must return a "loss"')
    for name, value in metrics.items():
        if value.ndim:
            raise ValueError(f"`objective` returned {name!r} of shape {tuple(value.shape)}, but must return scalars")
        if value.is_complex():
            raise ValueError(f"`objective` returned {name!r} of {value.dtype}, but must return real numbers")
        if is_weight(name) and not (bool(value.isfinite()) and bool(value >= 0)):
            raise ValueError(f"`objective` returned a {name!r} of {value.item()}, but must return a number >= 0")
        if is_weight(name) and name != WEIGHT and (of := name.removeprefix(f"{WEIGHT}/")) not in metrics:
            raise ValueError(f"`objective` returned {name!r}, but no {of!r}, of which that is the weight")
    if not torch.is_floating_point(metrics["loss"]):
        raise ValueError(f'`objective` returned a "loss" of {metrics["loss"].dtype}, but must return a float')
