"""What modules gain while they run (hooks, attributes, tensors kept for later) is each member's, wherever it goes."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusion import FusionWarning, dry_run, fuse, fusion_key
from fusion.members.attributes import OwnValues, _same, changed, loose_tensors, put_back, snapshot

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))


class Recurrent(nn.Module):
    """Its state between calls is a tensor in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.back, self.out = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.h: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x) if self.h is None else self.inner(x) + self.back(self.h)
        self.h = h.tanh().detach()
        out: Tensor = self.out(h)
        return out


class Listing(Recurrent):
    """The state stands in a dict beside a number; it has gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: dict[str, Any] = {"steps": 0, "seen": []}

    def forward(self, x: Tensor) -> Tensor:
        seen = self.memory["seen"]
        h = self.inner(x) + sum(self.back(h) for h in seen)
        self.memory = {"steps": self.memory["steps"] + 1, "seen": [*seen, h.tanh()][-2:]}
        out: Tensor = self.out(h)
        return out


class Buffered(Recurrent):
    """It stands in a buffer that is None at first."""

    def __init__(self) -> None:
        super().__init__()
        del self.h
        self.register_buffer("h", None)


class Lazy(Recurrent):
    """It is not there at first."""

    def __init__(self) -> None:
        super().__init__()
        del self.h

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "h"):
            self.h = torch.zeros(5, 4)
        return super().forward(x)


class Filled(Recurrent):
    """Forward makes a tensor that is equal in all members, and writes their values into it."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x) if self.h is None else self.inner(x) + self.back(self.h)
        if self.h is None:
            self.h = torch.zeros(5, 4)
        self.h.copy_(h.tanh().detach())
        out: Tensor = self.out(h)
        return out


class Cooled(Recurrent):
    """Forward writes to a tensor that the constructor has made."""

    def __init__(self) -> None:
        super().__init__()
        self.heat = torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        self.heat *= 0.5
        return super().forward(x) * self.heat


class Nested(Recurrent):
    """Forward writes into a list that a dict holds."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: dict[str, list[Tensor | None]] = {"h": [None]}

    def forward(self, x: Tensor) -> Tensor:
        before = self.memory["h"][0]
        h = self.inner(x) if before is None else self.inner(x) + self.back(before)
        self.memory["h"][0] = h.tanh().detach()
        out: Tensor = self.out(h)
        return out


STATES = [Recurrent, Listing, Buffered, Lazy, Filled, Cooled, Nested]


@pytest.mark.parametrize("one_by_one", [False, True], ids=["fused", "one-by-one"])
@pytest.mark.parametrize("build", STATES)
def test_tensors_that_forward_keeps_go_with_their_member(build: type[nn.Module], one_by_one: bool) -> None:
    torch.manual_seed(0)
    models = [build() for _ in range(4)]
    fused = fuse(models, one_by_one=one_by_one)

    def step(members: list[nn.Module]) -> None:
        torch.testing.assert_close(fused(X), torch.stack([model(X) for model in members]))

    step(models)
    step(models)
    fused.keep([2, 0, 3])
    step([models[2], models[0], models[3]])
    late = build()
    fused.concat(fuse([late]))
    members = [models[2], models[0], models[3], late]
    step(members)
    step(members)
    twins = copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))
    apart = [fused.unfuse(k) for k in range(4)]
    out_K = fused(X)
    for again_K in (*(twin(X) for twin in twins), torch.stack([model(X) for model in apart])):
        torch.testing.assert_close(again_K, out_K)
    torch.testing.assert_close(out_K, torch.stack([model(X) for model in members]))
    fused.keep([1])
    torch.testing.assert_close(fused(X)[0], models[0](X))
    torch.testing.assert_close(fused.unfuse(0)(X), models[0](X))


@pytest.mark.parametrize("one_by_one", [False, True], ids=["fused", "one-by-one"])
@pytest.mark.parametrize("build", STATES)
def test_a_copy_takes_the_tensors_that_forward_kept(build: type[nn.Module], one_by_one: bool) -> None:
    torch.manual_seed(0)
    models = [build() for _ in range(3)]
    fused = fuse(models, one_by_one=one_by_one)
    fused(X)
    fused.copy({2: 0})
    for model in models:
        model(X)
    first, second = models[0](X), models[1](X)
    torch.testing.assert_close(fused(X), torch.stack([first, second, first]))


class Averaged(nn.Module):
    """Training writes a mean into a tensor of an attribute; evaluation alone reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mean = nn.Linear(3, 2), torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        if not self.training:
            return out - self.mean
        self.mean.mul_(0.9).add_(out.detach().mean(0), alpha=0.1)
        return out


