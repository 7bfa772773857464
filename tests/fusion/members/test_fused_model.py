"""What `fuse` makes: the stack, its parts, and the way back."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from fusion import FusedModel, dry_run, fuse, fusion_key
from fusion.members.attributes import changed
from tests.fusion.evaluate.test_per_member_floats import Multiply
from tests.fusion.training import assert_same_gradients, assert_same_states


class Net(nn.Module):
    """Tied weights, a frozen layer, buffers of three kinds, a method, and attributes."""

    table: Tensor
    count: Tensor
    mean: Tensor

    def __init__(self, name: str = "net") -> None:
        super().__init__()
        self.name = name
        self.embed = nn.Embedding(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.linspace(0, 1, 5), persistent=False)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(5))

    def encode(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(self.frozen(self.embed(x)) + self.table)
        return normed

    def forward(self, x: Tensor) -> Tensor:
        h = self.encode(x)
        if self.training:
            self.count += 1
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        logits: Tensor = self.head(torch.relu(h - self.mean))
        return logits


X = torch.tensor([0, 3, 6, 2, 2, 1])


def loss(model: Net, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x), x)


def nets(K: int, seed: int = 0) -> list[Any]:
    torch.manual_seed(seed)
    return [Net() for _ in range(K)]


def assert_same(module: nn.Module, other: nn.Module) -> None:
    here, there = module.state_dict(), other.state_dict()
    assert list(here) == list(there)
    for name, tensor in here.items():
        assert torch.equal(tensor, there[name]), name


def test_unfuse_undoes_fuse() -> None:
    models = nets(3)
    for model in models:
        model.embed.weight.infshape = "kept"
    fused = fuse(models)
    for k, model in enumerate(models):
        again: Any = fused.unfuse(k)
        assert_same(again, model)
        assert type(again) is Net
        assert again.head.weight is again.embed.weight
        assert [n for n, p in again.named_parameters() if not p.requires_grad] == ["frozen.weight", "frozen.bias"]
        assert again(X).shape == (6, 7)
        assert vars(again.embed.weight)["infshape"] == "kept"


def test_fuse_copies() -> None:
    models = nets(2)
    before = copy.deepcopy(models[0])
    fused = fuse(models)
    fused.map(loss, X).sum().backward()
    with torch.no_grad():
        for p in fused.parameters():
            p.zero_()
    assert_same(models[0], before)
    assert all(p.grad is None for p in models[0].parameters())
    fused.unfuse(0).get_parameter("embed.weight").data.fill_(1)
    assert not fused.stacked["embed.weight"].any()


def test_stacked_has_tied_weights_once_and_original_names() -> None:
    fused = fuse(nets(4))
    assert {name: tuple(p.shape) for name, p in fused.stacked.items()} == {
        "embed.weight": (4, 7, 5),
        "norm.weight": (4, 5),
        "norm.bias": (4, 5),
        "frozen.weight": (4, 5, 5),
        "frozen.bias": (4, 5),
    }
    assert fused.stacked["embed.weight"].requires_grad
    assert not fused.stacked["frozen.weight"].requires_grad
    assert list(fused.shared) == ["table"]
    assert len(fused) == fused.K == 4


def test_equal_frozen_parameters_are_held_once() -> None:
    models = nets(3)
    for model in models[1:]:
        model.frozen.load_state_dict(models[0].frozen.state_dict())
    fused = fuse(models)
    assert set(fused.shared) == {"table", "frozen.weight", "frozen.bias"}
    assert fused.shared["frozen.weight"].shape == (5, 5)
    loss_K = fused.map(loss, X)
    for k, model in enumerate(models):
        torch.testing.assert_close(loss_K[k], loss(model, X))
        assert_same(fused.unfuse(k).get_submodule("frozen"), model.frozen)


def test_map_matches_separate_models_over_steps_and_modes() -> None:
    models = nets(3)
    fused = fuse(models)
    for training in (True, True, False, True):
        fused.train(training)
        fused.zero_grad()
        loss_K = fused.map(loss, X)
        loss_K.sum().backward()
        for k, model in enumerate(models):
            model.train(training).zero_grad()
            alone = loss(model, X)
            alone.backward()
            torch.testing.assert_close(loss_K[k], alone)
        assert_same_gradients(fused, models)
        assert_same_states(fused, models)
    assert fused.stacked_buffers["count"].tolist() == [3, 3, 3]


@pytest.mark.parametrize("one_by_one", [False, True])
def test_map_sees_a_real_module_and_returns_pytrees(one_by_one: bool) -> None:
    fused = fuse(nets(2), one_by_one=one_by_one)

    def objective(model: Net, batch: dict[str, Any]) -> dict[str, Any]:
        assert isinstance(model, Net)
        assert model.name == "net"
        assert batch["note"] == "any value"
        return {"hidden": model.encode(batch["x"]), "pair": (model.head.weight.sum(), torch.tensor(1.0)), "samples": 6}

    out = fused.map(objective, {"x": X, "note": "any value"})
    assert out["hidden"].shape == (2, 6, 5)
    assert [t.shape for t in out["pair"]] == [(2,), (2,)]
    assert out["samples"].tolist() == [6, 6]


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("K", [1, 3])
def test_members_with_data_of_their_own_compute_what_each_computes_alone(one_by_one: bool, K: int) -> None:
    models = [model.double() for model in nets(K)]
    fused = fuse(models)
    fused.one_by_one = one_by_one
    batch_K = {"x": torch.stack([X.roll(k) for k in range(K)]), "name": "own"}

    def objective(model: Net, batch: Any) -> Any:
        assert batch["name"] == "own"
        return loss(model, batch["x"])

    assert dry_run(fused, objective, batch_K, own_data=True) is None
    found = fused.map(objective, batch_K, own_data=True)
    found.sum().backward()
    for k, model in enumerate(models):
        expected = loss(model, X.roll(k))
        expected.backward()
        torch.testing.assert_close(found[k], expected)
    assert_same_gradients(fused, models)
    assert_same_states(fused, models)
    with pytest.raises(ValueError, match=f"`batch` is \\(6,\\).*{K} rows first, one for each member"):
        fused.map(loss, X, own_data=True)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_map_refuses_other_results(one_by_one: bool) -> None:
    fused = fuse(nets(2), one_by_one=one_by_one)
    with pytest.raises(ValueError, match="`objective` returns a NoneType, but must return tensors or numbers"):
        fused.map(lambda model, x: {"loss": loss(model, x), "extra": None}, X)


def test_inference_mode() -> None:
    models = nets(2)
    fused = fuse(models).eval()
    with torch.inference_mode():
        out_K = fused(X)
    torch.testing.assert_close(out_K.clone(), torch.stack([model.eval()(X) for model in models]))


def test_members_in_turn_write_to_inputs_of_their_own() -> None:
    class Shifted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x -= 1
            return super().forward(x)

    models, x = [Shifted(3, 2) for _ in range(3)], torch.randn(4, 3)
    out_K = fuse(models, one_by_one=True)(x.clone())
    torch.testing.assert_close(out_K, torch.stack([model(x.clone()) for model in models]))


@pytest.mark.parametrize("one_by_one", [False, True])
def test_members_compute_their_own_weights_where_torch_caches_them(one_by_one: bool) -> None:
    models, x = [weight_norm(nn.Linear(3, 2)) for _ in range(3)], torch.randn(4, 3)
    fused = fuse(models, one_by_one=one_by_one)
    with parametrize.cached():
        both = torch.stack([fused(x), fused(x)])
        fused.keep([1])
        last = fused(x)
        first = models[0](x)
    alone = torch.stack([model(x) for model in models])
    torch.testing.assert_close(first, alone[0])
    torch.testing.assert_close(both, torch.stack([alone, alone]))
    torch.testing.assert_close(last, alone[1:2])


def test_a_failing_objective_leaves_the_model_usable() -> None:
    fused = fuse(nets(2))

    def broken(model: Net, x: Tensor) -> Tensor:
        model(x)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fused.map(broken, X)
    assert fused.map(loss, X).shape == (2,)


def test_keep_selects_and_orders() -> None:
    models = nets(4)
    fused = fuse(models)
    fused.keep([3, 1, 1])
    for position, k in enumerate([3, 1, 1]):
        assert_same(fused.unfuse(position), models[k])
    assert fused.map(loss, X).shape == (3,)


def test_concat_joins_and_parts_what_was_shared() -> None:
    first, second = nets(2), nets(3, seed=1)
    for group in (first, second):
        for model in group:
            model.frozen.load_state_dict(group[0].frozen.state_dict())
    fused, other = fuse(first), fuse(second)
    assert "frozen.weight" in fused.shared
    fused.concat(other)
    assert fused.K == 5
    assert other.K == 3
    assert "frozen.weight" in fused.stacked
    for k, model in enumerate(first + second):
        assert_same(fused.unfuse(k), model)


def test_concat_compares_tensors_as_they_are_now() -> None:
    models = [nn.Linear(2, 3).double() for _ in range(3)]
    fused, other = fuse([model.float() for model in models[:2]]), fuse(models[2:])
    with pytest.raises(ValueError, match=r"weight: dtype torch\.float32 against torch\.float64"):
        fused.concat(other)
    fused.double()
    fused.concat(other)
    assert fused.key == other.key == fusion_key(fused.unfuse(0))
    assert_same(fused.unfuse(2), models[2])
    other.requires_grad_(False)
    with pytest.raises(ValueError, match="requires_grad True against False"):
        fused.concat(other)


def test_concat_leaves_the_other_model_as_it_is() -> None:
    fused, other = fuse([nn.Dropout(0.1)]), fuse([nn.Dropout(0.5)])
    fused.concat(other)
    fused.eval()
    fused.keep([0, 1])
    assert other.template.training


def test_concat_keeps_an_equal_base_shared() -> None:
    models = nets(4)
    for model in models:
        model.frozen.load_state_dict(models[0].frozen.state_dict())
    fused = fuse(models[:2])
    fused.concat(fuse(models[2:]))
    assert "frozen.weight" in fused.shared
    assert_same(fused.unfuse(3), models[3])


def test_state_dict_round_trip(tmp_path: Any) -> None:
    fused = fuse(nets(3))
    fused.map(loss, X)
    torch.save(fused.state_dict(), tmp_path / "fused.pt")
    again = fuse(nets(3, seed=5))
    again.load_state_dict(torch.load(tmp_path / "fused.pt", weights_only=True))
    for k in range(3):
        assert_same(again.unfuse(k), fused.unfuse(k))


@pytest.mark.parametrize(("was_shared", "is_shared"), [(True, False), (False, True)])
def test_state_dict_decides_what_is_shared(was_shared: bool, is_shared: bool) -> None:
    def with_base(seed: int, shared: bool) -> FusedModel:
        models = nets(2, seed)
        if shared:
            models[1].frozen.load_state_dict(models[0].frozen.state_dict())
        return fuse(models)

    saved, again = with_base(0, was_shared), with_base(1, is_shared)
    again.load_state_dict(saved.state_dict())
    assert ("frozen.weight" in again.shared) == was_shared
    for k in range(2):
        assert_same(again.unfuse(k), saved.unfuse(k))
    torch.testing.assert_close(again.map(loss, X), saved.map(loss, X))


class Listing(nn.Module):
    """It computes with its tensors by plain attributes, lists and dicts, some of parts that come later."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.own = nn.Linear(6, 4), nn.Parameter(torch.randn(4))
        self.register_buffer("scale", torch.rand(4))
        self.held: Any = {"weights": [self.layer.weight], "others": [{"scale": self.scale}]}
        vars(self)["alias"] = self.own

    def forward(self, x: Tensor) -> Tensor:
        (weight,), (others,) = self.held.values()
        out: Tensor = x @ weight.T * others["scale"] + self.alias
        return out


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("K", [1, 3])
def test_parameters_in_plain_lists_and_dicts_are_each_members_own(K: int, one_by_one: bool) -> None:
    models = [Listing() for _ in range(K)]
    fused = fuse(models, one_by_one=one_by_one)
    x = torch.randn(5, 6)
    out_K = fused(x)
    torch.testing.assert_close(out_K, torch.stack([model(x) for model in models]))
    out_K.square().sum().backward()
    assert all(fused.stacked[name].grad is not None for name in ("layer.weight", "own"))
    again: Any = fused.unfuse(K - 1)
    assert again.held["weights"][0] is again.layer.weight
    assert again.alias is again.own


