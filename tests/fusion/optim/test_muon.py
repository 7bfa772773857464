"""Muon for hidden matrices and AdamW for the rest, against torch's own of both."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusion import fuse, fused_optimizer
from fusion.optim.muon import hidden_matrices, orthogonalized
from tests.fusion.training import Both

X = torch.randn(32, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.arange(32) % 3


class Net(nn.Module):
    """An embedding, attention, a tied readout and one matrix more, beside a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.conv = nn.Embedding(5, 8), nn.Conv1d(8, 8, 3)
        self.attention, self.norm = nn.MultiheadAttention(8, 2), nn.LayerNorm(8)
        self.hidden, self.readout = nn.Linear(8, 8), nn.Linear(8, 5)
        self.readout.weight = self.table.weight


def test_hidden_matrices_are_what_lies_between_embeddings_and_the_readout() -> None:
    attention = {"attention.in_proj_weight", "attention.out_proj.weight"}
    assert hidden_matrices(Net()) == attention | {"hidden.weight"}
    mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    assert hidden_matrices(mlp) == {"0.weight", "2.weight"}
    mlp[2].requires_grad_(False)
    assert hidden_matrices(mlp) == {"0.weight"}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_matrix_without_elements_is_left_to_adamw() -> None:
    """Such as that of an `nn.Linear(0, 6)` for inputs that are left out: torch's Muon divides by its width."""

    class TwoInputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left_out, self.given, self.readout = nn.Linear(0, 6), nn.Linear(8, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.readout((self.left_out(x[:, :0]) + self.given(x)).tanh())
            return y

    torch.manual_seed(0)
    config = {"optimizer": "muon", "lr": 0.1, "adjust_lr_fn": "original"}
    modules = [TwoInputs().double() for _ in range(2)]
    both = Both(fuse(modules), modules, [config] * 2, lambda model, x: model(x).square().mean())
    for _ in range(2):
        both.step(X)
    both.assert_equal()


def test_a_parameter_may_decide_for_itself_fused_too() -> None:
    def marked() -> nn.Sequential:
        mlp = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
        for name, mark in (("0.weight", False), ("4.weight", True)):
            vars(mlp.get_parameter(name))["use_muon"] = mark
        return mlp

    assert hidden_matrices(marked()) == {"2.weight", "4.weight"}
    opt = fused_optimizer(fuse([marked(), marked()]), [{"optimizer": "muon", "lr": 0.1}] * 2)
    assert opt.unfuse(0, marked()).param_groups[0]["use_muon"]
    assert {len(group["params"]) for group in opt.unfuse(0, marked()).param_groups if group["use_muon"]} == {2}
    wrong = marked()
    vars(wrong.get_parameter("0.bias"))["use_muon"] = True
    with pytest.raises(ValueError, match=r"`0\.bias\.use_muon` is True, but must be .* real 2-D parameters"):
        hidden_matrices(wrong)


@pytest.mark.parametrize(
    "module", [nn.Linear(4, 4), nn.Embedding(4, 4), nn.LayerNorm(4)], ids=["readout", "rows", "1-D"]
)
def test_a_model_without_hidden_matrices_needs_another_optimizer(module: nn.Module) -> None:
    with pytest.raises(ValueError, match="`optimizer` is 'muon', but must be another one for a model without hidden"):
        fused_optimizer(fuse([module] * 2), [{"optimizer": "muon", "lr": 0.1}] * 2)


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4)])
def test_each_matrix_of_a_batch_is_orthogonalized_as_torch_does_it_alone(shape: tuple[int, int]) -> None:
    directions = torch.randn(2, 3, *shape, generator=torch.Generator().manual_seed(0))
    directions[0, 1] = 0
    found = orthogonalized(directions)
    for i in range(2):
        for r in range(3):
            alone = torch.nn.Parameter(torch.zeros(shape))
            alone.grad = directions[i, r]
            torch.optim.Muon([alone], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
            scale = max(1.0, shape[0] / shape[1]) ** 0.5
            torch.testing.assert_close(found[i, r].float() * -scale, alone.detach(), atol=2e-2, rtol=2e-2)


def test_twenty_steps_in_double_precision_are_those_of_torchs_muon_and_adamw() -> None:
    """Written out with two of torch's optimizers, which share nothing with ours."""
    torch.manual_seed(0)
    sizes = (8, 16, 16, 24, 3)
    models = [
        nn.Sequential(*(part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.Tanh()))).double()
        for _ in range(3)
    ]
    configs: list[dict[str, Any]] = [
        {"optimizer": "muon", "lr": 0.02},
        {"optimizer": "muon", "lr": 0.05, "lr.adamw": 0.003, "adjust_lr_fn": "original", "weight_decay": 0.0},
        {"optimizer": "muon", "lr": 0.01, "momentum": 0.8, "nesterov": False, "beta1": 0.7, "beta2": 0.95},
    ]
    fused = fuse(models)
    opt = fused_optimizer(fused, configs)
    own = []
    for model, config in zip(models, configs):
        matrices = [model.get_parameter(f"{i}.weight") for i in (0, 2, 4)]
        others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
        settings = {k: config[k] for k in ("momentum", "nesterov", "weight_decay") if k in config}
        adjust = config.get("adjust_lr_fn", "match_rms_adamw")
        muon = torch.optim.Muon(matrices, config["lr"], adjust_lr_fn=adjust, **settings)
        betas = config.get("beta1", 0.9), config.get("beta2", 0.999)
        lr, decay = config.get("lr.adamw", config["lr"]), config.get("weight_decay", 0.1)
        own.append((muon, torch.optim.AdamW(others, lr, betas, weight_decay=decay)))
    for _ in range(20):
        opt.zero_grad()
        loss_K = fused.map(lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]), (X, Y))
        loss_K.sum().backward()
        opt.step()
        losses = []
        for model, optimizers in zip(models, own):
            loss = nn.functional.cross_entropy(model(X), Y)
            model.zero_grad()
            loss.backward()
            for one in optimizers:
                one.step()
            losses.append(loss.detach())
    torch.testing.assert_close(loss_K.detach(), torch.stack(losses), atol=1e-12, rtol=0)


