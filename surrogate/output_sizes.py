"""Checks that the outputs of a model keep their sizes at another width."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from surrogate.widths import Shape

_MAIN = re.compile(r"output\['[^']*(logits|loss)")


def call_model(module: nn.Module, example_input: Any) -> Any:
    """Run a module on a batch: a dict of keyword arguments, a tuple of positional arguments, or a single argument."""
    if isinstance(example_input, Mapping):
        return module(**example_input)
    if isinstance(example_input, tuple):
        return module(*example_input)
    return module(example_input)


def output_shapes(output: Any, path: str = "output") -> dict[str, Shape]:
    """Return the shapes of all tensors in a model's output, which may be nested in tuples, lists and mappings.

    >>> output_shapes({"logits": torch.zeros(2, 3)})
    {"output['logits']": (2, 3)}
    """
    if isinstance(output, Tensor):
        return {path: tuple(output.shape)}
    items: list[tuple[Any, Any]] = []
    if isinstance(output, Mapping):
        items = list(output.items())
    elif isinstance(output, tuple | list):
        items = list(enumerate(output))
    return {inner: shape for key, value in items for inner, shape in output_shapes(value, f"{path}[{key!r}]").items()}


def main_outputs(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Select the logits and the loss from the outputs of a `transformers` model; all outputs if it has neither.

    Other outputs may be hidden states, which are narrower in a narrow model.

    >>> main_outputs({"output['logits']": (2, 3), "output['encoder_last_hidden_state']": (2, 8)})
    {"output['logits']": (2, 3)}
    """
    return {path: shape for path, shape in shapes.items() if _MAIN.match(path)} or dict(shapes)


def run_for_shapes(
    module: nn.Module, example_input: Any, during: contextlib.AbstractContextManager[Any] | None = None
) -> dict[str, Shape]:
    """Return the output shapes on one batch.

    A copy of the module runs, so that nothing in the module changes, not even running statistics. Torch's random
    numbers on the CPU do not change either. The batch may lie on another device. The copy runs within the context
    `during`, if there is one.
    """
    own = copy.deepcopy(module)
    at = next((tensor.device for tensor in (*own.parameters(), *own.buffers())), None)
    example = batch_at(at, example_input)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), during or contextlib.nullcontext():
        return output_shapes(call_model(own, example))


def batch_at(device: torch.device | None, batch: Any) -> Any:
    """Move a batch to a device. If one of its tensors is there already, return the batch as it is.

    A batch with tensors on several devices counts as intended.
    """
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    if device is None or any(tensor.device == device for tensor in tensors):
        return batch
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)


def record_calls(module: nn.Module, running: list[str]) -> list[RemovableHandle]:
    """Keep in `running` the names of the submodules that are being called, outermost first.

    After a failure its last entry is the innermost module that did not return.
    """
    handles = []
    for name, layer in module.named_modules():
        if name:
            handles.append(layer.register_forward_pre_hook(lambda *_, name=name: running.append(name)))
            handles.append(layer.register_forward_hook(lambda *_: (running.pop(), None)[1]))
    return handles


def check_outputs(narrow: nn.Module, other: nn.Module, example_input: Any) -> None:
    """Raise ValueError if a model fails on the batch, or if the shape of its output depends on the width."""
    try:
        shapes, others = run_for_shapes(narrow, example_input), run_for_shapes(other, example_input)
    except Exception as error:
        raise ValueError(f"the surrogate cannot run on `example_input`: {type(error).__name__}: {error}") from error
    for path, shape in shapes.items():
        if others.get(path) != shape:
            raise ValueError(
                f"the model's {path} depends on `width_ratio`: its shape is {shape} at one width and "
                f"{others.get(path)} at another; keep the size of the last layer's output"
            )
