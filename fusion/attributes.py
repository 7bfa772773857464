"""Plain attributes that modules change while they run: the mode, counters, temperatures that anneal.

One module computes for all members, so what it changes holds for all; the others catch up when they are looked at.
"""

from __future__ import annotations

from typing import Any

from torch import nn

_PLAIN = (bool, int, float, str, type(None))


def plain_attributes(module: nn.Module) -> list[dict[str, Any]]:
    """For each module in order, its attributes that are numbers, strings or None."""
    return [
        {name: value for name, value in vars(child).items() if isinstance(value, _PLAIN)} for child in module.modules()
    ]


def set_attributes(module: nn.Module, attributes: list[dict[str, Any]]) -> None:
    """Put attributes back as `plain_attributes` listed them."""
    for child, values in zip(module.modules(), attributes, strict=True):
        vars(child).update(values)


def check_same_state(module: nn.Module, other: nn.Module) -> None:
    """Raise ValueError where a counter or the like has come to differ; floats may, and so may the mode."""
    for (path, _), ours, theirs in zip(module.named_modules(), plain_attributes(module), plain_attributes(other)):
        for name, value in ours.items():
            if name != "training" and not isinstance(value, float) and value != theirs.get(name):
                where = f"{path}.{name}" if path else name
                raise ValueError(f"models have run apart: {where} is {value} here, {theirs.get(name)} in the other")


def follow(source: nn.Module, target: nn.Module, own: set[tuple[int, Any]]) -> None:
    """Give `target` the plain attributes of `source`, a module of the same structure.

    Args:
        source: The module that has run.
        target: The module that catches up.
        own: (id of a module in `source`, attribute) where each member has a value of its own.
    """
    for theirs, ours in zip(source.modules(), target.modules(), strict=True):
        for name, value in vars(theirs).items():
            if isinstance(value, _PLAIN) and (id(theirs), name) not in own:
                vars(ours)[name] = value
