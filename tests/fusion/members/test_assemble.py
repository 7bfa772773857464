"""What a copy of a module would lose is taken along, or refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusion import FusionMismatch, dry_run, fuse
from tests.fusion.training import Both

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


def test_a_parameter_that_lies_within_another_tensor_is_refused_whatever_lies_between() -> None:
    memory, layer = torch.randn(15), nn.Linear(4, 3)
    layer.register_buffer("whole", memory)
    layer.register_buffer("first", memory[:2])
    layer.bias.data = memory[12:]
    with pytest.raises(ValueError, match=r"`modules\[0\]\.bias` shares memory with `whole`"):
        fuse([layer])


def add(tensor: Tensor) -> None:
    tensor.add_(1)


def add_unseen(tensor: Tensor) -> None:
    tensor.data.add_(1)


class Views(nn.Linear):
    """`part` is a view of `whole`: what is written to one is in the other."""

    whole: Tensor
    part: Tensor
    count: Tensor

    def __init__(self, kind: str, writes_to: str, write: Callable[[Tensor], None] = add) -> None:
        super().__init__(4, 3)
        whole = torch.arange(3.0)
        for name, tensor in {"whole": whole, "part": whole[1:], "count": torch.zeros(1)}.items():
            if kind == "frozen":
                self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
            else:
                self.register_buffer(name, tensor, persistent=kind == "buffer")
        self.writes_to, self.write = writes_to, write

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.write(self.count)
            if self.writes_to:
                self.write(getattr(self, self.writes_to))
        return super().forward(x) * self.whole.sum() * self.part.sum() + self.count


KINDS = ["buffer", "constant", "frozen"]
REFUSED = r"forward writes to `(whole|part)`, which shares memory with another tensor of its module"


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("K", [1, 3])
@pytest.mark.parametrize("writes_to", ["whole", "part"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_write_to_a_view_is_refused_by_map_and_by_the_dry_run(
    kind: str, writes_to: str, K: int, one_by_one: bool
) -> None:
    """Before, the one was written to and the other stayed as it was, here and in the copies that were compared."""
    fused = fuse([Views(kind, writes_to) for _ in range(K)], one_by_one=one_by_one)
    # Where they have their own, as where they differ.
    fused.part_parameters(["whole", "part", "count"])
    fused.part_buffers()
    with pytest.raises(FusionMismatch, match=REFUSED):
        fused.map(loss, (X, Y))
    if K > 1 or not one_by_one:
        with pytest.raises(FusionMismatch, match=REFUSED):
            dry_run(fuse([Views(kind, writes_to) for _ in range(K)], one_by_one=one_by_one), loss, (X, Y))


@pytest.mark.parametrize("kind", KINDS)
def test_the_dry_run_finds_a_write_that_torch_does_not_count(kind: str) -> None:
    with pytest.raises(FusionMismatch, match=REFUSED):
        dry_run(fuse([Views(kind, "part", add_unseen) for _ in range(3)]), loss, (X, Y))


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("K", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_views_that_are_only_read_are_taken(kind: str, K: int, one_by_one: bool) -> None:
    models = [Views(kind, "") for _ in range(K)]
    fused = fuse(models, one_by_one=one_by_one)
    assert dry_run(fused, loss, (X, Y)) is None
    for _ in range(2):
        found, expected = fused.map(loss, (X, Y)), torch.stack([loss(model, (X, Y)) for model in models])
        torch.testing.assert_close(found, expected)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("K", [1, 3])
def test_gradients_that_are_there_count_in_the_first_step(K: int) -> None:
    torch.manual_seed(0)
    models = [nn.Linear(4, 3) for _ in range(K)]
    for model in models:
        loss(model, (X, Y)).backward()
    both = Both(fuse(models), models, [{"optimizer": "sgd", "lr": 0.1, "momentum": 0.9}] * K, loss)
    both.fused.map(loss, (X, Y)).sum().backward()
    both.opt.step()
    for model, own in zip(models, both.alone, strict=True):
        loss(model, (X, Y)).backward()
        own.step()
    both.step((X, Y))
    both.assert_equal()


def test_a_gradient_that_only_some_have_is_refused() -> None:
    models = [nn.Linear(4, 3) for _ in range(3)]
    loss(models[1], (X, Y)).backward()
    with pytest.raises(ValueError, match=r"1 of 3 `modules` have a gradient of weight"):
        fuse(models)


def test_a_sparse_constant_is_fused() -> None:
    """Torch compares no sparse tensors, so that each member has its own."""

    class Neighbours(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.register_buffer("edges", torch.eye(5).roll(1, 0).to_sparse(), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            edges: Any = self.edges
            out: Tensor = torch.sparse.mm(edges, self.layer(x))
            return out

    models, x = [Neighbours() for _ in range(3)], torch.randn(5, 4)
    torch.testing.assert_close(fuse(models)(x), torch.stack([model(x) for model in models]))
