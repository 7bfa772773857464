"""What cannot be vmapped is found before training, named, and trained one by one with the same result."""

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from fusion import FusionMismatch, FusionWarning, dry_run, fuse, fused_optimizer
from tests.fusion.training import Both, assert_same_gradients

# Seeded, for one test needs a branch that some members take and others do not.
X, Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
BATCH = (X, Y)


class Router(nn.Module):
    """Control flow that depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 0:
            out: Tensor = self.left(x)
        else:
            out = self.right(x)
        return out


class Reader(nn.Module):
    """A number read out of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.abs().max().item()


class Counter(nn.Module):
    """A constant buffer that is none: it is written to."""

    peak: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("peak", torch.zeros(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.peak.mul_(0.5).add_(x.detach().mean(0))
        return x - self.peak


class Twice(torch.autograd.Function):
    """An operator of the user's own that calls a function, which may see any tensor."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return function(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:
        return None, 2 * g


class Custom(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return Twice.apply(lambda x: 2 * x, x)


def net(middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), middle, nn.BatchNorm1d(8), nn.Linear(8, 3))


def routed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), Router())


def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


OBSTACLES = [
    (routed, r"1 \(Router\)", "if x.mean() > 0:"),
    (lambda: net(Reader()), r"2 \(Reader\)", "return x / x.abs().max().item()"),
    (lambda: net(Custom()), r"2 \(Custom\)", "return Twice.apply(lambda x: 2 * x, x)"),
]


@pytest.mark.parametrize(("build", "module", "code"), OBSTACLES, ids=["branch", "item", "custom"])
def test_module_and_line_are_named(build: Any, module: str, code: str) -> None:
    fused = fuse([build() for _ in range(3)])
    with pytest.raises(RuntimeError) as raised:
        fused.map(loss, BATCH)
    assert "call `fusion.dry_run`" in raised.value.__notes__[0]
    with pytest.warns(FusionWarning, match=rf"members train one after another, module {module} at .*:\d+ `") as told:
        obstacle = dry_run(fused, loss, BATCH)
    assert told[0].filename == __file__
    assert obstacle is not None
    assert code in obstacle.code
    assert obstacle.location.rsplit(":", 1)[0].endswith(".py")
    assert fused.one_by_one


def test_hooks_on_a_backward_pass_are_named_and_run_for_each_member() -> None:
    def halved(part: nn.Module, given: Any, out: Any) -> Any:
        return (0.5 * out[0],)

    models = [net(nn.Identity()) for _ in range(2)]
    for model in models:
        model.get_submodule("2").register_full_backward_hook(halved)
    fused = fuse(models)
    with pytest.warns(FusionWarning, match=r"`return F.cross_entropy.*`: it has a hook on a module's backward pass"):
        dry_run(fused, loss, BATCH)
    fused.map(loss, BATCH).sum().backward()
    for model in models:
        loss(model, BATCH).backward()
    assert_same_gradients(fused, models)


@pytest.mark.filterwarnings("ignore::fusion.FusionWarning")
@pytest.mark.parametrize("build", [case[0] for case in OBSTACLES], ids=["branch", "item", "custom"])
@pytest.mark.parametrize("setting", [{}, {"optimizer": "prodigy", "d0": 0.01}], ids=["adamw", "prodigy"])
def test_one_by_one_gives_the_same_result_through_the_same_calls(build: Any, setting: dict[str, Any]) -> None:
    torch.manual_seed(1)
    models = [build().double() for _ in range(4)]
    batch = (X.double(), Y)
    configs: list[dict[str, Any]] = [{"lr": 0.01 * (k + 1), **setting} for k in range(4)]
    fused = fuse(models)
    dry_run(fused, loss, batch)
    both = Both(fused, models, configs, loss)
    for step in range(4):
        if step == 2:
            both.keep([3, 1])
        both.step(batch, clip=0.5)
    both.assert_equal()


@pytest.mark.filterwarnings("ignore::fusion.FusionWarning")
def test_a_branch_not_taken_counts_as_no_gradient_not_as_zero() -> None:
    """Otherwise weight decay and momentum would move what `torch.optim` leaves alone."""
    torch.manual_seed(1)
    fused = fuse([routed() for _ in range(4)])
    dry_run(fused, loss, BATCH)
    opt = fused_optimizer(fused, [{"lr": 0.1, "weight_decay": 0.5}] * 4)
    before = fused.stacked["1.left.weight"].detach().clone()
    fused.map(loss, BATCH).sum().backward()
    idle = fused.unreached()["1.left.weight"]
    opt.step()
    assert 0 < len(idle) < 4
    moved = (fused.stacked["1.left.weight"] != before).flatten(1).any(1)
    assert [k for k in range(4) if not moved[k]] == idle


@pytest.mark.filterwarnings("ignore::fusion.FusionWarning")
def test_a_step_that_is_interrupted_leaves_members_without_a_gradient_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    fused = fuse([routed() for _ in range(4)])
    dry_run(fused, loss, BATCH)
    opt = fused_optimizer(fused, [{"lr": 0.1}] * 4)
    fused.map(loss, BATCH).sum().backward()
    opt.step()
    opt.zero_grad()
    with torch.no_grad():
        for name in ("0.weight", "0.bias"):
            fused.stacked[name].neg_()  # each member takes its other branch
    fused.map(loss, BATCH).sum().backward()
    idle, before = fused.unreached(), copy.deepcopy(opt.state_dict()["state"])

    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(opt), "_step_whole", interrupted)
    with pytest.raises(KeyboardInterrupt):
        opt.step()
    after = opt.state_dict()["state"]
    assert {name.split(".")[1] for name in idle} == {"left", "right"}
    for name, members in idle.items():
        for moment, values in before[name].items():
            assert values[members].any()
            torch.testing.assert_close(after[name][moment][members], values[members], rtol=0, atol=0)


class Counting(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Experts(nn.Module):
    """Each row goes to the expert that its gate chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 2), nn.ModuleList(nn.Linear(4, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        chosen, out = self.gate(x).argmax(1), x.new_zeros(len(x), 3)
        for i, expert in enumerate(self.experts):
            rows = chosen == i
            out[rows] = expert(x[rows])
        return out


class Counts(Router):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.left(x.repeat(1, 2)) * float(self.left.weight.detach().sum())
        return out


@pytest.mark.parametrize(
    ("build", "words"), [(Experts, r"as in routed experts"), (Counts, r"it makes a number of a tensor")]
)
def test_reasons_are_in_the_users_words(build: Callable[[], nn.Module], words: str) -> None:
    with pytest.warns(FusionWarning, match=rf"members train one after another, .*: .*{words}"):
        dry_run(fuse([build(), build()]), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), BATCH)


def test_backward_inside_an_objective_is_refused_with_what_to_do() -> None:
    def objective(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward(retain_graph=True)
        return loss

    with pytest.raises(RuntimeError, match=r"the objective calls `backward\(\)`: return the loss"):
        dry_run(fuse([nn.Linear(4, 3), nn.Linear(4, 3)]), objective, BATCH)


def test_it_counts_no_calls() -> None:
    fused = fuse([Counting(4, 3) for _ in range(2)])
    fused.map(loss, BATCH)
    dry_run(fused, loss, BATCH)
    assert vars(fused.unfuse(1))["calls"] == 1


def test_it_leaves_no_trace() -> None:
    fused = fuse([nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)) for _ in "ab"])
    before = {name: tensor.clone() for name, tensor in fused.state_dict().items()}
    random = torch.get_rng_state()
    assert dry_run(fused, loss, BATCH) is None
    assert not fused.one_by_one
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(tensor, before[name]) for name, tensor in fused.state_dict().items())
    assert all(p.grad is None for p in fused.parameters())


