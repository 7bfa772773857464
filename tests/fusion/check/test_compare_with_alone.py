"""The dry run compares fused members with each of them alone: faults are found, rounding is not one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusion import FusionMismatch, FusionWarning, dry_run, fuse
from fusion.check.compare_with_alone import _differing_in_float64, _moved, check_copy, restored
from tests.zoo import CASES, Case

X, Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
BATCH = (X, Y)


def loss(model: Any, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    out = model(batch[0])
    return {"loss": F.cross_entropy(out, batch[1]), "accuracy": (out.argmax(1) == batch[1]).float().mean()}


class InFloat32(nn.Sequential):
    """Insists on a precision, so that it does not run in another."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x.float())
        return out


def pooled(width: int, kind: type[nn.Sequential]) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs in (3, width):
        layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
    return kind(*layers, nn.Flatten(), nn.Linear(16 * width, 3))


def pictures(seed: int, cropped: bool) -> tuple[Tensor, Tensor]:
    """Of 16 x 16, in 256 levels; `cropped`: with a black margin, as augmentation leaves it."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(256, (48, 3, 16, 16), generator=g) / 255
    if cropped:
        x[:, :, :4] = 0
        x[..., :4] = 0
    return x, torch.randint(3, (48,), generator=g)


class Annealed(nn.Linear):
    """A float of each member's own, which forward changes."""

    def __init__(self, temperature: float) -> None:
        super().__init__(4, 3)
        self.temperature = temperature

    def forward(self, x: Tensor) -> Tensor:
        self.temperature = self.temperature * 0.5
        return super().forward(x) / self.temperature


class Averaging(nn.Linear):
    """It goes on from a number that it saw, which is in no buffer and, inside vmap, is no number."""

    mean = 1.0

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.mean = 0.5 * self.mean + 0.5 * out.detach().abs().mean().item()
        return out / self.mean


class Seeing(nn.Linear):
    """Takes a number for a sign of being a plain number, which inside vmap it is not."""

    def __init__(self, scale: float) -> None:
        super().__init__(4, 3)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (self.scale if type(self.scale) is float else 1.0)


class Detaching(nn.Linear):
    """The same values, another gradient."""

    def __init__(self, scale: float) -> None:
        super().__init__(4, 3)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if type(self.scale) is float else out.detach() + 0 * out


class Tallying(nn.Linear):
    """Writes into a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.seen = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.seen.add_(out.detach().mean(0))
        return out - self.seen


class Slightly(nn.Module):
    """Off by little, behind layers whose rounding is large."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.body, self.head = pooled(8, nn.Sequential), Seeing(scale)
        self.x = pictures(0, True)[0][:12]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(F.pad(self.body(self.x), (0, 1)))
        return out


FAULTS: list[tuple[str, Callable[[int], nn.Module], str]] = [
    ("anneals", lambda k: Annealed(1.0 + k), "attribute temperature"),
    ("sees", lambda k: Seeing(2.0 + k), r"member 0 in value\['loss'\]"),
    ("detaches", lambda k: Detaching(2.0 + k), "gradient of weight"),
    ("slightly", lambda k: Slightly(1.003 + k * 1e-5), r"value\['loss'\]"),
]


def test_a_tensor_that_is_no_buffer_is_each_members_own_where_members_run_in_turn() -> None:
    fused = fuse([Tallying() for _ in range(5)])
    with pytest.warns(FusionWarning, match="one after another"):
        dry_run(fused, loss, BATCH)