def test_members_that_run_in_turn_write_to_tensors_of_their_own() -> None:
    models = [Averaged() for _ in range(3)]
    fused = fuse(models)
    with pytest.warns(FusionWarning, match="writes members' values into a tensor that they share"):
        assert dry_run(fused, lambda model, x: model(x).sum(), X) is not None
    for _ in range(2):
        torch.testing.assert_close(fused(X), torch.stack([model(X) for model in models]))
    fused.eval()
    for model in models:
        model.eval()
    torch.testing.assert_close(fused(X), torch.stack([model(X) for model in models]))
    fused.keep([2, 1])
    torch.testing.assert_close(fused.unfuse(0)(X), models[2](X))
    assert fused.attributes_changed


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("again", [lambda fused: pickle.loads(pickle.dumps(fused)), copy.deepcopy])
def test_a_recurrent_layer_is_copied_though_it_holds_weak_references(again: Any, frozen: bool) -> None:
    fused = fuse([nn.LSTM(3, 2).requires_grad_(not frozen) for _ in range(2)])
    twin = again(fused)
    torch.testing.assert_close(twin(X)[0], fused(X)[0], rtol=0, atol=0)
    twin.eval()
    for k in range(2):
        torch.testing.assert_close(twin.unfuse(k)(X)[0], fused.unfuse(k)(X)[0], rtol=0, atol=0)


def test_an_attribute_that_forward_writes_to_has_changed() -> None:
    fused = fuse([Cooled() for _ in range(2)])
    assert not fused.attributes_changed
    fused(X)
    assert fused.attributes_changed


def test_gradients_reach_through_what_is_kept_from_one_call_to_the_next() -> None:
    models = [Listing() for _ in range(2)]
    fused = fuse(models)
    (fused(X).sum() + fused(2 * X).sum()).backward()
    for k, model in enumerate(models):
        (model(X).sum() + model(2 * X).sum()).backward()
        torch.testing.assert_close(fused.stacked["back.weight"].grad[k], model.get_parameter("back.weight").grad)  # type: ignore[index]


@pytest.mark.parametrize("one_by_one", [False, True], ids=["fused", "one-by-one"])
@pytest.mark.parametrize("build", STATES)
def test_a_dry_run_leaves_no_trace_in_attributes(build: type[nn.Module], one_by_one: bool) -> None:
    models = [build() for _ in range(3)]
    fused = fuse(models, one_by_one=one_by_one)
    assert dry_run(fused, lambda model, x: model(x).sum(), X) is None
    assert fused.one_by_one == one_by_one
    torch.testing.assert_close(fused(X), torch.stack([model(X) for model in models]))


class HookedLater(nn.Module):
    """At its first call it hooks its layer, as `transformers` does to record hidden states."""

    def __init__(self, slope: float = 0.1) -> None:
        super().__init__()
        self.layer, self.out, self.slope = nn.Linear(3, 4), nn.Linear(4, 2), slope
        self.hidden: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "hooked"):
            self.layer.register_forward_hook(self.record)
            self.hooked = True
        self.hidden = []
        out: Tensor = self.out(self.layer(x).relu())
        return out

    def record(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.hidden.append(self.slope * output)


def penalty(model: Any, x: Tensor) -> Tensor:
    """The loss has a part of what a hook recorded."""
    loss: Tensor = model(x).mean() + sum((h.square().mean() for h in model.hidden), torch.zeros(()))
    return loss


def tiny_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    model: nn.Module = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes))
    return model