def test_members_draw_on_as_if_there_had_been_no_dry_run() -> None:
    fused = fuse([nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)) for _ in "ab"])
    fused.seed([3, 4])
    twin = copy.deepcopy(fused)
    assert dry_run(fused, loss, BATCH) is None
    assert torch.equal(fused(X), twin(X))


def test_a_constant_that_is_written_to_is_given_to_each_member() -> None:
    models = [net(Counter()) for _ in range(3)]
    fused = fuse(models)
    assert "2.peak" in fused.shared
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dry_run(fused, loss, BATCH) is None
    assert "2.peak" in fused.stacked_buffers
    for _ in range(2):
        loss_K = fused.map(loss, BATCH)
        torch.testing.assert_close(loss_K, torch.stack([loss(model, BATCH) for model in models]))


class Momentum(nn.Module):
    """An encoder that follows another one, as in MoCo and BYOL: forward writes to its parameters."""

    def __init__(self, follow: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self.follow = follow
        self.online, self.target = nn.Linear(4, 3), nn.Linear(4, 3).requires_grad_(False)
        self.target.load_state_dict(self.online.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
                self.follow(slow, fast)
        out: Tensor = self.online(x) - 0.5 * self.target(x)
        return out


class FromZero(Momentum):
    """Its biases begin at zero in both encoders, as those of batch normalization do."""

    def __init__(self, follow: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__(follow)
        for layer in (self.online, self.target):
            nn.init.zeros_(layer.bias)


class Clipped(nn.Linear):
    """Forward writes to a parameter that is trained."""

    def __init__(self, clip: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__(4, 3)
        self.clip = clip

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.clip(self.weight, torch.zeros(3, 4))
        return super().forward(x)


def assigns(slow: Tensor, fast: Tensor) -> None:
    slow.data = slow.data * 0.9 + fast.data * 0.1


def writes(slow: Tensor, fast: Tensor) -> None:
    slow.mul_(0.9).add_(fast, alpha=0.1)


def writes_unseen(slow: Tensor, fast: Tensor) -> None:
    slow.data.lerp_(fast.data, 0.1)


def test_a_state_from_before_the_dry_run_leaves_each_member_its_own_momentum_encoder() -> None:
    models = [FromZero(writes) for _ in range(2)]
    fused = fuse(models)
    before = copy.deepcopy(fused.state_dict())
    assert "target.bias" in fused.shared
    dry_run(fused, loss, BATCH)
    for _ in range(2):
        fused.load_state_dict(before)
        torch.testing.assert_close(fused.map(loss, BATCH), torch.stack([loss(m, BATCH) for m in copy.deepcopy(models)]))


@pytest.mark.filterwarnings("ignore::fusion.FusionWarning")
@pytest.mark.parametrize("alike", [False, True], ids=["apart", "alike"])
@pytest.mark.parametrize(("K", "kind"), [(1, "sgd"), (3, "sgd"), (3, "adam")])
@pytest.mark.parametrize("write", [assigns, writes, writes_unseen])
@pytest.mark.parametrize("build", [Momentum, FromZero, Clipped])
def test_parameters_that_forward_writes_to(build: Any, write: Any, K: int, alike: bool, kind: str) -> None:
    models = []
    for k in range(K):
        torch.manual_seed(0 if alike else k)
        models.append(build(write))
    fused = fuse(models)
    before = {name: tensor.clone() for name, tensor in fused.unfuse(0).state_dict().items()}
    dry_run(fused, loss, BATCH)
    torch.testing.assert_close(dict(fused.unfuse(0).state_dict()), before, rtol=0, atol=0)
    both = Both(fused, models, [{"optimizer": kind, "lr": 0.1 / (1 + k)} for k in range(K)], loss)
    for _ in range(4):
        both.step(BATCH)
    both.assert_equal()


def test_a_write_to_what_members_share_is_refused_where_no_dry_run_has_seen_it() -> None:
    torch.manual_seed(0)
    model = Momentum(writes)
    fused = fuse([model] * 3, one_by_one=True)
    with pytest.raises(RuntimeError, match=r"forward writes to target\.weight, which is frozen"):
        fused.map(loss, BATCH)


class Checkpointed(nn.Linear):
    def __init__(self, reentrant: bool) -> None:
        super().__init__(4, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("K", [1, 2])
@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("first", [nn.Linear(4, 4), nn.Identity()], ids=["inner", "first"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_computes_what_it_does_alone(
    reentrant: bool, first: nn.Module, one_by_one: bool, K: int
) -> None:
    """The reentrant kind gives a layer no gradient where its input needs none, as in a model's first layer."""
    models = [nn.Sequential(copy.deepcopy(first), Checkpointed(reentrant), nn.Linear(3, 3)) for _ in range(K)]
    fused = fuse(models, one_by_one=one_by_one)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
        assert dry_run(fused, loss, BATCH) is None
        loss_K = fused.map(loss, BATCH)
        loss_K.sum().backward()
        for k, model in enumerate(models):
            loss(model, BATCH).backward()
            for name, parameter in model.named_parameters():
                found = fused.stacked[name].grad
                wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                torch.testing.assert_close(torch.zeros_like(parameter) if found is None else found[k], wanted)
    assert torch.utils.checkpoint.CheckpointFunction is CheckpointFunction


class Recomputed(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return CheckpointFunction.apply(super().forward, True, x)


@pytest.mark.parametrize("K", [1, 2])
def test_other_recomputation_is_refused(K: int) -> None:
    fused = fuse([nn.Sequential(nn.Linear(4, 4), Recomputed(4, 3)) for _ in range(K)])
    with pytest.raises(RuntimeError, match=r"recomputes its forward pass .* switch it off"):
        dry_run(fused, loss, BATCH)


class Ties(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.slow = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        self.slow.weight.data = self.own.weight.data
        return self.own(x) + self.slow(x).detach()


def test_parameters_that_come_to_share_memory_are_refused() -> None:
    with pytest.raises(FusionMismatch, match=r"gives `slow\.weight` the memory of `own\.weight` .* `copy_\(\)`"):
        dry_run(fuse([Ties(), Ties()]), loss, BATCH)


class Fills(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        rows = torch.zeros(len(x), 4)[:, :3]
        rows += super().forward(x)
        return rows


def test_a_write_into_a_view_that_members_share_is_told_in_words() -> None:
    with pytest.warns(FusionWarning, match="writes members' values into a tensor that they share"):
        dry_run(fuse([Fills(4, 3), Fills(4, 3)]), loss, BATCH)


class ActNorm(nn.Module):
    """The first batch sets its scale (Kingma and Dhariwal 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.set = nn.Parameter(torch.ones(8)), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.set:
            with torch.no_grad():
                self.scale.copy_(1 / x.std(0))
            self.set = True
        return x * self.scale


class Renormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 8, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.embed(x.argmax(1))
        return out


@pytest.mark.parametrize("layer", [ActNorm, Renormed])
def test_parameters_that_forward_writes_into(layer: type[nn.Module]) -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 8), layer(), nn.Linear(8, 3)) for _ in range(3)]
    both = Both(fuse(models, one_by_one=True), models, [{"lr": 0.1}] * 3, loss)
    assert dry_run(both.fused, loss, BATCH, compare=False) is None
    for _ in range(2):
        both.step(BATCH)
    both.assert_equal()


def test_an_error_of_the_model_itself_is_raised() -> None:
    fused = fuse([nn.Linear(5, 3) for _ in range(2)])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        dry_run(fused, loss, BATCH)
    assert not fused.one_by_one


class OnlyAlone(nn.Linear):
    """Under vmap, which hides what its input is made of, there is no room for it."""

    def forward(self, x: Tensor) -> Tensor:
        if torch._C._functorch.is_functorch_wrapped_tensor(self.weight):
            torch.empty(2**60, dtype=torch.uint8)
        return super().forward(x)


def test_want_of_memory_is_no_obstacle_to_vmap() -> None:
    fused = fuse([OnlyAlone(4, 3) for _ in range(2)])
    with pytest.raises(RuntimeError, match="memory"):
        dry_run(fused, loss, BATCH)
    assert not fused.one_by_one


class Growing(nn.Linear):
    """Keeps the last outputs in a buffer that is empty at first."""

    last: Tensor

    def __init__(self, persistent: bool) -> None:
        super().__init__(4, 3)
        self.register_buffer("last", torch.zeros(0), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.last = torch.cat([self.last, out.detach().mean(0)])[-6:]
        return out + self.last.mean()


@pytest.mark.parametrize("persistent", [False, True])
def test_a_buffer_that_grows_is_empty_again_after_the_dry_run(persistent: bool) -> None:
    models = [Growing(persistent) for _ in range(3)]
    fused = fuse(models)
    assert dry_run(fused, loss, BATCH) is None
    assert fused.unfuse(1).last.shape == (0,)
    for _ in range(3):
        loss_K = fused.map(loss, BATCH)
        torch.testing.assert_close(loss_K, torch.stack([loss(model, BATCH) for model in models]))


class Emptied(nn.Linear):
    last: Tensor | None

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.last = None if self.last is not None else out.detach().mean(0)
        return out if self.last is None else out + self.last


def test_a_buffer_that_becomes_none_is_refused() -> None:
    with pytest.raises(RuntimeError, match="forward sets `last` to None"):
        dry_run(fuse([Emptied() for _ in range(3)]), loss, BATCH)


class MadeLate(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.ones(3))
        return super().forward(x) * self.scale


def test_a_parameter_that_forward_makes_is_refused() -> None:
    with pytest.raises(FusionMismatch, match="forward makes the tensor `scale`"):
        dry_run(fuse([MadeLate(4, 3) for _ in range(3)]), loss, BATCH)


def frozen_for_a_while(model: Any, batch: Any) -> Tensor:
    """As for the generator's turn of a GAN."""
    model[0].requires_grad_(False)
    found = loss(model, batch)
    model[0].requires_grad_(True)
    return found


def frozen_by_attribute(model: Any, batch: Any) -> Tensor:
    for p in model[0].parameters():
        p.requires_grad = False
    return loss(model, batch)


@pytest.mark.parametrize("K", [1, 3])
@pytest.mark.parametrize("objective", [frozen_for_a_while, frozen_by_attribute])
def test_an_objective_that_freezes_is_refused_in_the_users_words(objective: Any, K: int) -> None:
    fused = fuse([nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)) for _ in range(K)])
    with pytest.raises(RuntimeError, match=r"sets `requires_grad` of a parameter to False.*: use `torch.no_grad\(\)`"):
        dry_run(fused, objective, BATCH)
    for fused.one_by_one in (False, True):
        with pytest.raises(RuntimeError, match="requires_grad"):
            fused.map(objective, BATCH)


def test_freezing_what_is_frozen_changes_nothing() -> None:
    models = [nn.Sequential(nn.Linear(4, 8).requires_grad_(False), nn.Linear(8, 3)) for _ in range(3)]
    fused = fuse(models)

    def objective(model: Any, batch: Any) -> Tensor:
        model[0].requires_grad_(False)
        return loss(model, batch)

    assert dry_run(fused, objective, BATCH) is None
    torch.testing.assert_close(fused.map(objective, BATCH), torch.stack([loss(model, BATCH) for model in models]))


class Encoder(nn.Module):
    def __init__(self, counted: bool) -> None:
        super().__init__()
        self.counted = counted
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.encoder, self.norm = nn.TransformerEncoder(layer, 1), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.arange(3) > torch.tensor([[1], [2], [0], [2]])
        found: Tensor = self.encoder(self.norm(x).view(4, 3, 4), src_key_padding_mask=padding)
        return found.mean(1) if self.counted else found[:, 0]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("counted", [True, False])
def test_padding_that_counts_in_evaluation_alone_is_found_before_training(counted: bool) -> None:
    """An encoder alone makes zeros of padded places, where its layers do not train; no member of a group does."""
    models = [Encoder(counted) for _ in range(2)]
    fused = fuse(models)
    norm: Any = fused.template.norm
    norm.eval()

    def objective(model: Any, batch: Tensor) -> Tensor:
        out: Tensor = 1 + 0.1 * model(batch).square().mean()  # the difference is smaller than a step of a metric
        return out

    told = pytest.warns(FusionWarning, match=r"padded places .* `encoder` .* `use_nested_tensor = False`")
    with told if counted else nullcontext():
        dry_run(fused, objective, X)
    assert fused.one_by_one == counted
    assert [part.training for part in (fused, fused.template, norm)] == [True, True, False]
    again = fuse(models).eval()
    with told if counted else nullcontext():
        dry_run(again, objective, X)
    assert not any(part.training for part in (again, again.template))
    for model in models:
        model.eval()
    with torch.no_grad():
        alone = torch.stack([objective(model, X) for model in models])
        torch.testing.assert_close(fused.eval().map(objective, X), alone)


def test_an_objective_that_enables_gradients_in_evaluation_is_no_obstacle() -> None:
    """The residual of a physics-informed network is a derivative, in validation too."""

    def residual(model: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            return (slope**2).mean()

    fused = fuse([nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)) for _ in range(3)])
    assert dry_run(fused, residual, torch.randn(5, 2)) is None


def test_an_objective_that_is_for_training_alone_is_no_obstacle() -> None:
    def objective(model: Any, batch: Any) -> Tensor:
        if not model.training:
            raise RuntimeError("there are no targets")
        return loss(model, batch)

    fused = fuse([nn.Linear(4, 3) for _ in range(2)])
    assert dry_run(fused, objective, BATCH) is None
    assert not fused.one_by_one


class Merging(nn.Linear):
    """As an adapter of loralib's: in evaluation, its product is a part of the weight."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.down, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.zeros(3, 2))
        self.merged = False
        self.weight.requires_grad_(False)

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (self.up @ self.down) * (-1 if mode else 1)
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if self.merged else out + x @ self.down.mT @ self.up.mT


@pytest.mark.parametrize("K", [1, 3])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_mode_that_writes_to_weights_is_refused(K: int, one_by_one: bool) -> None:
    """Modes change in a module without data, so evaluation would leave the adapter out."""
    fused = fuse([Merging() for _ in range(K)], one_by_one=one_by_one)
    with pytest.raises(FusionMismatch, match=r"`train\(\)` or `eval\(\)` writes to `weight`"):
        dry_run(fused, loss, BATCH)


class FrozenStatistics(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> Any:
        return super().train(False)


def test_a_mode_of_a_modules_own_that_writes_to_nothing_is_none_of_this() -> None:
    fused = fuse([nn.Sequential(nn.Linear(4, 3), FrozenStatistics(3).train()) for _ in range(3)])
    fused.stacked_buffers["1.running_mean"][0] = float("nan")  # of a member that has diverged
    assert dry_run(fused, loss, BATCH, compare=False) is None
    assert [part.training for part in fused.unfuse(1).children()] == [True, False]


def test_buffers_to_which_nothing_is_written_stay_shared() -> None:
    models = [nn.Linear(3, 3) for _ in range(2)]
    for model in models:
        model.register_buffer("scale", torch.ones(3), persistent=False)
    fused = fuse(models)
    assert dry_run(fused, lambda model, x: (model(x) * model.scale).sum(), torch.randn(4, 3)) is None
    assert list(fused.common.bufs()) == ["scale"]