def test_a_step_that_a_member_does_not_take_leaves_its_matrices_and_momenta() -> None:
    torch.manual_seed(0)
    fused = fuse([nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double() for _ in range(3)])
    opt = fused_optimizer(fused, [{"optimizer": "muon", "lr": 0.1}] * 3)
    states: list[dict[str, Tensor]] = []
    for takes in (None, torch.tensor([True, False, True])):
        opt.zero_grad()
        fused.map(lambda model, _: nn.functional.cross_entropy(model(X), Y), None).sum().backward()
        opt.step(takes)
        momenta = {name: kept["first"] for name, kept in opt.state_dict()["state"].items()}
        states.append({**{f"{n} momentum": m for n, m in momenta.items()}, **fused.stacked})
        states[-1] = {name: tensor.detach().clone() for name, tensor in states[-1].items()}
    for name, before in states[0].items():
        assert torch.equal(before[1], states[1][name][1])
        assert not torch.equal(before[0], states[1][name][0])


@pytest.mark.parametrize("trains", [True, False], ids=["unfrozen", "frozen"])
@pytest.mark.parametrize("alike", [True, False])
def test_matrices_are_those_that_train_when_the_optimizer_is_made(trains: bool, alike: bool) -> None:
    """Although others trained when the model was fused. Equal ones are then held once."""
    models = []
    for k in range(2):
        torch.manual_seed(0 if alike else k)
        body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()).double()
        torch.manual_seed(k)
        models.append(nn.Sequential(body.requires_grad_(not trains), nn.Linear(8, 3).double()))
    fused = fuse(models)
    changed = ("0.2.weight", "0.0.weight") if trains else ("1.weight",)
    for name in changed:
        {**fused.shared, **fused.stacked}[name].requires_grad_(trains)
        for model in models:
            model.get_parameter(name).requires_grad_(trains)
    config = {"optimizer": "muon", "lr": 0.02, **({"lr.0": 0.01} if trains else {})}
    both = Both(fused, models, [config] * 2, lambda model, _: nn.functional.cross_entropy(model(X), Y))
    assert both.opt._matrices == hidden_matrices(models[0]) == {"0.0.weight"} | ({"0.2.weight"} if trains else set())
    for _ in range(4):
        both.step(None)
    both.keep([1])
    both.step(None)
    both.assert_equal(lambda ours, theirs: torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4))
