"""A loss scale for each member, against torch's GradScaler for each alone; members that overflow, and those beside."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fusion.optim.loss_scale
from fusion import FusedModel, FusedOptimizer, LossScale, clip_grad_norm_, fuse, fused_optimizer
from fusion.optim import optimizer
from fusion.optim.torch_optimizer import let_skip, step_if

STEPS, CLIP = 9, 0.5
OVERFLOWS: tuple[set[int], ...] = ({0, 4, 5}, set(), {3})
"""Steps at which the gradients of each of three members are not finite."""

CONFIGS: list[dict[str, Any]] = [
    {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
    {"optimizer": "sgd", "lr": 0.1},
    {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True},
    {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.1},
    {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1},
]


class Model(nn.Module):
    """`width` makes one that is small, updated in rows, or one that torch's own kernels update."""

    def __init__(self, seed: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.hidden, self.out = nn.Linear(4, width), nn.Linear(width, 1)
        self.number = float(seed)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(torch.tanh(self.hidden(x)))
        return y


def batches() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Inputs, targets, and by what each member's loss is multiplied: far too much where it is to overflow."""
    torch.manual_seed(9)
    boosts = [torch.tensor([1e38 if step in of else 1.0 for of in OVERFLOWS]) for step in range(STEPS)]
    return [(torch.randn(16, 4), torch.randn(16, 1), boost) for boost in boosts]


def objective(model: Any, batch: Any) -> Tensor:
    x, y, boost = batch
    chosen = torch.stack([boost[k] * (model.number == k) for k in range(3)]).sum()
    loss: Tensor = (model(x) - y).square().mean() * chosen
    return loss


def a_step(fused: FusedModel, opt: FusedOptimizer, scale: LossScale, batch: Any) -> Tensor:
    opt.zero_grad()
    scale.apply(fused.map(objective, batch)).sum().backward()
    takes_K = scale.unscale(fused)
    clip_grad_norm_(fused, CLIP)
    opt.step(takes_K)
    scale.update(takes_K)
    return takes_K


def group(
    config: dict[str, Any], width: int, members: range = range(3)
) -> tuple[FusedModel, FusedOptimizer, LossScale]:
    fused = fuse([Model(k, width) for k in members])
    return fused, fused_optimizer(fused, [config] * len(members)), LossScale(len(members))


def values(fused: FusedModel, opt: FusedOptimizer, k: int) -> list[Tensor]:
    """Member k's parameters, moments and counts of steps."""
    moments = [tensor[k] for of in opt.state_dict()["state"].values() for tensor in of.values()]
    return [*(p.detach()[k].clone() for p in fused.stacked.values()), *moments, opt.steps_KP[k].clone()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(autouse=True)
def short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion.optim.loss_scale, "INTERVAL", 3)


@pytest.mark.parametrize("width", [8, 20_000])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: "-".join(map(str, config.values())))
def test_each_member_trains_as_alone_under_torchs_scaler(config: dict[str, Any], width: int) -> None:
    # Where Adam's gradients are next to nothing, rounding decides on their sign.
    atol = 2e-4 if width > 8 else 1e-6
    fused, opt, scale = group(config, width)
    alone = [Model(k, width) for k in range(3)]
    optimizers = [optimizer(model, config) for model in alone]
    scalers = [torch.amp.GradScaler("cpu", growth_interval=3) for _ in range(3)]
    for step, batch in enumerate(batches()):
        before = [values(fused, opt, k) for k in range(3)]
        takes = a_step(fused, opt, scale, batch).tolist()
        assert takes == [step not in of for of in OVERFLOWS]
        for k, (model, own, scaler) in enumerate(zip(alone, optimizers, scalers)):
            own.zero_grad()
            scaler.scale(objective(model, batch)).backward()
            scaler.unscale_(own)
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            scaler.step(own)
            scaler.update()
            assert scale.scale_K[k].item() == scaler.get_scale()
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(fused.stacked[name][k], parameter, rtol=2e-5, atol=atol)
            if not takes[k] and step:  # moments come with the first step
                assert same(values(fused, opt, k), before[k])


