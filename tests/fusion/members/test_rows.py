"""Parameters side by side in memory are the parameters that they were."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusion import FusedModel, FusedOptimizer, fuse, fused_optimizer
from fusion.members import rows
from fusion.members.rows import FlatParameters
from fusion.optim import native


class Odd(nn.Module):
    """Parameters of all shapes and two types: a scalar, an empty one, a matrix, a double."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.matrix = nn.Parameter(torch.randn(4, 5))
        self.double_ = nn.Parameter(torch.randn(2, 3, 2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (self.matrix @ x).sum() * self.scalar + self.double_.square().sum() + self.empty.sum()
        return out


@pytest.fixture(autouse=True, params=[rows.LARGE, 16], ids=["together", "matrix alone"])
def large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(native, "takes", lambda tensors: False)
    monkeypatch.setattr(rows, "LARGE", request.param)
    return int(request.param)


def odd(K: int = 3) -> FusedModel:
    torch.manual_seed(0)
    return fuse([Odd() for _ in range(K)])


def train(fused: FusedModel, opt: FusedOptimizer) -> None:
    opt.zero_grad()
    fused.map(lambda model, batch: model(batch), torch.ones(5)).sum().backward()
    opt.step()


def test_values_and_gradients_stay_and_member_k_is_row_k() -> None:
    fused, twin = odd(), odd()
    for model in (fused, twin):
        model.map(lambda model, batch: model(batch), torch.ones(5)).sum().backward()
    flat = fused.flat(fused.stacked)
    flat.gather(fused.stacked)
    for name, p in twin.stacked.items():
        assert torch.equal(fused.stacked[name], p)
        assert p.grad is not None
        assert torch.equal(fused.stacked[name].grad, p.grad)  # type: ignore[arg-type]
    for block in flat.values.blocks.values():
        block[1] = 7.0
    for block in flat.gradients.blocks.values():
        block[2] = 8.0
    assert (fused.stacked["matrix"][1] == 7).all()
    assert fused.stacked["scalar"][1] == 7
    assert torch.equal(fused.stacked["matrix"][[0, 2]], twin.stacked["matrix"][[0, 2]])
    assert (fused.stacked["double_"].grad[2] == 8).all()  # type: ignore[index]


def test_a_large_parameter_has_no_gaps_between_members(large: int) -> None:
    fused = odd()
    fused.flat(fused.stacked)
    assert fused.stacked["matrix"].is_contiguous() == (large <= fused.stacked["matrix"][0].numel())


def test_gradients_of_any_layout_are_gathered_and_those_that_are_missing_are_zero() -> None:
    parameters = {"a": nn.Parameter(torch.randn(2, 3, 4)), "b": nn.Parameter(torch.randn(2))}
    flat = FlatParameters(parameters)
    for grad_a, grad_b in [(torch.randn(2, 4, 3).mT, torch.randn(2)), (torch.randn(2, 3, 4), None)]:
        parameters["a"].grad, parameters["b"].grad = grad_a, grad_b
        flat.gather(parameters)
        b = torch.zeros(2) if grad_b is None else grad_b
        gathered = torch.cat([flat.gradients.parts[name].reshape(2, -1) for name in "ab"], 1)
        assert torch.equal(gathered, torch.cat([grad_a.reshape(2, -1), b[:, None]], 1))
        assert (parameters["b"].grad is None) == (grad_b is None)


def test_a_gradient_that_comes_first_to_rows_that_hold_others_is_gathered() -> None:
    """With one member, gradients in rows are contiguous, too."""
    parameters = {name: nn.Parameter(torch.randn(1, 3)) for name in "ab"}
    flat = FlatParameters(parameters)
    parameters["a"].grad = torch.ones(1, 3)
    flat.gather(parameters)
    parameters["a"].grad += 1
    parameters["b"].grad = torch.full((1, 3), 5.0)
    flat.gather(parameters)
    assert torch.cat(list(flat.gradients.blocks.values()), 1).tolist() == [[2.0] * 3 + [5.0] * 3]


def test_addresses_stay_over_steps() -> None:
    fused = odd()
    opt = fused_optimizer(fused, [{"lr": 0.1}] * 3)
    train(fused, opt)
    before = {name: p.data_ptr() for name, p in fused.stacked.items()}
    train(fused, opt)
    assert {name: p.data_ptr() for name, p in fused.stacked.items()} == before


def test_copies_kept_members_and_other_types_train_on() -> None:
    """Whatever puts new parameters in the old ones' place: the next step finds them."""

    def kept(fused: FusedModel, opt: FusedOptimizer) -> tuple[FusedModel, FusedOptimizer]:
        fused.keep([0, 1, 2])
        opt.keep([0, 1, 2])
        return fused, opt

    def cloned(fused: FusedModel, opt: FusedOptimizer) -> tuple[FusedModel, FusedOptimizer]:
        for p in fused.parameters():
            p.data = p.data.clone()
        return fused, opt

    untouched = odd()
    opt = fused_optimizer(untouched, [{"lr": 0.1}] * 3)
    train(untouched, opt)
    train(untouched, opt)
    for change in (kept, cloned, lambda *both: copy.deepcopy(both)):
        fused = odd()
        opt = fused_optimizer(fused, [{"lr": 0.1}] * 3)
        train(fused, opt)
        fused, opt = change(fused, opt)
        train(fused, opt)
        for name, p in untouched.stacked.items():
            assert torch.equal(p, fused.stacked[name])


def test_a_copy_leaves_the_rows_behind() -> None:
    fused = odd()
    fused.flat(fused.stacked)
    twin = copy.deepcopy(fused)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert fused.stacked["matrix"].any()


def test_a_pickle_holds_each_parameter_once() -> None:
    """A pickle of a view holds all of its matrix, and a matrix has the parameters of many layers."""
    fused = fuse([nn.Sequential(*(nn.Linear(4, 4) for _ in range(30))) for _ in range(3)])
    before = len(pickle.dumps(fused))
    fused.flat(fused.stacked)
    assert len(pickle.dumps(fused)) < 1.1 * before
    assert fused.in_rows("0.weight")


def test_autograd_notices_that_a_step_has_changed_what_it_kept() -> None:
    fused = odd()
    opt = fused_optimizer(fused, [{"lr": 0.1}] * 3)
    train(fused, opt)
    opt.zero_grad()
    losses: Any = fused.map(lambda model, batch: model(batch), torch.ones(5))
    losses.sum().backward(retain_graph=True)
    opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()
