"""What is tuned: the model function, the objective and the data, checked by a dry run before any training."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from surrogate import make_surrogate, shrink

from .config import Mode, require
from .data import Batch, Batches
from .objective import Objective, check_metrics
from .seeds import derive_seed

DEFAULT_BATCH_SIZE = 64


class NoModule(TypeError):
    """A model function returned something else than a module."""


@dataclass(frozen=True)
class Trial:
    """One configuration.

    Attributes:
        number: 0, 1, ... in the order in which configurations were sampled.
        config: Hyperparameters, all of which reach the model function.
    """

    number: int
    config: Mapping[str, Any]

    @property
    def batch_size(self) -> int:
        """Examples per step."""
        return int(self.config.get("batch_size", DEFAULT_BATCH_SIZE))


@dataclass(frozen=True)
class Problem:
    """What every stage and every worker needs to train a trial.

    Attributes:
        model_fn: `model_fn(config)` or `model_fn(config, width_ratio)`.
        objective: What one model does with one batch.
        train_data: Batches to train on.
        val_data: Batches to compare trials on.
        width_ratio: Width of the surrogates over that of the target; 1 sweeps the target itself.
        metric: Name of what trials are compared by, such as "val_loss".
        mode: Whether less or more of it is better.
        max_t: Epochs of a full training; the horizon of learning-rate schedules, also for surrogates.
        seed: The run's.
        device: Where models train.
        example_input: What the model is called with, for a few examples (`dry_run` finds it): positional arguments, or
            a dict of keyword arguments. A model that takes no width is narrowed by following it through the model.
    """

    model_fn: Callable[..., nn.Module]
    objective: Objective
    train_data: Batches
    val_data: Batches
    width_ratio: float
    metric: str
    mode: Mode
    max_t: int
    seed: int
    device: torch.device
    example_input: Any = None

    def target(self, trial: Trial) -> nn.Module:
        """The full-size model, its initial weights drawn from the trial's own seed."""
        torch.manual_seed(derive_seed(self.seed, "weights", trial.number))
        config = copy.deepcopy(dict(trial.config))
        model = self._build(config, 1.0) if takes_width_ratio(self.model_fn) else self.model_fn(config)
        if not isinstance(model, nn.Module):
            raise NoModule(f"`model_fn` returned a {type(model).__name__}, but must return a torch.nn.Module")
        return model.to(self.device)

    def surrogate(self, trial: Trial) -> nn.Module:
        """The model that stands in for it in the sweep, likewise."""
        if self.width_ratio == 1:
            return self.target(trial)
        if not takes_width_ratio(self.model_fn):
            return shrink(self.target(trial), self.width_ratio, self.example_input)
        torch.manual_seed(derive_seed(self.seed, "weights", trial.number))
        config = copy.deepcopy(dict(trial.config))
        return make_surrogate(self._build, config, self.width_ratio).to(self.device)

    def _build(self, config: dict[str, Any], width_ratio: float) -> nn.Module:
        if "width_ratio" in inspect.signature(self.model_fn).parameters:
            return self.model_fn(config, width_ratio=width_ratio)
        return self.model_fn(config, width_ratio)


def takes_width_ratio(model_fn: Callable[..., nn.Module]) -> bool:
    """Whether a model function has the form `model_fn(config, width_ratio)`.

    A second argument of another name counts where it has no default.

    >>> takes_width_ratio(lambda config, width_ratio=1.0: None), takes_width_ratio(lambda config, depth=2: None)
    (True, False)
    """
    parameters = list(inspect.signature(model_fn).parameters.values())
    if any(p.name == "width_ratio" for p in parameters):
        return True
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.kind in positional and p.default is inspect.Parameter.empty]
    return len(required) >= 2


@dataclass(frozen=True)
class DryRun:
    """What a dry run found.

    Attributes:
        parameters: Name and "shape dtype" of each parameter of the first target that could be built.
        example_input: What the objective called it with: positional arguments, or a dict of keyword arguments, of a
            few examples; None where it never called the model itself.
    """

    parameters: dict[str, str]
    example_input: Any


EXAMPLES = 4


def dry_run(problem: Problem, trials: Iterable[Trial]) -> DryRun:
    """Build one trial's models and run one batch of each data set through them, so that nothing fails hours later.

    Trials are tried in turn until the model function takes one: a configuration that it refuses fails alone.

    Args:
        problem: What will be tuned.
        trials: At least one.

    Raises:
        ValueError: where `model_fn` fails for all of them, the model cannot take a batch, the loss cannot take the
            model's output and the target, the metric is unknown, or the model cannot be made narrower. Each names the
            argument.
        TypeError: where `model_fn` returns no module, or the objective no dict of tensors.
    """
    trial, target = _first_that_builds(problem, trials)
    parameters = {name: f"{tuple(p.shape)} {p.dtype}" for name, p in target.named_parameters()}
    calls: list[Any] = []
    handle = target.register_forward_pre_hook(lambda _, args, kwargs: calls.append(kwargs or args), with_kwargs=True)
    train = next(problem.train_data.epoch(trial.batch_size, 0))
    available = {f"train_{name}" for name in _run_batch(problem, target.train(), train, "train_data")}
    validation = next(problem.val_data.in_order(trial.batch_size))
    available |= {f"val_{name}" for name in _run_batch(problem, target.eval(), validation, "val_data")}
    handle.remove()
    require(problem.metric in available, "metric", problem.metric, f"one of {sorted(available)}")
    example = tree_map(lambda leaf: leaf[:EXAMPLES] if isinstance(leaf, Tensor) else leaf, calls[0]) if calls else None
    _try_surrogate(replace(problem, example_input=example), trial)
    return DryRun(parameters, example)


def _try_surrogate(problem: Problem, trial: Trial) -> None:
    try:
        problem.surrogate(trial)
    except Exception as error:
        if takes_width_ratio(problem.model_fn):
            raise
        raise ValueError(
            f"`surrogate` is {problem.width_ratio:g}, but the model cannot be made narrower by itself ({error}); give "
            "`model_fn` an argument `width_ratio`, or set `surrogate=1`"
        ) from error


def _first_that_builds(problem: Problem, trials: Iterable[Trial]) -> tuple[Trial, nn.Module]:
    failures: list[tuple[Trial, Exception]] = []
    for trial in trials:
        try:
            model = problem.target(trial)
        except NoModule:
            raise
        except Exception as error:
            failures.append((trial, error))
        else:
            return trial, model
    first, cause = failures[0]
    raise ValueError(
        f"`model_fn` fails for every configuration, for {dict(first.config)!r} with {type(cause).__name__}: {cause}"
    ) from cause


def _run_batch(problem: Problem, model: nn.Module, batch: Batch, argument: str) -> Mapping[str, Tensor]:
    outputs: list[Any] = []
    handle = model.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    try:
        with torch.no_grad():
            metrics = problem.objective(model, batch)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        if outputs:
            raise ValueError(
                f"`loss_fn` (or `objective`) cannot take the model's output {_outline(outputs[-1])} with a batch "
                f"{_outline(batch)} of `{argument}`: {told}"
            ) from error
        raise ValueError(f"`{argument}` yields a batch {_outline(batch)} that the model cannot take: {told}") from error
    finally:
        handle.remove()
    check_metrics(metrics)
    return metrics


def _outline(value: Any) -> str:
    leaves = [
        f"{tuple(v.shape)} {str(v.dtype).removeprefix('torch.')}" for v in tree_leaves(value) if isinstance(v, Tensor)
    ]
    return f"[{', '.join(leaves)}]"
