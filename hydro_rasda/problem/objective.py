"""Objectives: functions that return the loss and metrics of a batch, written for ONE model and run for many."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusion.evaluate.microbatch import WEIGHT, is_weight
from fusion.keys import KEYS, is_of_part, is_read
from hydro_rasda.common.argument_checks import require
from hydro_rasda.data import Batch, fresh
from hydro_rasda.problem.loss_weight import IGNORED, LossCalls, whole

Objective = Callable[[nn.Module, Batch], Mapping[str, Tensor]]
"""`objective(model, batch) -> {"loss": scalar, ...}`. `model` is a real module, `batch` is whatever the data yield.

"loss" is the mean over the batch, and is differentiated. Further scalars are metrics. All are averaged over the
examples. If there is a scalar "weight", such as the number of targets that are not ignored, each batch counts with this
weight instead. "weight/NAME" is the weight of the metric NAME only. If the loss is one mean of `F.cross_entropy` or
`F.nll_loss`, the library finds the weight itself.

Under fusion, the objective runs once for K models (`torch.func.vmap`): it must not call `.item()`, nor branch on a
tensor's values.

An objective may also have a method `optimizer_settings(model, config) -> OptimizerSettings`. The attribute `reads` then
lists the keys that this method reads from the configuration.
"""


@dataclass(frozen=True)
class OptimizerSettings:
    """How the parameters of one model are updated.

    Attributes:
        config: Keys for optimizer, schedule and clipping (`fusion.keys`). The batch size is still that of the trial's
            configuration.
        lr_factors: Map a parameter's name to a factor of its learning rate. Other parameters have the factor 1.
        weight_decay_factors: The same for weight decays.
    """

    config: Mapping[str, Any]
    lr_factors: Mapping[str, float] = field(default_factory=dict)
    weight_decay_factors: Mapping[str, float] = field(default_factory=dict)


GivenObjective = Callable[..., Mapping[str, Tensor]] | Mapping[str, Callable[..., Mapping[str, Tensor]]]
"""An objective as users pass it: a function of (model, batch) or (model, batch, config), or a dict of these by part."""

LossFn = Callable[..., Tensor]
"""`loss_fn(output [N, ...], target [N, ...]) -> scalar`, such as those of `torch.nn.functional`."""

OUTPUTS, TARGETS = "outputs", "targets"
"""Further keys of an objective's result, which `tune(metrics=...)` needs; the first dimension is that of examples."""