def of_hidden_states(model: Any, tokens: Tensor) -> Tensor:
    out = model(tokens, output_hidden_states=True, use_cache=False)
    loss: Tensor = out.logits.mean() + sum((h.square().mean() for h in out.hidden_states or ()), torch.zeros(()))
    return loss


Case = tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Tensor], Tensor]
HOOKED: dict[str, Case] = {
    "bound method": (HookedLater, penalty, X),
    "transformers": (tiny_llama, of_hidden_states, torch.arange(10).view(2, 5)),
}


@pytest.mark.parametrize("one_by_one", [False, True], ids=["fused", "one-by-one"])
@pytest.mark.parametrize("name", HOOKED)
def test_hooks_that_forward_installs_go_with_each_member(name: str, one_by_one: bool) -> None:
    build, objective, batch = HOOKED[name]
    torch.manual_seed(0)
    models = [build() for _ in range(3)]
    fused = fuse(models, one_by_one=one_by_one)

    def step(members: list[nn.Module]) -> None:
        alone = [objective(copy.deepcopy(model), batch) for model in members]
        torch.testing.assert_close(fused.map(objective, batch), torch.stack(alone))

    dry_run(fused, objective, batch)
    step(models)
    for k, model in enumerate(models):
        torch.testing.assert_close(objective(fused.unfuse(k), batch), objective(copy.deepcopy(model), batch))
    fused.keep([2, 1])
    step([models[2], models[1]])
    fused.concat(fuse(models[:1]))
    step([models[2], models[1], models[0]])
    other = fuse(models[:1])
    other.concat(fused)
    fused = other
    step([models[0], models[2], models[1], models[0]])
    torch.testing.assert_close(objective(fused.unfuse(2), batch), objective(copy.deepcopy(models[1]), batch))


def test_a_hook_of_the_users_is_every_members_until_it_is_removed() -> None:
    models = [nn.Sequential(nn.Linear(3, 2)) for _ in range(2)]
    fused = fuse(models)
    handle = fused.template[0].register_forward_hook(lambda module, args, output: 2 * output)  # type: ignore[index]
    torch.testing.assert_close(fused.unfuse(1)(X), 2 * models[1](X))
    handle.remove()
    torch.testing.assert_close(fused.unfuse(1)(X), models[1](X))
    dry_run(fused, lambda model, x: model(x).sum(), X)
    fused.keep([1])
    torch.testing.assert_close(fused(X)[0], models[1](X))


def test_floats_of_their_own_stay_where_a_dict_beside_them_changes() -> None:
    class Counted(nn.Linear):
        def __init__(self, slope: float) -> None:
            super().__init__(3, 2)
            self.notes: dict[str, Any] = {"slope": slope, "calls": 0}

        def forward(self, x: Tensor) -> Tensor:
            self.notes["calls"] += 1
            out: Tensor = super().forward(x) * self.notes["slope"] + self.notes["calls"]
            return out

    models = [Counted(1.0), Counted(2.0)]
    fused = fuse(models)
    for _ in range(2):
        torch.testing.assert_close(fused(X), torch.stack([model(X) for model in models]))
    again: Any = fused.unfuse(1)
    assert again.notes == {"slope": 2.0, "calls": 2}
    fused.keep([1])
    torch.testing.assert_close(fused(X)[0], models[1](X))


def test_the_number_of_a_handle_is_no_structure() -> None:
    """Torch numbers hooks through the whole process; `enable_input_require_grads` of transformers keeps a handle."""

    def hooked(*, removed: bool = False, first: bool = True) -> Any:
        module: Any = nn.Linear(3, 2)
        hooks = [module.register_forward_hook(lambda module, args, output: 2 * output) for _ in range(2)]
        module.handle = hooks[0] if first else hooks[1]
        if removed:
            module.handle.remove()
        return module

    assert fusion_key(hooked()) == fusion_key(hooked())
    torch.testing.assert_close(fuse([hooked(), hooked()])(X).shape, torch.Size([2, 5, 2]))
    assert fusion_key(hooked()) != fusion_key(hooked(removed=True))
    assert fusion_key(hooked()) != fusion_key(hooked(first=False))


