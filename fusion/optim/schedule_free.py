"""Schedule-Free AdamW and SGD (Defazio et al. 2024, arXiv:2405.15682), as in schedulefree 1.4.

The steps update a sequence z. The sequence x is the average of all z so far, each weighted by the square of the largest
learning rate until then. Gradients are taken at y = (1 - beta) z + beta x. In training mode, the parameters hold y, and
the optimizer state holds z. In evaluation mode, the parameters hold x.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

AVERAGING = ("lr_max", "weight_sum", "k")
"""Keys of a parameter group: largest learning rate so far, sum of the average's weights, and number of steps."""


class ScheduleFree(torch.optim.Optimizer):
    """Base class of the Schedule-Free optimizers, with their steps and modes. They start in training mode."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, {**settings, "lr_max": 0.0, "weight_sum": 0.0, "k": 0, "train_mode": True})

    def train(self) -> None:
        """Put the weights y, at which gradients are taken, into the parameters."""
        self._switch(True)

    def eval(self) -> None:
        """Put the averages x, which are the weights for evaluation, into the parameters."""
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
        weight_decay: Decoupled weight decay: a step subtracts `lr * weight_decay` times the weight.
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
        weight_decay: A step adds `weight_decay` times the weight to the gradient.
    """

    def __init__(self, params: Any, lr: float = 1.0, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay)


def has_modes(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has `train()` and `eval()`, which switch the weights for training and evaluation."""
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


@torch.no_grad()
def keep_average(optimizer: ScheduleFree, before: Sequence[Mapping[str, Any]]) -> None:
    """Change the weights y in the parameters so that the average x stays the same, although its share in y has changed.

    Args:
        before: The optimizer's earlier parameter groups, with the old share.
    """
    for group, was in zip(optimizer.param_groups, before, strict=True):
        ratio = optimizer._beta(group) / optimizer._beta(was)
        for p in group["params"] if ratio != 1 else ():
            if optimizer.state.get(p):
                p.copy_(optimizer.state[p]["z"].lerp(p, ratio))


@contextmanager
def evaluating(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Put the weights for evaluation into an optimizer's parameters, inside this context; then restore the old values.

    The optimizer must be in training mode. If it has no modes, nothing changes.
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
    """Copy values into tensors."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)
