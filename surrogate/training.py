"""A plain training loop for one surrogate, and measurements of each module's outputs during training.

The checks of this package use the loop unless they get a faster trainer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from surrogate.argument_checks import is_metric, require
from surrogate.roles_and_multipliers import lr_multipliers, weight_decay_multipliers

Objective = Callable[[nn.Module, Any], Tensor]
"""`objective(model, batch)`: the loss, a scalar."""


_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    cls.__name__.lower(): cls for cls in vars(torch.optim).values() if isinstance(cls, type)
}
_ABSENT: dict[str, Any] = {"schedule": "constant", "warmup": 0, "warmup_epochs": 0, "independent_weight_decay": False}
"""Key of a configuration that this loop does not support -> the only value that it accepts, which has no effect."""


def make_optimizer(surrogate: nn.Module, config: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Make torch's optimizer with one parameter group for each parameter, at its multiplied rate and weight decay.

    Args:
        surrogate: From `make_surrogate` or `shrink`; at width ratio 1 all multipliers are 1.
        config: `lr` (required), `optimizer` (a name that `lr_multipliers` knows; default "adamw") and, if it has
            them, `weight_decay`, `momentum`, `dampening`, `nesterov`, `alpha`, `rho`, `beta1`, `beta2`, `beta2_decay`,
            `eps`. Other settings have torch's defaults.

    Raises:
        ValueError: if `lr` is missing or no number, `optimizer` is another word, or there is an
            `independent_weight_decay`, which torch's optimizers do not have.
    """
    if "lr" not in config:
        raise ValueError(f"`config` has no 'lr', only {sorted(config)}; a configuration must state its learning rate")
    lr = config["lr"]
    require(is_metric(lr) or hasattr(lr, "item"), "config['lr']", lr, "a number")
    _refuse(config, "independent_weight_decay")
    kind = config.get("optimizer", "adamw")
    rates = lr_multipliers(surrogate, kind)
    rule = "one of torch's that updates every parameter: muon takes matrices alone, and others are not there"
    require(kind in _OPTIMIZERS and kind != "muon", "config['optimizer']", kind, rule)
    decays = weight_decay_multipliers(surrogate, kind)
    names, parameters = zip(*surrogate.named_parameters())
    optimizer = _OPTIMIZERS[kind]([{"params": [p]} for p in parameters], **_given(kind, config))
    for name, group in zip(names, optimizer.param_groups):
        group["lr"] *= rates[name]
        group["weight_decay"] *= decays[name]
        if kind == "asgd":  # `lambd` is ASGD's second weight decay
            group["lambd"] *= decays[name]
    return optimizer


