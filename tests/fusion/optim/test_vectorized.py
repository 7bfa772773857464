"""An update of all members takes as many operators as there are kinds of parameters, however many there are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.fusion_cases import mlp, resnet18
from fusion import clip_grad_norm_, fuse, fused_optimizer, optimizer
from fusion.optim import native, segments

K = 4
CONFIGS: dict[str, list[dict[str, Any]]] = {
    "adamw": [
        {"lr": 0.01, "beta1": 0.9 - 0.1 * k, "beta2": 0.99 - 0.01 * k, "weight_decay": 0.1 * k, "eps": 10.0 ** (k - 8)}
        for k in range(K)
    ],
    "adam": [{"optimizer": "adam", "lr": 0.01 * (k + 1), "weight_decay": 0.1 * k} for k in range(K)],
    "sgd": [{"optimizer": "sgd", "lr": 0.1, "momentum": 0.3 * k, "dampening": 0.1 * k} for k in range(K)],
}
# Adam divides by gradients, some of which are next to nothing.
ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-12}
LIMITS = [0.5, 1e9, float("inf"), 2.0]


class Operators(TorchDispatchMode):
    """Notes which operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks as large as there, and with none of the kernels that a CPU has."""
    monkeypatch.setattr(native, "WORTH_IT", 10**12)
    monkeypatch.setattr(segments, "BLOCK", segments.BLOCK_ELSEWHERE)


def multipliers(module: nn.Module, kind: str, seed: int) -> dict[str, dict[str, float]]:
    """One for each parameter, all different."""
    generator = torch.Generator().manual_seed(seed)
    names = [name for name, _ in module.named_parameters()]
    return {kind: dict(zip(names, torch.rand(len(names), generator=generator).tolist(), strict=True))}


def gradients(module: nn.Module, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(K, *p.shape, generator=generator) for name, p in module.named_parameters()}


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("kind", list(CONFIGS))
@pytest.mark.parametrize("make", [mlp, resnet18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_forty_operators_move_every_member_as_torch_would(
    make: Callable[[], nn.Module], kind: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    modules = [make().to(dtype) for _ in range(K)]
    factors = {
        "lr_multipliers": multipliers(modules[0], kind, 1),
        "weight_decay_multipliers": multipliers(modules[0], kind, 2),
    }
    fused = fuse(modules)
    opt = fused_optimizer(fused, CONFIGS[kind], **factors)
    counts = []
    for step in range(3):
        for name, p in fused.stacked.items():
            p.grad = gradients(modules[0], step)[name].to(dtype)
        opt.set_lr_factor(1 / (1 + step))
        with Operators() as operators:
            clip_grad_norm_(fused, LIMITS)
            opt.step()
        counts.append(len(operators.names))
    assert max(counts[1:]) <= 40
    for k, (module, config) in enumerate(zip(modules, CONFIGS[kind], strict=True)):
        alone = optimizer(module, config, **factors)
        rates = [group["lr"] for group in alone.param_groups]
        for step in range(3):
            for name, p in module.named_parameters():
                p.grad = gradients(module, step)[name][k].to(dtype)
            for group, rate in zip(alone.param_groups, rates, strict=True):
                group["lr"] = rate / (1 + step)
            nn.utils.clip_grad_norm_(module.parameters(), LIMITS[k])
            alone.step()
        for name, p in module.named_parameters():
            torch.testing.assert_close(fused.stacked[name][k], p, atol=ROUNDING[dtype], rtol=0)
