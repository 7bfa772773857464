"""Every member of a fused optimizer moves as under `torch.optim` alone."""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusion import FusedModel, FusedOptimizer, dry_run, fuse, fused_optimizer
from fusion.optim import FusedAdam, FusedAdamW, FusedSGD, native, optimizer
from tests.fusion.training import Both, assert_same_states


@pytest.fixture(autouse=True, params=["vectorized", "kernel on rows", "kernel in place"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs the vectorized rules and torch's own kernels: sizes of the model and of its parameters choose."""
    monkeypatch.setattr(native, "LEAST_PER_CALL", 0 if request.param == "kernel on rows" else 10**12)
    monkeypatch.setattr(native, "LEAST_PER_PARAMETER", 0 if request.param == "kernel in place" else 10**12)


X, Y = torch.randn(16, 4, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 3


def noisy(params: Any, lr: float, alpha: float = 0.99) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(params, lr=lr, alpha=alpha, centered=True, weight_decay=0.1)


class Counting(torch.optim.SGD):
    """Keeps in its groups, as Prodigy does, what later steps are taken by."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["taken"] = group.get("taken", 0) + 1
            group["momentum"] = 1 - 1 / group["taken"]
        return super().step(closure)


MIXED: list[dict[str, Any]] = [
    {"optimizer": "adam", "lr": 0.02, "beta1": 0.8, "weight_decay": 0.1},
    {"optimizer": "adam", "lr": 0.01, "beta2": 0.9, "eps": 1e-3, "lr.first": 0.03, "lr.first.bias": 0.002},
    {"optimizer": "sgd", "lr": 0.3, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    {"optimizer": "sgd", "lr": 0.2, "lr.second": 0.05},
    {"optimizer": "sgd", "lr": 0.1, "momentum": 0.5, "dampening": 0.3},
    {"lr": 0.03, "weight_decay": 0.2},
    {"optimizer": "sgd", "lr": 0.1, "weight_decay": 0.3, "dampening": 0.5},
    {"optimizer": "adamw", "lr": 0.03, "weight_decay": 0.02, "independent_weight_decay": True},
    {"optimizer": "adadelta", "lr": 0.5, "rho": 0.8, "eps": 1e-4},
    {"optimizer": "adagrad", "lr": 0.05, "weight_decay": 0.1, "lr.first": 0.01},
    {"optimizer": "adamax", "lr": 0.02, "beta1": 0.8},
    {"optimizer": "asgd", "lr": 0.2, "weight_decay": 0.01},
    {"optimizer": "nadam", "lr": 0.01, "beta2": 0.99},
    {"optimizer": "radam", "lr": 0.02, "eps": 1e-4},
    {"optimizer": "rmsprop", "lr": 0.01, "momentum": 0.5, "alpha": 0.9, "eps": 1e-4},
    {"optimizer": "muon", "lr": 0.02, "weight_decay": 0.2, "lr.adamw": 0.01, "lr.second": 0.03},
    {"optimizer": "muon", "lr": 0.05, "adjust_lr_fn": "original", "momentum": 0.8, "beta2": 0.9},
    {"optimizer": "muon", "lr": 0.02, "nesterov": False, "weight_decay": 0.0},
    {"optimizer": "lion", "lr": 0.01, "beta2": 0.9, "weight_decay": 0.3, "lr.second": 0.02},
    {"optimizer": "adafactor", "lr": 0.05, "weight_decay": 0.1, "lr.first": 0.02},
    {"optimizer": "prodigy", "lr": 1.0, "d0": 0.03, "weight_decay": 0.1},
    {"optimizer": "prodigy", "lr": 0.5, "d0": 0.04, "lr.first": 0.2, "beta1": 0.0, "safeguard_warmup": True},
    {"optimizer": "schedule_free_adamw", "lr": 0.02, "weight_decay": 0.1, "lr.second": 0.05},
    {"optimizer": "schedule_free_sgd", "lr": 0.3, "momentum": 0.8, "weight_decay": 0.1, "lr.first": 0.1},
    {"optimizer": noisy, "lr": 0.01, "alpha": 0.9},
    {"optimizer": Counting, "lr": 0.02},
]


class Net(nn.Module):
    """Two layers and one that forward uses only on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.late = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, late: bool = False) -> Tensor:
        out = self.second(torch.tanh(self.first(x))) * self.scale
        logits: Tensor = self.late(out) if late else out
        return logits


def loss(model: Net, batch: tuple[Tensor, Tensor, bool]) -> Tensor:
    logits: Tensor = model(batch[0], batch[2])
    return nn.functional.cross_entropy(logits, batch[1])


def nets(K: int) -> list[Net]:
    torch.manual_seed(0)
    return [Net() for _ in range(K)]


def train(fused: FusedModel, opt: FusedOptimizer, steps: Sequence[int]) -> None:
    for step in steps:
        opt.zero_grad()
        opt.set_lr_factor([1 / (1 + step + k) for k in range(fused.K)])
        fused.map(loss, (X, Y, step % 3 == 1)).sum().backward()
        opt.step()


def train_one(k: int, model: Net, opt: torch.optim.Optimizer, steps: Sequence[int]) -> None:
    rates = [group["lr"] for group in opt.param_groups]
    for step in steps:
        opt.zero_grad()
        for group, rate in zip(opt.param_groups, rates, strict=True):
            group["lr"] = rate / (1 + step + k)
        loss(model, (X, Y, step % 3 == 1)).backward()
        opt.step()


close = partial(torch.testing.assert_close, rtol=2e-5, atol=1e-6)
assert_members_equal = partial(assert_same_states, close=close)


def test_members_with_different_optimizers_match_torch() -> None:
    models = nets(len(MIXED))
    fused = fuse(models)
    train(fused, fused_optimizer(fused, MIXED), range(7))
    for k, (model, config) in enumerate(zip(models, MIXED, strict=True)):
        train_one(k, model, optimizer(model, config), range(7))
    assert_members_equal(fused, models)


class Complex(nn.Module):
    """Complex parameters beside a real one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))
        self.second = nn.Parameter(torch.randn(3, 3))
        self.third = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return ((x.to(torch.complex64) @ self.first).abs() @ self.second) * self.third.abs()


class Paired(nn.Module):
    """Pairs that are viewed as complex numbers, which must not begin at an odd place, after three other elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(3))
        self.second = nn.Parameter(torch.randn(4, 3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ torch.view_as_complex(self.second)).abs() + self.first


class Sparse(nn.Module):
    """The gradient of its table is sparse; torch's SGD takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.second = nn.Embedding(7, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.second(self.table(x.abs().sum(1).long() % 7))
        return logits


DENSE = [
    {name: value for name, value in config.items() if "." not in name}
    for config in MIXED
    if config.get("optimizer") not in ("adafactor", "muon")  # which take no complex parameters, and real matrices alone
]
PLAIN = [{"optimizer": "sgd", "lr": 0.3, "momentum": 0.9}, {"optimizer": "sgd", "lr": 0.1}]


@pytest.mark.filterwarnings("ignore::fusion.FusionWarning")
@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize(("make", "configs"), [(Complex, DENSE), (Paired, DENSE), (Sparse, PLAIN), (Sparse, PLAIN[:1])])
def test_parameters_and_gradients_of_other_kinds_match_torch(make: Any, configs: list[Any], clipped: bool) -> None:
    def objective(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    torch.manual_seed(0)
    models: list[nn.Module] = [make() for _ in configs]
    fused = fuse(models)
    dry_run(fused, objective, (X, Y))
    both = Both(fused, models, configs, objective)
    for _ in range(4):
        both.step((X, Y), 0.1 if clipped else None, close=close)
    assert_members_equal(fused, models)


@pytest.mark.parametrize(
    ("make", "oracle"),
    [
        (
            lambda f: FusedSGD(f, lr=[0.1, 0.2, 0.4], momentum=[0.0, 0.5, 0.9], weight_decay=0.01),
            lambda m, k: torch.optim.SGD(m, [0.1, 0.2, 0.4][k], [0.0, 0.5, 0.9][k], weight_decay=0.01),
        ),
        (
            lambda f: FusedSGD(f, lr=0.1, momentum=[0.3, 0.5, 0.9], nesterov=[True, False, True]),
            lambda m, k: torch.optim.SGD(m, 0.1, [0.3, 0.5, 0.9][k], nesterov=k != 1),
        ),
        (
            lambda f: FusedAdam(f, lr=torch.tensor([0.01, 0.02, 0.04]), betas=([0.5, 0.8, 0.9], 0.99), eps=1e-4),
            lambda m, k: torch.optim.Adam(m, [0.01, 0.02, 0.04][k], ([0.5, 0.8, 0.9][k], 0.99), 1e-4),
        ),
        (
            lambda f: FusedAdamW(f, lr=0.02, weight_decay=[0.0, 0.1, 1.0]),
            lambda m, k: torch.optim.AdamW(m, 0.02, weight_decay=[0.0, 0.1, 1.0][k]),
        ),
        (lambda f: FusedAdamW(f, lr=0.02), lambda m, k: torch.optim.AdamW(m, 0.02)),
    ],
)
def test_vectors_match_torch(make: Any, oracle: Any) -> None:
    models = nets(3)
    fused = fuse(models)
    train(fused, make(fused), range(5))
    for k, model in enumerate(models):
        train_one(k, model, oracle(model.parameters(), k), range(5))
    assert_members_equal(fused, models)


def test_multipliers_match_parameter_groups() -> None:
    rates: Mapping[str, Mapping[str, float]] = {
        "sgd": {"first.weight": 0.5, "scale": 3.0},
        "adam": {"second.bias": 0.0},
    }
    rates = {**rates, "nadam": {"first.weight": 2.0}, "rmsprop": {"scale": 0.5}}
    decays: Mapping[str, Mapping[str, float]] = {"adam": {"first.weight": 4.0}, "adamw": {"first.weight": 0.5}}
    decays = {**decays, "asgd": {"first.weight": 2.0}, "rmsprop": {"first.weight": 3.0}}
    models = nets(len(MIXED))
    fused = fuse(models)
    train(fused, fused_optimizer(fused, MIXED, lr_multipliers=rates, weight_decay_multipliers=decays), range(4))
    for k, (model, config) in enumerate(zip(models, MIXED, strict=True)):
        alone = optimizer(model, config, lr_multipliers=rates, weight_decay_multipliers=decays)
        train_one(k, model, alone, range(4))
    assert_members_equal(fused, models)


def test_independent_weight_decay_is_free_of_the_learning_rate() -> None:
    """Without a gradient signal, two steps with factors 1 and 1/2 leave (1 - w) (1 - w / 2) of the weights."""
    fused = fuse([nn.Linear(2, 2, bias=False) for _ in range(2)])
    before = fused.stacked["weight"].detach().clone()
    opt = FusedAdamW(fused, lr=[1e-3, 1e-1], weight_decay=[0.1, 0.2], independent_weight_decay=True)
    for factor in (1.0, 0.5):
        opt.set_lr_factor(factor)
        fused.stacked["weight"].grad = torch.zeros_like(before)
        opt.step()
    left = torch.tensor([0.9 * 0.95, 0.8 * 0.9]).view(2, 1, 1)
    torch.testing.assert_close(fused.stacked["weight"].detach(), before * left)


def test_independent_weight_decay_leaves_a_parameter_whose_learning_rate_is_multiplied_by_0() -> None:
    configs = [{"lr": lr, "weight_decay": 0.1, "independent_weight_decay": True} for lr in (0.01, 0.1)]
    rates = {"adamw": {"second.bias": 0.0}}
    models = nets(2)
    fused = fuse(models)
    fused.updated_in_turn = False
    train(fused, fused_optimizer(fused, configs, lr_multipliers=rates), range(2))
    for k, (model, config) in enumerate(zip(models, configs, strict=True)):
        train_one(k, model, optimizer(model, config, lr_multipliers=rates), range(2))
    assert_members_equal(fused, models)


def test_keep_and_concat_carry_the_state() -> None:
    models = nets(len(MIXED))
    groups = [fuse(models[:3]), fuse(models[3:])]
    opts = [fused_optimizer(groups[0], MIXED[:3]), fused_optimizer(groups[1], MIXED[3:])]
    for k, fused in enumerate(groups):
        for step in range(3):
            opts[k].zero_grad()
            fused.map(loss, (X, Y, step == 1)).sum().backward()
            opts[k].step()
    chosen = [[2, 0], [4, 0, 6, 1, 12, 10, 13]]
    for fused, opt, indices in zip(groups, opts, chosen, strict=True):
        fused.keep(indices)
        opt.keep(indices)
    groups[0].concat(groups[1])
    opts[0].concat(opts[1])
    survivors = [2, 0, 7, 3, 9, 4, 15, 13, 16]
    train(groups[0], opts[0], range(3, 7))
    for position, k in enumerate(survivors):
        alone = optimizer(models[k], MIXED[k])
        for step in range(3):
            alone.zero_grad()
            loss(models[k], (X, Y, step == 1)).backward()
            alone.step()
        train_one(position, models[k], alone, range(3, 7))
    assert_members_equal(groups[0], [models[k] for k in survivors])


def test_an_unfused_optimizer_goes_on_where_the_fused_one_is() -> None:
    """Also where a parameter had no gradient yet, or in fewer steps."""
    rates: Mapping[str, Mapping[str, float]] = {"sgd": {"first.weight": 0.5}, "adamw": {"scale": 3.0}}
    decays: Mapping[str, Mapping[str, float]] = {"adam": {"first.weight": 4.0}, "adamw": {"first.weight": 0.5}}
    models = nets(len(MIXED))
    for before in (0, 1, 4):
        fused = fuse(models)
        opt = fused_optimizer(fused, MIXED, lr_multipliers=rates, weight_decay_multipliers=decays)
        train(fused, opt, range(before))
        parts = [fused.unfuse(k) for k in range(len(MIXED))]
        alone = [opt.unfuse(k, part) for k, part in enumerate(parts)]
        train(fused, opt, range(before, 7))
        for k, (part, its) in enumerate(zip(parts, alone, strict=True)):
            train_one(k, part, its, range(before, 7))  # type: ignore[arg-type]
        assert_members_equal(fused, parts)
    with pytest.raises(IndexError):
        opt.unfuse(len(MIXED), parts[0])


def test_state_dict_resumes_exactly(tmp_path: Any) -> None:
    fused = fuse(nets(len(MIXED)))
    opt = fused_optimizer(fused, MIXED, lr_multipliers={"sgd": {"scale": 2.0}})
    train(fused, opt, range(3))
    torch.save({"model": fused.state_dict(), "optimizer": opt.state_dict()}, tmp_path / "state.pt")
    train(fused, opt, range(3, 5))

    again = fuse(nets(len(MIXED)))
    others: list[dict[str, Any]] = [{"lr": 1.0}] * (len(MIXED) - 2)
    functions: list[dict[str, Any]] = [{"lr": 1.0, "optimizer": make} for make in (noisy, Counting)]
    resumed = fused_optimizer(again, [*others, *functions])
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(again, resumed, range(3, 5))
    for name, parameter in fused.stacked.items():
        assert torch.equal(parameter, again.stacked[name])
    with pytest.raises(ValueError, match=r"`state_dict` is .* by an optimizer whose members have the same functions"):
        fused_optimizer(again, [{"lr": 1.0}] * len(MIXED)).load_state_dict(saved["optimizer"])


def test_state_dict_does_not_follow_later_steps() -> None:
    fused = fuse(nets(2))
    opt = FusedAdam(fused, lr=0.1)
    train(fused, opt, range(1))
    saved = opt.state_dict()
    before = copy.deepcopy(saved)
    train(fused, opt, range(1, 3))
    assert torch.equal(saved["steps"], before["steps"])
    for name, moments in saved["state"].items():
        assert all(torch.equal(moment, before["state"][name][key]) for key, moment in moments.items())


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_half_precision_parameters_are_updated_in_single_precision(name: str) -> None:
    """1 - lr * weight_decay = 0.999 is 1 in bfloat16: the update is worked out in float32 and rounded once."""
    torch.manual_seed(0)
    config = {"optimizer": name, "lr": 0.01, "weight_decay": 0.1}
    fused = fuse([nn.Linear(8, 8, bias=False, dtype=torch.bfloat16) for _ in range(2)])
    exact = fused.unfuse(0).float()
    gradient = torch.randn(8, 8).bfloat16()
    fused.stacked["weight"].grad = gradient.expand(2, 8, 8).clone()
    next(exact.parameters()).grad = gradient.float()
    fused_optimizer(fused, [config] * 2).step()
    optimizer(exact, config).step()
    assert torch.equal(fused.stacked["weight"][0], next(exact.parameters()).bfloat16())


def test_errors_name_argument_value_and_rule() -> None:
    fused = fuse(nets(2))
    with pytest.raises(ValueError, match=r"`configs\[1\]`: `optimizer` is 'lamb', but must be one of sgd, adam, adamw"):
        fused_optimizer(fused, [{"lr": 0.1}, {"lr": 0.1, "optimizer": "lamb"}])
    with pytest.raises(ValueError, match=r"`configs\[0\]`: `lr`, the learning rate, is left out"):
        fused_optimizer(fused, [{}, {"lr": 0.1}])
    with pytest.raises(ValueError, match="`len\\(configs\\)` is 1, but must be 2"):
        fused_optimizer(fused, [{"lr": 0.1}])
    with pytest.raises(ValueError, match="`lr` has shape \\(3,\\)"):
        FusedSGD(fused, lr=[0.1, 0.2, 0.3])
    with pytest.raises(ValueError, match=r"'first.wieght'.* the model has no such parameter"):
        FusedSGD(fused, lr=0.1, lr_multipliers={"first.wieght": 2.0})
    with pytest.raises(ValueError, match="`nesterov` is True, but must be False unless"):
        FusedSGD(fused, lr=0.1, nesterov=True)


def test_step_refuses_a_model_of_another_size() -> None:
    fused = fuse(nets(3))
    opt = FusedSGD(fused, lr=0.1)
    fused.keep([0])
    fused.map(loss, (X, Y, False)).sum().backward()
    with pytest.raises(RuntimeError, match="the optimizer has 3 members, but its model has 1"):
        opt.step()


@pytest.mark.parametrize(
    "config", [{"optimizer": "adam", "lr": 0.1}, {"optimizer": "adagrad", "lr": 0.1, "lr.first": 1.0}]
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_frozen_parameters_are_handed_back_frozen_and_learn_again(config: dict[str, Any], when: str) -> None:
    """Torch's optimizer knows them, as one of all parameters would."""
    fused = fuse(nets(2))
    opt = fused_optimizer(fused, [config] * 2)
    train(fused, opt, [0, 1])
    if when == "before":
        for name in ("first.weight", "first.bias"):
            fused.stacked[name].requires_grad_(False)
    module: Any = fused.unfuse(1)
    module.first.requires_grad_(False)
    alone = opt.unfuse(1, module)
    for p in fused.parameters():
        p.requires_grad_(True)
    module.first.requires_grad_(True)
    train(fused, opt, [2, 3])
    train_one(1, module, alone, [2, 3])
    fused.keep([1])
    assert_members_equal(fused, [module])


class Slower(torch.optim.SGD):
    """Takes smaller steps by and by: a plain attribute counts them. Others hold its parameters and a lock."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.taken, self.own, self.lock = 0, [p for group in self.param_groups for p in group["params"]], Lock()

    def step(self, closure: Any = None) -> Any:
        self.taken += 1
        for p in self.own:
            if p.grad is not None:
                p.data.add_(p.grad, alpha=-self.param_groups[0]["lr"] / self.taken)


def test_an_unfused_optimizer_of_the_users_keeps_its_attributes() -> None:
    fused = fuse(nets(2))
    opt = fused_optimizer(fused, [{"optimizer": lambda params, lr: Slower(params, lr), "lr": 0.1}] * 2)
    train(fused, opt, [0, 1])
    module: Any = fused.unfuse(1)
    alone: Any = opt.unfuse(1, module)
    assert alone.taken == 2
    assert {*map(id, alone.own)} == {*map(id, module.parameters())}
    train(fused, opt, [2, 3])
    train_one(1, module, alone, [2, 3])
    fused.keep([1])
    assert_members_equal(fused, [module])


def test_unfuse_refuses_a_module_with_other_names() -> None:
    fused = fuse(nets(2))
    opt = FusedSGD(fused, lr=0.1)
    with pytest.raises(ValueError, match=r"`module` has no parameter 'scale', .* result of `fused.unfuse\(1\)`"):
        opt.unfuse(1, nn.ModuleDict({"model": fused.unfuse(1)}))


def test_members_that_do_not_take_a_step_stay_bit_for_bit() -> None:
    fused = fuse(nets(len(MIXED)))
    opt, takes_K = fused_optimizer(fused, MIXED), torch.arange(len(MIXED)) % 2 == 0
    for takes in (None, takes_K, ~takes_K):
        before = {name: parameter.detach().clone() for name, parameter in fused.stacked.items()}
        state_before = copy.deepcopy(opt.state_dict()["state"])
        opt.zero_grad()
        fused.map(loss, (X, Y, False)).sum().backward()
        opt.step(takes)
        for k in [] if takes is None else (~takes).nonzero().flatten().tolist():
            assert all(torch.equal(parameter[k], before[name][k]) for name, parameter in fused.stacked.items())
            for name, of in opt.state_dict()["state"].items():
                assert all(torch.equal(tensor[k], state_before[name][kind][k]) for kind, tensor in of.items())


@pytest.mark.parametrize("takes", [[True, False], torch.tensor([True]), torch.tensor([1.0, 0.0]), lambda: 0.0])
def test_step_refuses_what_is_no_boolean_for_each_member(takes: Any) -> None:
    fused = fuse(nets(2))
    opt = FusedSGD(fused, lr=0.1)
    fused.map(loss, (X, Y, False)).sum().backward()
    with pytest.raises(ValueError, match=r"`takes` is .*, but must be a tensor of 2 booleans"):
        opt.step(takes)
    assert not opt.steps_KP.any()


@pytest.mark.parametrize("one_by_one", [False, True])
def test_gradients_of_zero_train_on_as_in_torch(one_by_one: bool) -> None:
    """Momentum moves a parameter that has had a gradient, and has one of zero now."""
    models, config = nets(2), {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9}
    both = Both(fuse(models, one_by_one=one_by_one), models, [config] * 2, loss)
    for late in (True, False, True):
        both.step((X, Y, late), set_to_none=False, close=close)
    assert_members_equal(both.fused, models)
