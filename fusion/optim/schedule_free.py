"""Schedule-Free AdamW and SGD (Defazio et al. 2024, arXiv:2405.15682), as schedulefree 1.4 has them.

A sequence z takes the steps, and x is the average of all z so far, weighted by the square of the largest rate so far.
Gradients are those at y = (1 - beta) z + beta x. In training the parameters hold y and the state holds z. In evaluation
the parameters hold x.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

AVERAGING = ("lr_max", "weight_sum", "k")
"""Keys of a parameter group: the largest rate, the sum of the average's weights, and the steps so far."""


class ScheduleFree(torch.optim.Optimizer):
    """Steps and modes of the Schedule-Free optimizers; they begin in the mode of training."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, {**settings, "lr_max": 0.0, "weight_sum": 0.0, "k": 0, "train_mode": True})

    def train(self) -> None:
        """Have the parameters hold the weights at which gradients are taken."""
        self._switch(True)

    def eval(self) -> None:
        """Have the parameters hold the averages, which are the weights to evaluate."""
        self._switch(False)

    @torch.no_grad()
    def _switch(self, training: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != training:
                beta = self._beta(group)
                for p in group["params"]:
                    if self.state.get(p):
                        p.lerp_(self.state[p]["z"], 1 - beta if training else 1 - 1 / beta)
                group["train_mode"] = training

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        if not all(group["train_mode"] for group in self.param_groups):
            raise RuntimeError("the optimizer is in evaluation mode, but must be in training mode: call its `train()`")
        if all(p.grad is None for group in self.param_groups for p in group["params"]):
            return
        for group in self.param_groups:
            lr, beta, group["k"] = group["lr"], self._beta(group), group["k"] + 1
            group["lr_max"] = max(lr, group["lr_max"])
            group["weight_sum"] += group["lr_max"] ** 2
            share = group["lr_max"] ** 2 / group["weight_sum"] if group["weight_sum"] > 0 else 0.0
            for p in (p for p in group["params"] if p.grad is not None):
                if not self.state.get(p):
                    self.state[p]["z"] = p.detach().clone()
                y, z = self._real(p), self._real(self.state[p]["z"])
                moved = self._direction(group, p).add(y, alpha=group["weight_decay"])
                y.lerp_(z, share).add_(moved, alpha=lr * (beta * (1 - share) - 1))
                z.sub_(moved, alpha=lr)

    def _beta(self, group: Mapping[str, Any]) -> float:
        return float(group["momentum"] if "momentum" in group else group["betas"][0])

    def _direction(self, group: dict[str, Any], p: Tensor) -> Any:
        return self._real(p.grad)

    @staticmethod
    def _real(t: Any) -> Any:
        return torch.view_as_real(t) if t.is_complex() else t


class ScheduleFreeAdamW(ScheduleFree):
    """AdamW without a schedule.

    Args:
        params: Groups of parameters.
        lr: Learning rate.
        betas: The average's share in the weights at which gradients are taken, in (0, 1), and the decay rate of the
            second moment.
        eps: Added to the root of the second moment.
        weight_decay: Taken off the weights, times the learning rate.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.0025,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def _direction(self, group: dict[str, Any], p: Tensor) -> Any:
        beta2, state = group["betas"][1], self.state[p]
        if "exp_avg_sq" not in state:
            state["exp_avg_sq"] = torch.zeros_like(p)
        g, v = self._real(p.grad), self._real(state["exp_avg_sq"])
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        return g / (v / (1 - beta2 ** group["k"])).sqrt().add_(group["eps"])


class ScheduleFreeSGD(ScheduleFree):
    """SGD without a schedule.

    Args:
        params: Groups of parameters.
        lr: Learning rate.
        momentum: The average's share in the weights at which gradients are taken, in (0, 1).
        weight_decay: Added to the gradient, times the weights.
    """

    def __init__(self, params: Any, lr: float = 1.0, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay)


def has_modes(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether `train` and `eval` switch an optimizer between the weights that it trains and those to evaluate."""
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


@torch.no_grad()
def keep_average(optimizer: ScheduleFree, before: Sequence[Mapping[str, Any]]) -> None:
    """Move the weights that train as the average's share in them has changed, so that the average stays.

    Args:
        before: The groups with the settings until now.
    """
    for group, was in zip(optimizer.param_groups, before, strict=True):
        ratio = optimizer._beta(group) / optimizer._beta(was)
        for p in group["params"] if ratio != 1 else ():
            if optimizer.state.get(p):
                p.copy_(optimizer.state[p]["z"].lerp(p, ratio))


@contextmanager
def evaluating(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Have the parameters of an optimizer in training mode hold the weights to evaluate; then, exactly what they held.

    Without modes, these are the same.
    """
    if not has_modes(optimizer):
        yield
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in parameters]
    optimizer.eval()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        optimizer.train()  # type: ignore[attr-defined]
        write(parameters, before)


@torch.no_grad()
def write(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Have tensors hold other values."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)