def test_copy_and_dtype() -> None:
    fused = fuse(nets(2))
    twin = copy.deepcopy(fused).double()
    assert twin.stacked["embed.weight"].dtype == torch.float64
    torch.testing.assert_close(twin.eval()(X).float(), fused.eval()(X))
    assert fused.stacked["embed.weight"].dtype == torch.float32


def test_modes_reach_the_members() -> None:
    models = nets(2)
    for model in models:
        model.norm.eval()
    fused = fuse(models)
    assert fused.training
    assert not fused.unfuse(1).get_submodule("norm").training
    fused.keep([1])
    assert not fused.unfuse(0).get_submodule("norm").training
    assert fused.train().unfuse(0).get_submodule("norm").training


class Scaled(nn.Linear):
    """A layer whose hook carries a plain float, as a width multiplier does."""

    def __init__(self, scale: float) -> None:
        super().__init__(3, 2)
        self.register_forward_pre_hook(Multiply(scale))


def test_the_template_is_compared_once_for_all_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deep model has thousands of attributes, so a comparison for each member takes seconds."""
    fused, calls = fuse(nets(4)), list[nn.Module]()

    def counted(module: nn.Module, before: Any) -> Any:
        calls.append(module)
        return changed(module, before)

    monkeypatch.setattr("fusion.members.fused_model.changed", counted)
    fused.eval()
    fused.copy({1: 0})
    assert len(calls) == 1
    assert not any(fused.unfuse(k).training for k in range(4))


def test_hooks_survive() -> None:
    models = [Scaled(8.0) for _ in range(2)]
    fused, x = fuse(models), torch.randn(4, 3)
    torch.testing.assert_close(fused(x), torch.stack([model(x) for model in models]))
    torch.testing.assert_close(fused.unfuse(1)(x), models[1](x))


def test_members_take_the_floats_of_other_modules() -> None:
    models, other, x = [Scaled(8.0) for _ in range(2)], Scaled(3.0), torch.randn(4, 3)
    fused = fuse(models)
    fused.set_floats({1: other})
    other.load_state_dict(models[1].state_dict())
    torch.testing.assert_close(fused(x), torch.stack([models[0](x), other(x)]))


class Annealed(nn.Linear):
    """A layer that counts its calls and cools down with them, in plain attributes."""

    def __init__(self, slope: float) -> None:
        super().__init__(5, 7)
        self.calls, self.temperature, self.slope = 0, 1.0, slope

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.temperature *= 0.9
        return F.leaky_relu(super().forward(x), self.slope) / self.temperature + self.calls


@pytest.mark.parametrize("one_by_one", [False, True])
def test_plain_attributes_that_change_while_running(one_by_one: bool) -> None:
    x = torch.randn(4, 5)
    models = [Annealed(0.1 * k) for k in range(3)]
    fused, late = fuse(models, one_by_one=one_by_one), Annealed(0.7)
    for _ in range(3):
        torch.testing.assert_close(fused(x), torch.stack([model(x) for model in models]))
    fused.keep([2, 1])
    torch.testing.assert_close(fused(x), torch.stack([models[k](x) for k in (2, 1)]))
    assert list(fused.settings) == ["slope"]
    for position, k in enumerate((2, 1)):
        again: Any = fused.unfuse(position)
        assert (again.calls, again.temperature, again.slope) == (4, models[k].temperature, models[k].slope)
    with pytest.raises(ValueError, match="calls is 4 here, 0 in the other"):
        fused.concat(fuse([late]))
    peer = fuse([Annealed(0.7)])
    for _ in range(4):
        peer(x)
    fused.concat(peer)
    torch.testing.assert_close(fused(x)[2], peer(x)[0])


class Remembering(nn.Linear):
    """A layer that keeps what it computed, as attention layers do for plots."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return self.last


