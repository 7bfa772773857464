"""Objectives by part, for a model of several parts that each have their own loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fusion.evaluate.microbatch import WEIGHT, is_weight
from hydro_rasda.common.argument_checks import require

GivenObjective = Callable[..., Mapping[str, Tensor]] | Mapping[str, Callable[..., Mapping[str, Tensor]]]
"""An objective as users pass it: a function of (model, batch) or (model, batch, config), or one for each model part."""


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


def check_dict(whose: str, returned: object) -> None:
    """Raise ValueError unless an objective returned a dict of tensors; `whose` names the objective."""
    listed = [*returned.items()] if isinstance(returned, Mapping) else [("", returned)]
    for name, value in listed:
        if not name or not isinstance(value, Tensor):
            told = f"{name!r} as a {type(value).__name__}" if name else f"a {type(value).__name__}"
            raise ValueError(f'{whose} returned {told}, but must return a dict of tensors, such as {{"loss": loss}}')


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
            if name in ("outputs", "targets"):
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
