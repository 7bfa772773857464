"""The size of what each module of a model puts out, and how far training moves it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from surrogate.training import Objective, make_plain_optimizer, step


@dataclass(frozen=True)
class Recording:
    """Sizes of outputs and of parameters in one training.

    Attributes:
        outputs: (module name, steps done) -> mean of |x| and mean of |x - x at step 0|; the model itself is named "".
        parameters: (parameter name, steps done) -> root mean square of its last step's change; at 0, of its values.
    """

    outputs: dict[tuple[str, int], tuple[float, float]]
    parameters: dict[tuple[str, int], float]


def record_training(
    model: nn.Module, config: Mapping[str, Any], batches: Sequence[Any], objective: Objective
) -> Recording:
    """Train one step for each batch and measure every module's output on the first one, before and after each."""
    optimizer = make_plain_optimizer(model, config)
    first = _outputs(model, batches[0], objective)
    found = {(name, 0): (_size(output), 0.0) for name, output in first.items()}
    values = _values(model)
    parameters = {(name, 0): _root_mean_square(value) for name, value in values.items()}
    for done, batch in enumerate(batches, start=1):
        step(model, optimizer, config, batch, objective)
        now = _outputs(model, batches[0], objective)
        found |= {(name, done): (_size(output), _size(output - first[name])) for name, output in now.items()}
        before, values = values, _values(model)
        parameters |= {(name, done): _root_mean_square(value - before[name]) for name, value in values.items()}
    return Recording(found, parameters)


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _root_mean_square(x: Tensor) -> float:
    return x.abs().square().mean().sqrt().item()


def _outputs(model: nn.Module, batch: Any, objective: Objective) -> dict[str, Tensor]:
    """Module name -> its output in one forward pass, all its floating point tensors in a row."""
    outputs: dict[str, Tensor] = {}

    def recorder(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def record(module: nn.Module, args: Any, output: Any) -> None:
            leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
            values = [leaf.flatten().clone() for leaf in leaves if leaf.is_floating_point()]
            if values:
                outputs[name] = torch.cat(values)

        return record

    handles = [layer.register_forward_hook(recorder(name)) for name, layer in model.named_modules()]
    with torch.no_grad():
        objective(model, batch)
    for handle in handles:
        handle.remove()
    return outputs


def _size(x: Tensor) -> float:
    return x.abs().mean().item()
