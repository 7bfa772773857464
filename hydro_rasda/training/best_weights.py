"""Choose the epoch whose weights a full-size training hands back, and average weights over the last steps.

If steps are noisy, averaged weights make a better model than the weights of the last step.
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
"""The kept epoch's score may be worse than the best one by this share of the gain.

The gain is the improvement from the first epoch's score to the best one. The best of many noisy scores is partly luck,
and later weights are better trained. On recorded trainings (`benchmarks/results/replay_notes.md`) the models handed
back have better test scores with any tolerance from 0.5 to 2 % than without one.
"""
FAR_OFF = 10.0
"""The gain is limited to this many times the best score.

The first score may be far off, for example if the labels of a regression are not scaled.
"""


def bettered(
    best: dict[str, Any] | None, epoch: int, score: float, mode: Mode, weights: Callable[[], Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Choose the epoch whose weights to keep, and return its entry: `best`, or a new one for this epoch.

    This epoch is chosen if its score is as good as the best score within `TOLERANCE`.

    Args:
        best: The entry so far; None if there is none. "epoch", "score" and "model" (weights) are those of the kept
            epoch. "first" is the first score, "top" the best score, and "top_epoch" the epoch of the best score.
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
    """Return the epoch whose weights a training with these scores by epoch keeps; 0 if no score is finite.

    >>> kept_epoch({1: 1.0, 2: 0.2, 3: 0.205, 4: 0.3}, "min"), kept_epoch({1: 1e6, 2: 0.2, 3: 0.205, 4: 0.3}, "min")
    (3, 3)
    """
    best: dict[str, Any] | None = None
    for epoch, score in sorted(curve.items()):
        best = bettered(best, epoch, score, mode, dict)
    return 0 if best is None else int(best["epoch"])


def epochs_since(best: Mapping[str, Any] | None, epoch: int) -> int:
    """Return the number of epochs since the one with the best score. `best` is an entry of `bettered`; None gives 0."""
    return 0 if best is None else epoch - int(best["top_epoch"])


class Average:
    """An exponential average of tensors that training changes in place (Polyak and Juditsky 1992; EMA).

    The average forgets a step after about `horizon` steps. The first steps are averaged evenly, so that initial weights
    do not count. Averages of 16-bit tensors are kept in 32 bits, because 16 bits would round small updates away.

    Args:
        tensors: Returns the tensors to average, by name. Each call returns the same names and shapes.
    """

    def __init__(self, tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        self._tensors, self._steps, self._weight = tensors, 0, 1.0
        self._means = {name: _widened(tensor.detach()).clone() for name, tensor in tensors().items()}
        # FSDP splits weights, but no running statistics, and torch refuses to mix both in one call.
        kinds = {type(mean) for mean in self._means.values()}
        self._alike = [[name for name, mean in self._means.items() if type(mean) is kind] for kind in kinds]

    @property
    def differs(self) -> bool:
        """Tell whether the average differs from the last step's weights."""
        return self._weight < 1

    def update(self, horizon: float) -> None:
        """After a training step, add the tensors' new values to the average.

        `horizon` is a number of steps. If it is at most 1, only the last step counts.
        """
        self._steps += 1
        self._weight = max(1 / self._steps, 1 / max(1.0, horizon))
        tensors = self._tensors()
        for names in self._alike:
            latest = [_widened(tensors[name].detach()) for name in names]
            torch._foreach_lerp_([self._means[name] for name in names], latest, self._weight)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the tensors hold their averages within the context; afterwards, restore their values."""
        current = self._tensors()
        kept = {name: tensor.detach().clone() for name, tensor in current.items()}
        _write(current, self._means)
        try:
            yield
        finally:
            _write(current, kept)

    def state(self) -> dict[str, Any]:
        """Return the average as tensors and plain values, which `load` accepts."""
        return {"steps": self._steps, "weight": self._weight, "means": self._means}

    def load(self, state: Mapping[str, Any]) -> None:
        self._steps, self._weight = state["steps"], state["weight"]
        _write(self._means, state["means"])


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that training changes and that can be averaged: weights and running statistics.

    Other buffers keep their last value, because averages of them may be invalid. For example, the mean of spectral
    normalization's unit vectors is not a unit vector.
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
