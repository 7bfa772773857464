"""Prodigy (Mishchenko & Defazio 2024, arXiv:2306.06101, Algorithm 4), as in prodigyopt 1.1.

Steps are those of Adam, times an estimate `d` of the distance from the start to a solution. All parameters of a model
share one estimate. Its numerator sums gradients times (start - weights); its denominator sums the absolute values of
accumulated gradients.
"""

from __future__ import annotations

from typing import Any

import torch

ESTIMATES = ("d", "d_numerator", "k")
"""Keys of a parameter group for the optimizer's own values: the estimate, its numerator, and the number of steps."""


class Prodigy(torch.optim.Optimizer):
    """Adam, with the learning rate multiplied by an estimate of the distance to a solution. The estimate never shrinks.

    Unlike in prodigyopt, groups may have different learning rates. The `lr_factor` of a group is its learning rate
    divided by the common one. The estimate is the same as if each weight were divided by its factor, and all weights
    were trained with the common rate.

    Args:
        params: Parameter groups with their `lr`, and with `lr_factor` if the learning rates differ.
        lr: Multiplies the estimate; 1 in the paper.
        betas: Decay rates of the moments.
        eps: Multiplied by the estimate and added to the root of the second moment.
        weight_decay: Decoupled weight decay: a step subtracts `lr * weight_decay` times the estimate times the weight.
        d_coef: Multiplies the estimate when it grows.
        d0: The first estimate.
        use_bias_correction: If True, correct the moments for their start at zero, as Adam does.
        safeguard_warmup: If True, leave the learning rate out of the estimate's denominator, for a training with
            warm-up.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        d_coef: float = 1.0,
        d0: float = 1e-6,
        use_bias_correction: bool = False,
        safeguard_warmup: bool = False,
    ) -> None:
        own = {"lr": lr, "lr_factor": 1.0, "betas": betas, "eps": eps, "weight_decay": weight_decay, "d_coef": d_coef}
        own |= {"d0": d0, "use_bias_correction": use_bias_correction, "safeguard_warmup": safeguard_warmup}
        super().__init__(params, {**own, "d": d0, "d_numerator": 0.0, "k": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient, in groups with a learning rate above 0."""
        groups = [group for group in self.param_groups if group["lr"] > 0]
        slots = [(group, self._slot(p)) for group in groups for p in group["params"] if p.grad is not None]
        if not slots:
            return
        of = groups[0]
        d, d0, (beta1, beta2) = of["d"], of["d0"], of["betas"]
        after = of["k"] + 1
        corrected = d * (1 - beta2**after) ** 0.5 / (1 - beta1**after) if of["use_bias_correction"] else d
        ways, sizes = [], []
        for group, (p, g, m, v, s, p0) in slots:
            ways.append((g * (p0 - p)).sum())
            m.mul_(beta1).add_(g, alpha=d * (1 - beta1))
            v.mul_(beta2).addcmul_(g, g, value=d * d * (1 - beta2))
            rate = d * group["lr_factor"] if of["safeguard_warmup"] else corrected * group["lr"]
            sizes.append(s.mul_(beta2**0.5).add_(g, alpha=d / d0 * rate).abs().sum())
        way, size = self._total(ways), self._total(sizes)
        if size == 0:
            return
        numerator = beta2**0.5 * of["d_numerator"] + d / d0 * corrected * of["lr"] / of["lr_factor"] * way
        grown = max(d, of["d_coef"] * numerator / size)
        ratio = grown / d if beta1 == 0 else 1.0
        for group, (p, _, m, v, _, _) in slots:
            p.mul_(1 - corrected * group["lr"] * group["weight_decay"])
            p.addcdiv_(m, v.sqrt().add_(grown * group["eps"]), value=-corrected * group["lr"] * ratio)
        for group in self.param_groups:
            group.update(d=grown, d_numerator=numerator, k=after)

    def _slot(self, p: torch.Tensor) -> list[torch.Tensor]:
        """Return a parameter, its gradient and its state. Complex tensors are viewed as pairs of real numbers."""
        if not self.state[p]:
            self.state[p] = {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq", "s")}
            self.state[p]["p0"] = p.detach().clone()
        state = self.state[p]
        tensors = [p, p.grad, state["exp_avg"], state["exp_avg_sq"], state["s"], state["p0"]]
        return [torch.view_as_real(t) if t.is_complex() else t for t in tensors]

    @staticmethod
    def _total(parts: list[torch.Tensor]) -> float:
        total = torch.stack([part.double() for part in parts]).sum()
        # If ranks hold shards of the parameters (DTensor), each rank has a part of the sum: add the parts.
        return float(total.full_tensor() if hasattr(total, "full_tensor") else total)
