"""The fusion key: equal where fusing is exact, different where it is not."""

import copy
import functools
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

from fusion import dry_run, fuse, fusion_key


class Block(nn.Module):
    def __init__(self, act: Any = F.relu, **attributes: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.act = act
        for name, value in attributes.items():
            setattr(self, name, value)


def power(n: int) -> Callable[[Tensor], Tensor]:
    def apply(x: Tensor) -> Tensor:
        return x**n

    return apply


def local(slope: float, **config: Any) -> nn.Module:
    """Each call makes a class of its own, whose methods see the call's arguments."""

    class Local(nn.Linear):
        @property
        def limit(self) -> float:
            return float(config.get("limit", 1.0))

        def forward(self, x: Tensor) -> Tensor:
            return F.leaky_relu(super().forward(x), slope).clamp(max=self.limit)

    return Local(3, 3)


class Scale:
    def __init__(self, factor: float, axis: int = 0) -> None:
        self.factor, self.axis = factor, axis

    def __call__(self, module: nn.Module, args: Any) -> None:
        return None


def hooked(hook: Any) -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_forward_pre_hook(hook)
    return module


def tied(tie: bool) -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    if tie:
        module[1].weight = module[0].weight
    return module


def in_order(*places: int) -> nn.Module:
    layers = nn.Linear(3, 3), nn.Linear(3, 3)
    return nn.Sequential(*(layers[place] for place in places))


class Raw:
    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value


class Cooked(Raw):
    """A property hides the slot of its base, and raises."""

    __slots__ = ()

    def __init__(self, value: int) -> None:
        Raw.__dict__["value"].__set__(self, value)

    @property
    def value(self) -> int:  # type: ignore[override]
        raise AttributeError


class Levels(nn.Dropout):
    """An int that is no probability."""

    def __init__(self, levels: int) -> None:
        super().__init__()
        self.levels = levels


def two_locals(last: int) -> nn.Module:
    """Two classes of one name, and a third layer of the one or the other."""
    layers = [local(0.1), local(0.2)]
    return nn.Sequential(*layers, type(layers[last])(3, 3))


def with_kwargs(first: bool) -> nn.Module:
    module = nn.Linear(2, 2)
    for takes in (first, not first):
        module.register_forward_hook(lambda *given: None, with_kwargs=takes)
    return module


def asked(path: Path) -> Path:
    """A path that has kept its hash and its text."""
    return {path: path, Path(str(path)): path}[path]


def marked(levels: int) -> nn.Module:
    module = nn.Linear(2, 2)
    vars(module.weight)["levels"] = levels
    return module


EQUAL: list[tuple[nn.Module, nn.Module]] = [
    (nn.Linear(2, 3), nn.Linear(2, 3)),
    (nn.Dropout(0.1), nn.Dropout(0)),
    (nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss(label_smoothing=0.2)),
    (Block(F.gelu), Block(F.gelu)),
    (Block(lambda x: x + 1), Block(lambda x: x + 1)),
    (Block(power(2)), Block(power(2))),
    (Block(functools.partial(F.gelu, approximate="tanh")), Block(functools.partial(F.gelu, approximate="tanh"))),
    (Block(scale=1.0), Block(scale=2.0)),
    (Block(scales={"a": [1.0]}), Block(scales={"a": [3.0]})),
    (local(0.1), local(0.1)),
    (local(0.1, limit=0.2), local(0.1, limit=0.4)),
    (hooked(Scale(1.0)), hooked(Scale(2.0))),
    (Block(mask=torch.eye(3)), Block(mask=torch.eye(3))),
    (Block(table=np.eye(3)), Block(table=np.eye(3))),
    (Block(config={"lr": 1.0, "act": "relu"}), Block(config={"lr": 2.0, "act": "relu"})),
    (Block(file=Path("a")), Block(file=asked(Path("a")))),
    (Block(held=Cooked(2)), Block(held=Cooked(2))),
    (Block(log=logging.getLogger("a")), Block(log=logging.getLogger("a"))),
    (nn.LSTM(2, 3), nn.LSTM(2, 3)),
    (tied(True), tied(True)),
    (in_order(0, 1, 0), in_order(0, 1, 0)),
]

DIFFERENT: list[tuple[nn.Module, nn.Module, str]] = [
    (nn.Linear(2, 3), nn.Linear(2, 4), r"out_features: \('int', 4\) against \('int', 3\)"),
    (nn.Linear(2, 3), nn.Linear(2, 3, bias=False), r"bias: \('parameter', None\)"),
    (nn.Linear(2, 3), nn.Linear(2, 3).double(), "torch.float64"),
    (nn.Linear(2, 3), nn.Linear(2, 3).requires_grad_(False), "weight: "),
    (nn.ReLU(), nn.GELU(), "type: torch.nn.modules.activation.GELU against torch.nn.modules.activation.ReLU"),
    (nn.GELU(), nn.GELU("tanh"), "approximate"),
    (nn.Conv2d(1, 1, 3), nn.Conv2d(1, 1, 3, padding=1), "padding"),
    (nn.BatchNorm2d(3), nn.BatchNorm2d(3, momentum=None), "momentum"),
    (Block(F.relu), Block(F.gelu), "act"),
    (Block(lambda x: x + 1), Block(lambda x: x - 1), "act"),
    (Block(lambda x: x + 1), Block(lambda x: x + 2), "act"),
    (Block(power(2)), Block(power(3)), "act"),
    (Block(lambda x: sum(i * x for i in (1, 2))), Block(lambda x: sum(i + x for i in (1, 2))), "act"),
    (Block(functools.partial(F.gelu, approximate="tanh")), Block(functools.partial(F.gelu)), "act"),
    (Block(scale=1.0), Block(scale=1), "scale"),
    (Block(window=(0.1, 0.2)), Block(window=(0.1, 0.3)), r"window\[1\]"),
    (hooked(Scale(1.0)), hooked(Scale(1.0, axis=1)), r"_forward_pre_hooks\[0\].axis"),
    (hooked(Scale(1.0)), nn.Linear(2, 2), r"_forward_pre_hooks\[0\]"),
    (Block(mask=torch.eye(3)), Block(mask=torch.ones(3, 3)), "mask"),
    (Block(table=np.eye(3)), Block(table=np.ones((3, 3))), "table"),
    (Block(config={"act": "relu"}), Block(config={"act": "gelu"}), r"config\['act'\]"),
    (local(0.1), local(0.2), r"type.forward.captured\[\d+\]: \('float', '0.2'\)"),
    (local(0.1, limit=1), local(0.1, limit=2), r"type.limit.captured.*\['limit'\]"),
    (tied(True), tied(False), "1.weight"),
    (in_order(0, 1, 0), in_order(0, 1, 1), "modules"),
    (nn.Linear(2, 3), nn.Linear(2, 3).double(), "weight: dtype torch.float64 against torch.float32; bias: dtype"),
    (nn.Linear(2, 3), nn.Linear(2, 4), r"weight: shape \(4, 2\) against \(3, 2\); bias: shape"),
    (nn.PReLU(), nn.PReLU().requires_grad_(False), "weight: requires_grad False against True"),
    (Block(type=1), Block(type=2), "type"),
    (Block(modules_=[], my_hooks={"a": F.relu}), Block(modules_=[], my_hooks={"b": F.relu}), "my_hooks"),
    (Levels(2), Levels(3), "levels"),
    (Block(kind=nn.ReLU), Block(kind=nn.GELU), r"kind: torch\.nn\.modules\.activation\.GELU against"),
    (Block(config={"optimizer": "sgd"}), Block(config={"optimizer": "adam"}), r"config\['optimizer'\]"),
    (Block(config={"a": 1, "b": 2}), Block(config={"b": 2, "a": 1}), r"config.key\[0\]"),
    (two_locals(0), two_locals(1), "2.type"),
    (with_kwargs(True), with_kwargs(False), "_forward_hooks_with_kwargs"),
    (marked(2), marked(3), "weight.levels"),
    (Block(file=Path("a")), Block(file=Path("b")), "file"),
    (Block(held=Cooked(2)), Block(held=Cooked(3)), r"held\.value"),
    (Block(log=logging.getLogger("a")), Block(log=logging.getLogger("b")), "log: .*'b'.* against .*'a'"),
]


@pytest.mark.parametrize(("module", "other"), EQUAL)
def test_equal(module: nn.Module, other: nn.Module) -> None:
    assert fusion_key(module) == fusion_key(other)
    assert hash(fusion_key(module)) == hash(fusion_key(other))
    assert fuse([module, other]).K == 2


@pytest.mark.parametrize(("module", "other", "match"), DIFFERENT)
def test_different_and_the_error_says_where(module: nn.Module, other: nn.Module, match: str) -> None:
    assert fusion_key(module) != fusion_key(other)
    with pytest.raises(ValueError, match=match) as raised:
        fuse([other, other, module])
    assert str(raised.value).startswith("modules[2] cannot be fused with modules[0]")


def pruned() -> nn.Module:
    layer = nn.Linear(4, 4)
    prune.l1_unstructured(layer, "weight", 0.5)
    return layer


WRAPPED: dict[str, Callable[[], Any]] = {
    "has torch.nn.utils.weight_norm, .* use torch.nn.utils.parametrizations.weight_norm": lambda: nn.utils.weight_norm(
        nn.Linear(4, 4)
    ),
    "has torch.nn.utils.spectral_norm, .* torch.nn.utils.parametrizations": lambda: nn.utils.spectral_norm(
        nn.Linear(4, 4)
    ),
    "is pruned .torch.nn.utils.prune., so .* torch.nn.utils.prune.remove": pruned,
    "is a program of torch.jit, .* pass the module from before": lambda: torch.jit.script(nn.Linear(4, 4)),
    "comes from torch.compile, .* pass the module from before": lambda: torch.compile(nn.Linear(4, 4), backend="eager"),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("rule", WRAPPED)
def test_wrappers_of_torch_are_named_without_hashes(rule: str) -> None:
    build = WRAPPED[rule]
    with pytest.raises(
        ValueError, match=rf"^(modules\[1\] cannot be fused with modules\[0\]: )?module 0 {rule}"
    ) as raised:
        fuse([nn.Sequential(build(), nn.Linear(4, 3)) for _ in range(2)])
    assert not re.search("[0-9a-f]{32}", str(raised.value))


def capturing(what: str) -> nn.Module:
    """A function, which `copy.deepcopy` leaves as it is, that goes on using the original."""
    torch.manual_seed(0)
    module = nn.Linear(3, 3)
    weight = module.weight
    act: Any = {"module": lambda x: x * module.weight, "tensor": lambda x: x * weight, "view": weight.detach()[0]}[what]
    return nn.Sequential(module, Block(act))


@pytest.mark.parametrize("what", ["module", "tensor", "view"])
def test_what_a_copy_does_not_follow_is_equal_to_nothing(what: str) -> None:
    with pytest.raises(ValueError, match="which a copy does not follow"):
        fuse([capturing(what), capturing(what)])


def test_the_mode_does_not_count() -> None:
    assert fusion_key(nn.Dropout().eval()) == fusion_key(nn.Dropout())


def test_the_key_survives_fusing_and_running() -> None:
    models = [nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.1)) for _ in range(2)]
    fused = fuse(models)
    fused(torch.randn(4, 1, 5, 5))
    assert fused.key == fusion_key(models[0]) == fusion_key(fused.unfuse(1))


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.orthogonal, nn.utils.parametrizations.weight_norm])
def test_copies_of_layers_with_a_parametrization_fuse(norm: Callable[[nn.Module], nn.Module]) -> None:
    """As the layers of an `nn.TransformerEncoder`: torch makes them as copies, which also hold the first one."""

    def build(width: int) -> nn.Module:
        layer = norm(nn.Linear(4, 4))
        return nn.Sequential(copy.deepcopy(layer), nn.Tanh(), copy.deepcopy(layer), nn.Linear(4, width))

    torch.manual_seed(0)
    models, x = [build(2) for _ in range(3)], torch.randn(5, 4)
    assert fusion_key(models[0]) == fusion_key(models[1]) != fusion_key(build(3))
    fused = fuse(models)
    assert dry_run(fused, lambda model, x: model(x).square().mean(), x) is None
    torch.testing.assert_close(fused(x), torch.stack([model(x) for model in models]))