def test_what_forward_keeps_for_inspection_stands_in_no_ones_way() -> None:
    fused, x = fuse([Remembering(3, 2) for _ in range(2)]), torch.randn(4, 3)
    out_K = fused(x)
    torch.testing.assert_close(fused.unfuse(0)(x), out_K[0])
    fused.concat(fuse([Remembering(3, 2)]))
    fused.keep([2, 0])
    torch.testing.assert_close(fused.unfuse(1)(x), out_K[0])


def test_a_module_without_tensors() -> None:
    assert fuse([nn.ReLU()] * 3)(torch.tensor([-1.0, 2.0])).tolist() == [[0.0, 2.0]] * 3


def test_errors() -> None:
    fused: FusedModel = fuse(nets(2))
    with pytest.raises(ValueError, match="`modules` is empty"):
        fuse([])
    with pytest.raises(ValueError, match=r"`modules\[1\]` is <function .*, but must be of the class Module"):
        fuse([nn.Linear(1, 1), F.relu])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"`modules\[1\]` is not in the mode"):
        fuse([nn.Dropout(), nn.Dropout().eval()])
    with pytest.raises(ValueError, match=r"`modules\[0\]\.weight` is not initialized"):
        fuse([nn.LazyLinear(3)])
    with pytest.raises(ValueError, match=r"`modules\[0\]\.running_mean` is not initialized"):
        fuse([nn.LazyBatchNorm1d(affine=False)])
    with pytest.raises(ValueError, match="several devices"):
        fuse([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])
    with pytest.raises(ValueError, match="`indices` is empty"):
        fused.keep([])
    with pytest.raises(IndexError, match="`k` has 2, but must be in"):
        fused.unfuse(2)
    with pytest.raises(ValueError, match="they differ in type"):
        fused.concat(fuse([nn.Linear(2, 2)]))