@pytest.mark.filterwarnings("ignore::fusion.FusionWarning")
@pytest.mark.parametrize(("build", "match"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_members_that_compute_something_else_are_refused(build: Callable[[int], nn.Module], match: str) -> None:
    torch.manual_seed(0)
    fused = fuse([build(k) for k in range(5)])
    with pytest.raises(FusionMismatch, match=rf"^of 5 members, fused and alone differ .*{match}"):
        dry_run(fused, loss, BATCH)


def test_numbers_that_members_in_turn_keep_are_each_ones_own() -> None:
    torch.manual_seed(0)
    fused = fuse([Averaging(4, 3) for _ in range(3)])
    with pytest.warns(FusionWarning, match=r"members train one after another"):
        dry_run(fused, loss, BATCH)
    alone = [fused.unfuse(k) for k in range(3)]
    for _ in range(3):
        expected = torch.stack([loss(member, BATCH)["loss"] for member in alone])
        torch.testing.assert_close(fused.map(loss, BATCH)["loss"], expected)
    assert len({member.mean for member in alone}) == 3


def prepared(case: Case, dtype: torch.dtype) -> tuple[Any, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    x, y = case.batch(0)
    fused = fuse([case.build().to(dtype) for _ in range(5)])
    return fused, (x.to(dtype) if x.is_floating_point() else x, y)


@pytest.mark.parametrize("kind", [nn.Sequential, InFloat32], ids=["any", "float32"])
@pytest.mark.parametrize("cropped", [False, True], ids=["whole", "cropped"])
@pytest.mark.parametrize("width", [8, *(pytest.param(width, marks=pytest.mark.slow) for width in (16, 32))])
def test_a_pooling_layer_that_takes_another_of_two_near_equal_elements_is_no_fault(
    width: int, cropped: bool, kind: type[nn.Sequential]
) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        fused = fuse([pooled(width, kind) for _ in range(3)])
        assert dry_run(fused, loss, pictures(seed, cropped)) is None


NO_HALF = {"parametrized"}


@pytest.mark.filterwarnings("ignore::fusion.FusionWarning")
@pytest.mark.parametrize(
    "dtype",
    [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16],  # less rounding, and more of it
    ids=["float32", "bfloat16"],
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rounding_is_no_fault(case: Case, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and case.name in NO_HALF:
        pytest.skip("no solver in half precision")
    fused, batch = prepared(case, dtype)
    before = {name: tensor.clone() for name, tensor in fused.state_dict().items()}
    dry_run(fused, case.objective, batch)
    assert all(torch.equal(tensor, before[name]) for name, tensor in fused.state_dict().items())


@pytest.mark.parametrize("one_by_one", [False, True])
def test_autocast_dropout_and_a_member_that_is_not_finite(one_by_one: bool) -> None:
    def objective(model: Any, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, batch)

    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 99), nn.ReLU(), nn.Dropout(p), nn.Linear(99, 3)) for p in (0.0, 0.1, 0.5)]
    with torch.no_grad():
        models[2][0].get_parameter("weight").fill_(float("nan"))
    fused = fuse(models, one_by_one=one_by_one)
    assert dry_run(fused, objective, BATCH) is None


class FromTokens(nn.Module):
    """Rows of tokens, as images for a convolution: their channels are last in memory, alone, too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.dropout, self.head = nn.Conv2d(4, 6, 1), nn.Dropout(0.3), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        images = x.reshape(len(x), 4, 4).transpose(1, 2).reshape(len(x), 4, 2, 2)
        out: Tensor = self.head(self.dropout(self.conv(images)).flatten(1))
        return out


@pytest.mark.parametrize("one_by_one", [False, True])
def test_the_order_in_which_masks_are_drawn_is_no_fault(one_by_one: bool) -> None:
    x = torch.randn(12, 16, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    fused = fuse([FromTokens() for _ in range(2)], one_by_one=one_by_one)
    assert dry_run(fused, loss, (x, Y)) is None


@pytest.mark.parametrize(("dtype", "by"), [(torch.float64, 30 * 2.0**-52), (torch.bfloat16, 2.0**-3.5)])
def test_weights_move_by_30_roundings_and_in_half_precision_by_fewer(dtype: torch.dtype, by: float) -> None:
    layer = nn.Linear(50, 50).to(dtype)
    nn.init.ones_(layer.weight)
    torch.manual_seed(0)
    change = _moved(layer, 0.0).get_parameter("weight").double() - 1
    assert change.std().item() == pytest.approx(by, rel=0.1)


def test_chaos_within_rounding_is_no_fault() -> None:
    """The logistic map doubles a rounding at each of its steps."""

    class Chaotic(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x).sigmoid()
            for _ in range(16):
                out = 3.9 * out * (1 - out)
            return out

    torch.manual_seed(0)
    assert dry_run(fuse([Chaotic(64, 3) for _ in range(4)]), loss, (torch.randn(12, 64), Y)) is None


def test_an_objective_that_writes_into_its_batch() -> None:
    def objective(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0].sub_(1).mul_(3)), batch[1])

    before = X.clone()
    assert dry_run(fuse([nn.Linear(4, 3) for _ in range(3)]), objective, BATCH, compare=True) is None
    assert torch.equal(X, before)


class Masked(nn.Linear):
    """Its mask is a buffer of booleans, which forward changes."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.mask = out.detach().mean(0) > 0
        return out * self.mask


def test_buffers_of_booleans_and_sparse_gradients_are_compared() -> None:
    torch.manual_seed(0)
    assert dry_run(fuse([Masked() for _ in range(3)]), loss, BATCH) is None

    def bags(model: Any, batch: Tensor) -> Tensor:
        out: Tensor = model(batch).square().mean()
        return out

    for make in (nn.Embedding, nn.EmbeddingBag):
        fused = fuse([make(9, 4, sparse=True) for _ in range(3)])
        assert dry_run(fused, bags, torch.arange(6)[None]) is None


def test_members_that_vmap_cannot_follow_are_compared_in_float64_one_after_another() -> None:
    class Branching(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out if out.sum() > 0 else -out

    fused = fuse([Branching(4, 3) for _ in range(3)], one_by_one=True)
    assert _differing_in_float64(fused, [0, 2], loss, BATCH) == {}


def test_buffers_that_are_put_back_lie_elsewhere_and_the_changes_count() -> None:
    fused = fuse([nn.BatchNorm1d(4) for _ in range(2)])
    changes, mean = fused.changes, fused.stacked_buffers["running_mean"]
    with restored(fused):
        fused(X)
    assert fused.stacked_buffers["running_mean"] is not mean
    assert fused.changes > changes


class OfTheOther(nn.Linear):
    """A layer of which a copy goes on calling the original, unless `own`."""

    def __init__(self, own: bool) -> None:
        torch.manual_seed(0)
        super().__init__(4, 3)
        self.function = self.product if own else lambda x: self.product(x)

    def product(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.function(x)
        return out


class Listing(nn.Linear):
    """A layer that computes with one of its parameters by a tuple, in which another tensor comes first."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.held = (torch.ones(3, requires_grad=True), self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.held[1]


class OnlyListed(Listing):
    """It computes with nothing else, so that no operator meets tensors with and without data."""

    def forward(self, x: Tensor) -> Tensor:
        return self.held[1].square()


def test_a_copy_that_computes_with_parts_of_the_original_is_refused() -> None:
    check_copy(lambda: OfTheOther(own=True), loss, BATCH)
    with pytest.raises(FusionMismatch, match=r"a copy and the model itself differ in gradient of weight"):
        check_copy(lambda: OfTheOther(own=False), loss, BATCH)
    with pytest.raises(FusionMismatch, match=r"the loss depends on `held\[1\]`, a parameter in a tuple"):
        check_copy(Listing, loss, BATCH)
    with pytest.raises(FusionMismatch, match=r"the loss depends on `held\[1\]`, a parameter in a tuple"):
        check_copy(OnlyListed, lambda model, batch: model(batch[0]).sum(), BATCH)