def test_a_list_that_a_hook_fills_from_outside_of_a_copy_is_equal_to_nothing() -> None:
    """The copy's attribute is another list than the one that the function goes on filling."""

    def recorded() -> Any:
        module: Any = nn.Linear(3, 2)
        found: list[Tensor] = []
        module.register_forward_hook(lambda module, args, output: found.append(output))
        module.found = found
        return module

    with pytest.raises(ValueError, match="which a copy does not follow"):
        fuse([recorded(), recorded()])


@pytest.mark.parametrize("value", [[], [1], {}, {"a": 1}, (), (1,), "text", 0.5, None, True])
@pytest.mark.parametrize("then", [[], [1], {}, {"a": 1}, (), (1,), "text", 0.5, None, False])
def test_plain_values_that_differ_have_changed(then: Any, value: Any) -> None:
    module: Any = nn.Linear(3, 2)
    module.kept, module.removed = copy.copy(then), 1
    before = snapshot(module)
    assert changed(module, before) == {}
    module.kept = copy.copy(value)
    assert changed(module, before) == ({} if value == then else {(0, "", "kept"): value})
    del module.removed
    module.kept, module.added = copy.copy(then), 2
    after = changed(module, before)
    assert list(after) == [(0, "", "added"), (0, "", "removed")]
    put_back(module, before)
    assert (module.kept, module.removed, hasattr(module, "added")) == (then, 1, False)


def test_another_tensor_of_the_same_values_is_a_change_and_no_difference_between_members() -> None:
    """Others may hold on to the tensor that was there; what all members keep alike is kept once."""
    module: Any = nn.Linear(3, 2)
    module.kept = torch.ones(2)
    before = snapshot(module)
    assert changed(module, before) == {}
    module.kept = torch.ones(2)
    after = changed(module, before)
    assert list(after) == [(0, "", "kept")]
    own = OwnValues(2)
    own.take(module, before, [after, {(0, "", "kept"): torch.ones(2)}])
    assert own.of_members == {}


def test_values_of_members_that_are_kept_twice_or_joined_are_their_own() -> None:
    place, value = (0, "", "kept"), torch.ones(2)
    own = OwnValues(2, {place: [value, torch.zeros(2)]})
    joined = OwnValues(1, {place: [torch.zeros(2)]}).concat(nn.Linear(3, 2), own, nn.Linear(3, 2))
    twice = own.keep([0, 0])
    value += 1
    assert joined.of_members[place][1].tolist() == [1, 1]
    assert [kept.tolist() for kept in twice.of_members[place]] == [[2, 2], [1, 1]]


@pytest.mark.parametrize("first", [True, False])
def test_members_whose_values_differ_are_joined_with_one_that_is_like_their_first(first: bool) -> None:
    place, module = (0, "", "kept"), nn.Linear(3, 2)
    alike: Any = nn.Linear(3, 2)
    alike.kept = torch.zeros(2)
    own, other = OwnValues(2, {place: [torch.zeros(2), torch.ones(2)]}), OwnValues(1)
    joined = own.concat(module, other, alike) if first else other.concat(alike, own, module)
    expected = [[0, 0], [1, 1], [0, 0]] if first else [[0, 0], [0, 0], [1, 1]]
    assert [kept.tolist() for kept in joined.of_members[place]] == expected


def test_loose_tensors_of_a_recurrent_layer_are_those_that_torch_does_not_keep_there() -> None:
    layer = nn.LSTM(2, 2)
    layer.held = [layer.bias_hh_l0]
    assert [path for path, _ in loose_tensors(layer)] == ["held[0]"]


def test_nan_is_the_same_as_another_nan_alone() -> None:
    nan = float("nan")
    assert _same(nan, float("nan"))
    assert _same([1.0, nan], [1.0, float("nan")])
    assert not _same(nan, 1.0)
    assert not _same(1.0, nan)
