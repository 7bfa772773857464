"""The role of each weight of a model (embedding, hidden, head), told by the widths that its layer reads and writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from torch import nn

from surrogate.multipliers import width_plan
from surrogate.readouts import input_weight, reads_and_writes
from surrogate.widths import ParamWidth

Role = Literal["embedding", "hidden", "head"]


def parameter_roles(model: nn.Module, params: Mapping[str, ParamWidth] | None = None) -> dict[str, Role]:
    """Return the roles of a model's weights.

    - "embedding": weights of embeddings, and of layers that read an input and write a width;
    - "hidden": weights that read one width and write another;
    - "head": weights of layers that read a width and write an output.

    Biases, norms, depthwise convolutions, and weights of the same size at each width have no role. A weight that an
    embedding shares with the head is an embedding's.

    Args:
        model: A surrogate, or its target if `params` is given.
        params: Parameter name -> its widths; None: those of the surrogate's plan.

    Returns:
        Parameter name -> role.

    Raises:
        ValueError: if `params` is None and `model` has no width plan.
    """
    params = width_plan(model).params if params is None else params
    hidden: dict[str, Role] = {name: "hidden" for name, width in params.items() if width.is_matrix}
    return hidden | dict(sorted(_roles_of_layers(model, params), key=lambda found: found[1] == "embedding"))


def _roles_of_layers(model: nn.Module, params: Mapping[str, ParamWidth]) -> Iterator[tuple[str, Role]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for layer in model.modules():
        weight = input_weight(layer)
        name = "" if weight is None else names.get(id(weight), "")
        if not name or params[name].shape == params[name].target_shape:
            continue
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            yield name, "embedding"
            continue
        sides = reads_and_writes(layer, params[name])
        if sides == (True, False):
            yield name, "head"
        elif sides == (False, True) and getattr(layer, "groups", 1) == 1:
            yield name, "embedding"
