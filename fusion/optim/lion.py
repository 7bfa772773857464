"""The optimizer Lion (Chen et al. 2023, arXiv:2302.06675), which torch does not have, as a `torch.optim.Optimizer`."""

from __future__ import annotations

import torch


class Lion(torch.optim.Optimizer):
    """Moves each weight by the learning rate, against the sign of a mix of momentum and gradient.

    Args:
        params: Groups of parameters.
        lr: Learning rate.
        betas: The momentum's share in this mix, and its share in the next momentum.
        weight_decay: Decoupled weight decay: a step subtracts `lr * weight_decay` times the weight.
    """

    def __init__(
        self,
        params: list[dict[str, object]],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                real = [torch.view_as_real(t) if t.is_complex() else t for t in (p, p.grad, self.state[p]["exp_avg"])]
                weights, gradient, momentum = real
                weights.mul_(1 - lr * group["weight_decay"])
                weights.sub_(momentum.lerp(gradient, 1 - beta1).sign_(), alpha=lr)
                momentum.lerp_(gradient, 1 - beta2)