def scalars(metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the result of an objective without outputs and targets."""
    return {name: value for name, value in metrics.items() if name not in (OUTPUTS, TARGETS)}


_CONFIG = "_hydro_rasda_config"
FEW = 8  # Number of examples on which a loss is tried again; more would distort the measurement of training memory.


def takes_config(function: Callable[..., Any]) -> bool:
    """Return whether a function has an argument called `config`."""
    try:
        return "config" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # functions written in C may have no signature
        return False


def give_config(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Store on a model the part of its configuration that an objective may read.

    Under fusion, one objective runs for all members of a group. Members share the attributes of their module, except
    floats: each member has its own (`fusion.evaluate.per_member_floats`). So floats of a configuration that is stored
    on the model differ between members.
    """
    setattr(model, _CONFIG, config)


def steering(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a configuration that an objective may read: all keys that the library does not read itself."""
    ours = {key for key in config if is_of_part(key) or (key in KEYS and is_read(key, config))}
    return {key: copy.deepcopy(value) for key, value in config.items() if key not in ours}


class OwnConfig(Mapping[str, Any]):
    """The argument `config` of an objective; it is read-only."""

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
    """Return the configuration that `give_config` stored on a model."""
    return OwnConfig(getattr(model, _CONFIG))


@dataclass(frozen=True)
class Written:
    """An objective of (model, batch) that calls the user's objective and adds the weight of its loss.

    Attributes:
        configured: True if the user's objective also takes the configuration.
        checked: True to warn if the weight cannot be found.
    """

    objective: Callable[..., Mapping[str, Tensor]]
    configured: bool = False
    checked: bool = False

    def __call__(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        config = {"config": config_of(model)} if self.configured else {}
        with LossCalls() as calls:
            metrics = self.objective(model, fresh(batch), **config)
        if not isinstance(metrics, Mapping):
            return metrics  # `check_metrics` raises an error for this result
        metrics = dict(metrics)
        calls.weigh(metrics, None, self.checked)
        return metrics

    @property
    def optimizer_settings(self) -> Any:
        """The method of this name of the user's objective; None if it has none."""
        return getattr(self.objective, "optimizer_settings", None)

    @property
    def reads(self) -> frozenset[str]:
        """The keys that the user's objective says it reads."""
        return getattr(self.objective, "reads", frozenset())


@dataclass(frozen=True)
class ByPart:
    """One objective for each part of a model, such as the generator and the discriminator of a GAN.

    In a training step the objectives take turns, and the loss of each updates only the parameters of its part. Calling
    this object evaluates all of them.
    """

    parts: Mapping[str, Any]

    def __call__(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        return joined({part: objective(model, batch) for part, objective in self.parts.items()})

    @property
    def configured(self) -> bool:
        """True if one of the objectives takes the configuration."""
        return any(getattr(objective, "configured", False) for objective in self.parts.values())

    @property
    def reads(self) -> frozenset[str]:
        """The keys that the objectives say they read."""
        return frozenset[str]().union(*(getattr(objective, "reads", ()) for objective in self.parts.values()))


def as_objective(objective: GivenObjective | None, loss_fn: LossFn, collected: bool = False) -> Objective:
    """Make an objective of (model, batch) from the user's `objective` or, if that is None, from `loss_fn`.

    The user's objective may also take the configuration. With `collected`, an objective made from `loss_fn` also
    returns outputs and targets.
    """
    if objective is None:
        return replace(supervised(loss_fn), collected=collected)
    if isinstance(objective, Mapping):
        return ByPart({part: Written(own, takes_config(own)) for part, own in objective.items()})
    return Written(objective, takes_config(objective))


def unmeasured(model: nn.Module, batch: Batch) -> NoReturn:
    """Placeholder for the objective of a run in which the user's own function trains and evaluates models."""
    raise ValueError("no loss is known of a run that `train` alone trains: measure `best_model()` as `train` does")


def reads_config(objective: Objective) -> bool:
    """Return whether the user's objective or loss takes the configuration."""
    return isinstance(objective, (Written, Supervised, ByPart)) and objective.configured


@dataclass(frozen=True)
class Supervised:
    """The objective for batches `(inputs, target)`; see `supervised`.

    Attributes:
        configured: True if the loss has an argument `config`.
        checked: True to check the targets' values first, which works only for a single model (not under vmap).
        collected: True to return outputs and targets, too.
    """

    loss_fn: LossFn
    configured: bool
    checked: bool = False
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
    """Make the objective for batches `(inputs, target)`.

    For classification, it also reports `accuracy`. The integer target [N, ...] then has the shape of the output without
    the dimension of classes. Classes are the second dimension of the output [N, C, ...], as for torch's losses, or the
    last [N, ..., C], as in language models. Ignored targets do not count.

    For regression, it reports `mae`, the mean absolute error. The floating-point target then has the output's shape,
    except for dimensions of size 1.

    Args:
        loss_fn: Mean loss of a batch. If it has an argument `config`, it gets the configuration, see `tune`. If both
            the second and the last dimension could hold classes, torch's losses take the second, and other losses the
            last.

    Returns:
        The objective. It raises ValueError if a floating-point target has another shape than the output and the loss
        is one of torch's, because torch would broadcast them and train on nonsense. A dry run (`checked`) also finds
        other losses that broadcast.
    """
    return Supervised(loss_fn, takes_config(loss_fn))


def checked(objective: Objective) -> Objective:
    """Return the objective for a dry run, which also checks the values of targets."""
    if isinstance(objective, ByPart):
        return ByPart({part: replace(own, checked=True) for part, own in objective.parts.items()})
    return replace(objective, checked=True) if isinstance(objective, (Supervised, Written)) else objective


def _of_torch(loss_fn: LossFn) -> bool:
    function = loss_fn.func if isinstance(loss_fn, partial) else loss_fn
    return getattr(function, "__module__", "").startswith("torch.nn.")


def _mixes(loss_fn: Callable[..., Tensor], output: Tensor, target: Tensor) -> bool:
    """Return whether a loss compares each output with all targets, so that the targets' order does not matter.

    The loss is called with random values, because the outputs of a zero-initialized output layer are all equal.
    """
    if target.ndim == 0 or len(target) < 2:
        return False
    if output.ndim and len(output) == len(target):
        output, target = output[:FEW], target[:FEW]
    drawn = torch.Generator().manual_seed(0)
    outputs, targets, others = (torch.rand(of.shape, generator=drawn).to(of.device) for of in (output, target, target))
    try:
        loss, turned, other = (loss_fn(outputs, given).detach() for given in (targets, targets.roll(1, 0), others))
    except Exception:  # the loss may accept the user's values, but not random ones
        return False
    return torch.allclose(loss, turned, rtol=1e-4) and not torch.allclose(loss, other, rtol=1e-4)


def _class_dim(output: Tensor, target: Tensor, loss_fn: LossFn) -> int | None:
    """Return the dimension of the output that holds the classes of an integer target; None if none does."""
    for dim in (1, -1) if _of_torch(loss_fn) else (-1, 1):
        # Under vmap, too, these are the shapes for one model.
        if output.ndim > 1 and output.movedim(dim, -1).shape[:-1] == target.shape and output.shape[dim] > 1:
            return dim
    return None


def _check_classes(output: Tensor, target: Tensor, loss_fn: LossFn) -> None:
    """Raise ValueError if cross-entropy gets an output of one class, for which it is always 0, or wrong targets."""
    told = f"`loss_fn` is cross_entropy{' (the default)' * (loss_fn is F.cross_entropy)}, but "
    regression = "give loss_fn=F.mse_loss for regression"
    if output.ndim < 2 or output.shape[1] == 1:
        fault = f"an output of shape {tuple(output.shape)} has one class, of which it is always 0; "
        binary = "for two classes, two outputs, or F.binary_cross_entropy_with_logits and a floating-point target"
        raise ValueError(f"{told}{fault}{regression}; {binary}")
    if target.is_floating_point():
        off = (target.sum(1) - 1).abs().max()
        if bool((target < 0).any()) or not bool(off < 0.01):  # 0.01 allows for the rounding of half precision
            raise ValueError(f"{told}the rows of the floating-point target are no probabilities; {regression}")
        return
    ignored = getattr(loss_fn, "ignore_index", IGNORED)
    wrong = target[((target < 0) | (target >= output.shape[1])) & (whole(target) != ignored)]
    if len(wrong):
        classes = f"the output's {output.shape[1]} classes, from 0 to {output.shape[1] - 1}"
        raise ValueError(f"{told}a target is {int(wrong[0])}, none of {classes}")


def _check_rows(output: Tensor, target: Tensor) -> None:
    """Check that a model returns a row for each example, because a loss may broadcast a single row to all targets."""
    examples = len(target) if target.ndim else 1
    if output.ndim > 1 and len(output) == 1 and examples not in output.shape:
        shapes = f"an output of shape {tuple(output.shape)} for {examples} targets {tuple(target.shape)}"
        raise ValueError(f"the model returns {shapes}, but must return a row for each example")


def _check_loss(loss: object, loss_fn: LossFn, output: Tensor, target: Tensor) -> None:
    """Check that a loss is a scalar and not a sum over the batch, which would grow with the batch size."""
    if not isinstance(loss, Tensor) or loss.ndim:
        returned = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ValueError(f"`loss_fn` returned {returned}, but must return a scalar tensor, the mean loss of the batch")
    if not torch.is_grad_enabled():  # check only the batch that the dry run differentiates, which is enough
        return
    try:
        output, target = output.detach()[:FEW], target[:FEW]
        once, twice = loss_fn(output, target), loss_fn(torch.cat([output, output]), torch.cat([target, target]))
    except Exception:  # the loss accepts batches of one size only, or a target without rows
        return
    if not torch.allclose(twice, once, rtol=1e-2) and torch.allclose(twice, 2 * once, rtol=1e-4):
        rule = "must return the mean loss of the batch, such as by reduction='mean'"
        raise ValueError(f"`loss_fn` returned twice the loss for the same examples twice, as a sum does, but {rule}")


def _pair(batch: Batch) -> tuple[object, Tensor]:
    if isinstance(batch, (tuple, list)) and len(batch) == 2 and isinstance(batch[1], Tensor):
        return batch[0], batch[1]
    length = f" of {len(batch)}" if isinstance(batch, (tuple, list)) and len(batch) != 2 else ""
    raise ValueError(
        f"a batch is a {type(batch).__name__}{length}, but `loss_fn` needs (inputs, target); for other batches give "
        "`objective=`, a function of (model, batch) that returns a dict with the loss"
    )


def check_metrics(metrics: object) -> None:
    """Check what an objective returned for one model and one batch: a dict of scalar tensors with a "loss"."""
    check_dict("`objective`", metrics)
    assert isinstance(metrics, Mapping)
    if "loss" not in metrics:
        # Leave out weights, because the library may have added them.
        named = sorted(name for name in metrics if not is_weight(name))
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


def check_dict(whose: str, returned: object) -> None:
    """Raise ValueError unless an objective returned a dict of tensors; `whose` names the objective."""
    rule = 'must return a dict of tensors, such as {"loss": loss}'
    if not isinstance(returned, Mapping):
        raise ValueError(f"{whose} returned a {type(returned).__name__}, but {rule}")
    for name, value in returned.items():
        if not isinstance(name, str) or not name:
            raise ValueError(f"{whose} returned a dict with the key {name!r}, but must name each value by a text")
        if not isinstance(value, Tensor):
            raise ValueError(f"{whose} returned {name!r} as a {type(value).__name__}, but {rule}")


def joined(metrics: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Merge the metrics of all parts: metric NAME of a part becomes `PART_NAME`, and "loss" is the sum of the losses.

    If the only part is "", which stands for the whole model, its metrics stay as they are.

    >>> one, two = Tensor([1.0]).sum(), Tensor([2.0]).sum()
    >>> joined({"actor": {"loss": one, "weight": two}, "critic": {"loss": two}})
    {'actor_loss': tensor(1.), 'weight/actor_loss': tensor(2.), 'critic_loss': tensor(2.), 'loss': tensor(3.)}
    """
    if "" in metrics:
        return dict(metrics[""])
    found: dict[str, Tensor] = {}
    for part, own in metrics.items():
        check_dict(f"the objective of {part!r}", own)
        if "loss" not in own:
            raise ValueError(f'the objective of {part!r} returned {sorted(own)}, but must return a "loss"')
        for name, value in own.items():
            if name in (OUTPUTS, TARGETS):
                found[name] = value
            elif not is_weight(name):
                found[f"{part}_{name}"] = value
                if (weight := own.get(f"{WEIGHT}/{name}", own.get(WEIGHT))) is not None:
                    found[f"{WEIGHT}/{part}_{name}"] = weight
    first, *others = (own["loss"] for own in metrics.values())
    found["loss"] = sum(others, first)
    return found


@contextmanager
def moving(part: str, module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Within the context, only the parameters of one part of a model need gradients; the part "" stands for all.

    Args:
        module: The module whose structure tells which parameters belong to the part.
        parameters: The model's parameters by name. They may be other tensors than those of `module`, as under fusion.
    """
    frozen = list[nn.Parameter]()
    if part:
        own = _names(part, module)
        frozen = [p for name, p in parameters.items() if p.requires_grad and name not in own]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_()


def check_parts(objective: object, model: nn.Module) -> None:
    """Raise ValueError if an objective is for a part that the model lacks, or that has no parameters to train."""
    learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    known = sorted({name.partition(".")[0] for name in learning})
    for part in objective.parts if isinstance(objective, ByPart) else ():
        rule = f"a dict by parts of the model that have parameters to train, such as {known}"
        require(bool(learning & _names(part, model)), "objective", part, rule)


def _names(part: str, module: nn.Module) -> set[str]:
    """Return the names of a part's parameters; a parameter with several names appears under its first one."""
    every = module.named_parameters(remove_duplicate=False)
    own = {id(parameter) for name, parameter in every if name.startswith(f"{part}.")}
    return {name for name, parameter in module.named_parameters() if id(parameter) in own}
