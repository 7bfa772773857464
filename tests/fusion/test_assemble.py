"""What a copy of a module would lose is taken along, or refused."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusion import fuse, fused_optimizer, optimizer

X, Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3


class Overlapping(nn.Module):
    """Training one of the two changes the other, too."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.randn(8, 4))
        self.part = nn.Parameter(self.whole.detach()[:3])


def test_parameters_that_share_memory_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`modules\[0\]\.\w+` shares memory with `\w+`"):
        fuse([Overlapping()])


def test_parts_of_one_memory_that_do_not_overlap_are_taken() -> None:
    memory = torch.randn(15)
    layer = nn.Linear(4, 3)
    layer.weight.data, layer.bias.data = memory[:12].view(3, 4), memory[12:]
    assert fuse([layer, nn.Linear(4, 3)]).K == 2


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("K", [1, 3])
def test_gradients_that_are_there_count_in_the_first_step(K: int) -> None:
    torch.manual_seed(0)
    models = [nn.Linear(4, 3) for _ in range(K)]
    for model in models:
        loss(model, (X, Y)).backward()
    fused, config = fuse(models), {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9}
    opt, alone = fused_optimizer(fused, [config] * K), [optimizer(model, config) for model in models]
    for _ in range(2):
        fused.map(loss, (X, Y)).sum().backward()
        opt.step()
        opt.zero_grad()
        for model, own in zip(models, alone, strict=True):
            loss(model, (X, Y)).backward()
            own.step()
            own.zero_grad()
    for k, model in enumerate(models):
        torch.testing.assert_close(dict(fused.unfuse(k).state_dict()), dict(model.state_dict()))


def test_a_gradient_that_only_some_have_is_refused() -> None:
    models = [nn.Linear(4, 3) for _ in range(3)]
    loss(models[1], (X, Y)).backward()
    with pytest.raises(ValueError, match=r"1 of 3 `modules` have a gradient of weight"):
        fuse(models)
