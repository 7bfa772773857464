"""The weights that a full-size training hands back: averages over its last steps, of the epoch that is kept.

Averaged weights are a better model than those of the last step where steps are noisy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hydro_rasda.settings.config import Mode

TOLERANCE = 0.01
"""Share of what a training has gained since its first epoch, by which the kept epoch may be worse than the best one.

The best of many noisy scores is partly luck, and later weights are better trained. On recorded trainings
(`benchmarks/results/replay_notes.md`) the models handed back test better with anything from 0.5 to 2 % than with none.
"""
FAR_OFF = 10.0
"""A training has gained at most so many times its best score: the first may be far off, as of targets not scaled."""


def bettered(
    best: dict[str, Any] | None, epoch: int, score: float, mode: Mode, weights: Callable[[], Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Return the entry to keep after an epoch: this epoch if it is as good as the best within `TOLERANCE`, else `best`.

    Args:
        best: The entry so far; None if there is none. It has "epoch", "score" and the weights, "model", of the kept
            epoch; also the first score, "first", the best score, "top", and its epoch, "top_epoch".
        score: The metric after the epoch; an epoch whose score is not finite is never kept.
        weights: Returns a copy of the weights after this epoch; called only if they are to be kept.
    """
    if not math.isfinite(score):
        return best
    if best is None:
        return {"epoch": epoch, "score": score, "model": weights(), "first": score, "top": score, "top_epoch": epoch}
    sign = 1.0 if mode == "max" else -1.0
    if sign * score > sign * best["top"]:
        best = {**best, "top": score, "top_epoch": epoch}
    gain = min(abs(best["top"] - best["first"]), FAR_OFF * abs(best["top"]))
    if sign * (best["top"] - score) <= TOLERANCE * gain:
        best = {**best, "epoch": epoch, "score": score, "model": weights()}
    return best


def kept_epoch(curve: Mapping[int, float], mode: Mode) -> int:
    """Return the epoch that is kept of a training; 0 if none has a finite score.

    >>> kept_epoch({1: 1.0, 2: 0.2, 3: 0.205, 4: 0.3}, "min"), kept_epoch({1: 1e6, 2: 0.2, 3: 0.205, 4: 0.3}, "min")
    (3, 3)
    """
    best: dict[str, Any] | None = None
    for epoch, score in sorted(curve.items()):
        best = bettered(best, epoch, score, mode, dict)
    return 0 if best is None else int(best["epoch"])


def epochs_since(best: Mapping[str, Any] | None, epoch: int) -> int:
    """Return the number of epochs since the best one; 0 if there is none."""
    return 0 if best is None else epoch - int(best["top_epoch"])


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
        values = [_widened(tensor.detach()) for tensor in self._tensors().values()]
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
    """Return the tensors that training changes and whose average is one of them: weights and running statistics.

    Other buffers keep their last value: the mean of spectral normalization's unit vectors is no unit vector.
    """
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    running = {
        name: of for name, of in model.named_buffers() if name.rpartition(".")[2] in ("running_mean", "running_var")
    }
    tensors = {**learning, **running}
    return {name: t for name, t in tensors.items() if t.is_floating_point() or t.is_complex()}


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _write(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(values[name])