def _given(kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a configuration as arguments of torch's optimizer, which has defaults for absent ones."""
    settings = inspect.signature(_OPTIMIZERS[kind]).parameters
    keys = ("lr", "weight_decay", "momentum", "dampening", "nesterov", "alpha", "rho", "beta2_decay")
    given = {key: config[key] for key in keys if key in config and key in settings}
    if "eps" in settings and "eps" in config and kind != "adafactor":  # Adafactor's `eps` is a pair
        given["eps"] = config["eps"]
    if "betas" in settings and ("beta1" in config or "beta2" in config):
        beta1, beta2 = settings["betas"].default
        given["betas"] = (config.get("beta1", beta1), config.get("beta2", beta2))
    return given


def _refuse(config: Mapping[str, Any], *keys: str) -> None:
    for key in keys:
        if config.get(key, _ABSENT[key]) != _ABSENT[key]:
            raise ValueError(
                f"`config` has {key}={config[key]!r}, which this plain training loop does not follow; leave it out, or "
                "hand `transfer_check` a score_fn that trains as you do"
            )


def make_plain_optimizer(model: nn.Module, config: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Call `make_optimizer`. Raise ValueError for a schedule or warm-up, which this package's loops do not support."""
    _refuse(config, *_ABSENT)
    return make_optimizer(model, config)


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: Mapping[str, Any], batch: Any, objective: Objective
) -> None:
    """Do one optimizer step on one batch, in place. `config["grad_clip"]`, if given, is the largest gradient norm."""
    optimizer.zero_grad()
    loss = _loss(objective, model, batch)
    require(loss.requires_grad, "objective", objective, "one whose loss depends on a parameter that needs gradients")
    loss.backward()
    if config.get("grad_clip") is not None:
        nn.utils.clip_grad_norm_(model.parameters(), config["grad_clip"])
    optimizer.step()


def _loss(objective: Objective, model: nn.Module, batch: Any) -> Tensor:
    """Return an objective's loss; raise ValueError unless it is a scalar tensor."""
    loss: object = objective(model, batch)
    if isinstance(loss, Tensor) and loss.ndim == 0:
        return loss
    told = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    raise ValueError(f"`objective` returned {told}, but must return the loss, a scalar tensor")


def train(model: nn.Module, config: Mapping[str, Any], batches: Sequence[Any], objective: Objective) -> None:
    """Train a model in place, one optimizer step for each batch."""
    optimizer = make_plain_optimizer(model, config)
    model.train()
    for batch in batches:
        step(model, optimizer, config, batch, objective)


def evaluate(model: nn.Module, batches: Sequence[Any], objective: Objective) -> float:
    """Return the mean loss over batches, in evaluation mode."""
    model.eval()
    with torch.no_grad():
        return sum(_loss(objective, model, batch).item() for batch in batches) / len(batches)


@dataclass(frozen=True)
class Recording:
    """Sizes of outputs and of parameters in one training.

    Attributes:
        outputs: (module name, steps done) -> mean of |x| and mean of |x - x at step 0|; the model itself is named "".
            Modules whose output is empty or changes its size are left out, such as experts that get other examples.
        parameters: (parameter name, steps done) -> root mean square of the last step's change; before the first step,
            root mean square of the values.
    """

    outputs: dict[tuple[str, int], tuple[float, float]]
    parameters: dict[tuple[str, int], float]


def record_training(
    model: nn.Module, config: Mapping[str, Any], batches: Sequence[Any], objective: Objective
) -> Recording:
    """Do one step for each batch. Measure all outputs on the first batch, before the first step and after each step."""
    optimizer = make_plain_optimizer(model, config)
    first = {name: output for name, output in _outputs(model, batches[0], objective).items() if output.numel()}
    found = {(name, 0): (_size(output), 0.0) for name, output in first.items()}
    values = _values(model)
    parameters = {(name, 0): _root_mean_square(value) for name, value in values.items()}
    for done, batch in enumerate(batches, start=1):
        step(model, optimizer, config, batch, objective)
        now = _outputs(model, batches[0], objective)
        first = {name: start for name, start in first.items() if name in now and now[name].shape == start.shape}
        found |= {(name, done): (_size(now[name]), _size(now[name] - start)) for name, start in first.items()}
        before, values = values, _values(model)
        parameters |= {(name, done): _root_mean_square(value - before[name]) for name, value in values.items()}
    return Recording({key: sizes for key, sizes in found.items() if key[0] in first}, parameters)


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _root_mean_square(x: Tensor) -> float:
    return x.abs().square().mean().sqrt().item()


def _outputs(model: nn.Module, batch: Any, objective: Objective) -> dict[str, Tensor]:
    """Return each module's output in one forward pass: its floating point tensors, flattened and concatenated."""
    outputs: dict[str, Tensor] = {}

    def recorder(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def record(module: nn.Module, args: Any, output: Any) -> None:
            leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
            values = [leaf.flatten().clone() for leaf in leaves if leaf.is_floating_point()]
            if values:
                outputs[name] = torch.cat(values)

        return record

    # Leave out parametrizations, because their outputs are weights.
    layers = [(name, layer) for name, layer in model.named_modules() if "parametrizations" not in name.split(".")]
    handles = [layer.register_forward_hook(recorder(name)) for name, layer in layers]
    with torch.no_grad():
        objective(model, batch)
    for handle in handles:
        handle.remove()
    return outputs


def _size(x: Tensor) -> float:
    return x.abs().mean().item()