@pytest.mark.parametrize("config", CONFIGS[::4], ids=["sgd", "adamw"])
def test_what_overflows_leaves_those_beside_it_bit_for_bit(config: dict[str, Any]) -> None:
    """Member 1 beside two that overflow, and beside two that do not."""
    (fused, opt, scale), (calm, calm_opt, calm_scale) = group(config, 8), group(config, 8)
    for batch in batches():
        a_step(fused, opt, scale, batch)
        a_step(calm, calm_opt, calm_scale, (*batch[:2], torch.ones(3)))
    assert same(values(fused, opt, 1), values(calm, calm_opt, 1))
    assert scale.scale_K[1] == calm_scale.scale_K[1] != scale.scale_K[0]


def test_scales_go_along_with_members() -> None:
    """Kept, joined, saved and loaded in the middle of training, they end as in an unbroken one."""
    whole, first, second, loaded = (group(CONFIGS[4], 8) for _ in range(4))
    for batch in batches()[:5]:
        for of in (whole, first, second):
            a_step(*of, batch)
    for (fused, opt, scale), kept in ((first, [2, 0]), (second, [1])):
        fused.keep(kept)
        opt.keep(kept)
        scale.keep(kept)
    first[0].concat(second[0])
    first[1].concat(second[1])
    first[2].concat(second[2])
    loaded[0].load_state_dict(first[0].state_dict(), members=[1, 2, 0])
    loaded[1].load_state_dict(first[1].state_dict(), members=[1, 2, 0])
    loaded[2].load_state_dict(first[2].state_dict(), members=[1, 2, 0])
    for batch in batches()[5:]:
        for of in (whole, loaded):
            a_step(*of, batch)
    assert torch.equal(whole[2].scale_K, loaded[2].scale_K)
    assert torch.equal(whole[2].steps_K, loaded[2].steps_K)
    assert all(same(values(*whole[:2], k), values(*loaded[:2], k)) for k in range(3))
    with pytest.raises(ValueError, match="`state_dict` is 'of 3 members', but must be of 2"):
        LossScale(2).load_state_dict(whole[2].state_dict())


def test_a_scale_stays_finite_and_above_0() -> None:
    scale = LossScale(2)
    for _ in range(200):
        scale.update(torch.tensor([True, False]))
    assert scale.scale_K.tolist() == [fusion.optim.loss_scale.LARGEST, 1 / fusion.optim.loss_scale.LARGEST]


class Waits(TorchDispatchMode):
    """Counts where the host reads a value."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_no_step_waits_for_the_host() -> None:
    fused, opt, scale = group(CONFIGS[4], 8)
    for batch in batches()[:2]:
        a_step(fused, opt, scale, batch)
    opt.zero_grad()
    scale.apply(fused.map(objective, batches()[2])).sum().backward()
    with Waits() as waits:
        takes_K = scale.unscale(fused)
        clip_grad_norm_(fused, CLIP)
        opt.step(takes_K)
        scale.update(takes_K)
    assert waits.count == 0


@pytest.mark.parametrize(
    "config", [*CONFIGS, {**CONFIGS[0], "dampening": 0.5}], ids=lambda c: "-".join(map(str, c.values()))
)
def test_a_module_leaves_out_a_step_also_its_first(config: dict[str, Any]) -> None:
    """As if the step had never been."""
    gradients: Callable[[int], list[Tensor]] = lambda step: [  # noqa: E731
        torch.full_like(p, 0.1 * (step + 1)) for p in Model(0, 4).parameters()
    ]
    trained = []
    for steps in ([0, 1, 2], [None, 0, None, 1, 2]):
        model = Model(0, 4)
        opt = optimizer(model, config)
        let_skip(opt)
        for step in steps:
            for p, gradient in zip(model.parameters(), gradients(step or 0)):
                p.grad = gradient.clone() if step is not None else torch.full_like(p, torch.inf)
            step_if(torch.tensor([step is not None]), opt)
        trained.append((model, copy.deepcopy(opt.state_dict())))
    (a, state), (b, other) = trained
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters()))
    for i, of in state["state"].items():
        assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(other["state"][i][name])) for name, v in of.items())


def test_a_loss_in_half_precision_is_scaled_as_by_gradscaler() -> None:
    """Times 65536, it would be infinite in float16."""
    loss_K = torch.tensor([0.5, 3.0], dtype=torch.float16)
    scaled = [torch.amp.GradScaler("cpu").scale(loss) for loss in loss_K]
    torch.testing.assert_close(LossScale(2).apply(loss_K), torch.stack(scaled))
    torch.testing.assert_close(LossScale(1).apply(loss_K[1]), scaled[1])
