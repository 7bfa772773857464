"""Weights averaged over the last steps of a training: a better model than the last step's where steps are noisy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Average:
    """An exponential average of tensors that training changes in place (Polyak and Juditsky 1992; EMA).

    A step is forgotten after `horizon` steps, in the mean. The first steps are averaged evenly, so that initial weights
    count for nothing. Of 16-bit tensors averages are kept in 32 bits: a small share of a difference would be lost.

    Args:
        tensors: Gives what is averaged, by name: the same names and shapes in every call.
    """

    def __init__(self, tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        self._tensors, self._steps, self._weight = tensors, 0, 1.0
        self._means = {name: _widened(tensor.detach()).clone() for name, tensor in tensors().items()}

    @property
    def differs(self) -> bool:
        """Tell whether the average differs from the last step's weights."""
        return self._weight < 1

    def update(self, horizon: float) -> None:
        """Take in the tensors after a step, with a horizon in steps; up to 1, the last step is all that counts."""
        self._steps += 1
        self._weight = max(1 / self._steps, 1 / max(1.0, horizon))
        current = self._tensors()
        values = [_widened(current[name].detach()) for name in self._means]
        torch._foreach_lerp_(list(self._means.values()), values, self._weight)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the tensors hold their averages for a while."""
        current = self._tensors()
        kept = {name: tensor.detach().clone() for name, tensor in current.items()}
        _write(current, self._means)
        try:
            yield
        finally:
            _write(current, kept)

    def state(self) -> dict[str, Any]:
        """Plain values and tensors, which `load` takes."""
        return {"steps": self._steps, "weight": self._weight, "means": self._means}

    def load(self, state: Mapping[str, Any]) -> None:
        self._steps, self._weight = state["steps"], state["weight"]
        _write(self._means, state["means"])


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that training changes and that can be averaged: learning parameters and running statistics."""
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {name: t for name, t in {**learning, **dict(model.named_buffers())}.items() if t.is_floating_point()}


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _write(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(values[name])
