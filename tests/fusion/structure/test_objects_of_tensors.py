from __future__ import annotations

import weakref
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import attr
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fusion import dry_run, fuse
from fusion.evaluate.microbatch import can_be_split, split
from fusion.structure.module_parts import copied
from fusion.structure.objects_of_tensors import look_into

X, Y = torch.randn(6, 4), torch.randn(6, 3)


@dataclass
class Data:
    x: Tensor
    y: Tensor
    name: str = "train"


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    y: Tensor


@dataclass
class Checked:
    x: Tensor
    y: Tensor
    size: int = field(init=False)

    def __post_init__(self) -> None:
        if len(self.x) != 6:
            raise ValueError("made by hand")
        self.size = 6


@attr.s(auto_attribs=True, frozen=True, slots=True)
class Attrs:
    x: Tensor
    y: Tensor


class Named(NamedTuple):
    x: Tensor
    y: Tensor


class Subclass(namedtuple("Pair", "x y")):
    """Has a method."""


class Plain:
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self._rest = x, {"y": [y]}

    @property
    def y(self) -> Tensor:
        return self._rest["y"][0]


class Attributes(dict[str, Tensor]):
    def __getattr__(self, name: str) -> Tensor:
        return self[name]


class Ordered(OrderedDict[str, Tensor]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__(x=x)
        self.y = y

    @property
    def x(self) -> Tensor:
        return self["x"]


class Users(UserDict[str, Tensor]):
    def __getattr__(self, name: str) -> Tensor:
        if name in ("x", "y"):
            return self.data[name]
        raise AttributeError(name)


@dataclass
class Nested:
    inner: Data

    @property
    def x(self) -> Tensor:
        return self.inner.x

    @property
    def y(self) -> Tensor:
        return self.inner.y


MAKERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    **{kind.__name__: kind for kind in (Data, Frozen, Checked, Attrs, Named, Subclass, Plain, Ordered)},
    "Namespace": lambda x, y: SimpleNamespace(x=x, y=y),
    "Attributes": lambda x, y: Attributes(x=x, y=y),
    "Users": lambda x, y: Users(x=x, y=y),
    "Nested": lambda x, y: Nested(Data(x, y)),
    "in a tuple": lambda x, y: SimpleNamespace(x=x, y=y, more=(Data(x, y),)),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_torch_looks_into_an_object_whose_fields_are_tensors(kind: str) -> None:
    batch = MAKERS[kind](X, Y)
    assert can_be_split(batch)
    first, second = split(batch, 2)
    assert type(first) is type(batch)
    assert torch.equal(torch.cat([first.x, second.x]), X)
    assert torch.equal(second.y, Y[3:])
    double = copied(batch)
    double.x.zero_()
    assert bool(batch.x.any())
    assert tree_map(lambda leaf: leaf.double() if isinstance(leaf, Tensor) else leaf, batch).y.dtype == torch.float64


def test_fields_that_are_no_tensors_are_kept() -> None:
    assert [part.name for part in split(Data(X, Y, "test"), 3)] == ["test"] * 3
    assert split(Checked(X, Y), 2)[1].size == 6, "a copy is not made by `__init__`"


class Graph:
    """Its part refers to it: a copy of the part would refer to another."""

    def __init__(self) -> None:
        self.store = SimpleNamespace(x=X, of=weakref.ref(self))


class Ring:
    def __init__(self) -> None:
        self.next: Any = self


def test_other_objects_stay_whole() -> None:
    for thing in (Graph(), Ring(), nn.Linear(2, 2), torch.distributions.Normal(X, X.exp()), "text", object()):
        (leaf,) = tree_leaves(look_into([thing]))
        assert leaf is thing


@dataclass
class Link:
    x: Tensor | None
    next: Any


@pytest.mark.parametrize("x", [X, None])
def test_a_long_chain_stays_whole_in_an_object_that_is_looked_into(x: Tensor | None) -> None:
    chain: Any = None
    for _ in range(2000):
        chain = Link(x, chain)
    assert [leaf is chain for leaf in tree_leaves(look_into([chain]))] == [True]
    batch = SimpleNamespace(x=X, y=Y, chain=chain)
    first, second = split(batch, 2)
    assert torch.equal(torch.cat([first.x, second.x]), X)
    assert first.chain is second.chain is chain


def test_objects_that_are_parts_of_each_other_stay_whole() -> None:
    @dataclass
    class One:
        x: Tensor
        other: Any = None

    @dataclass
    class Other:
        x: Tensor
        one: One

    one = One(X)
    one.other = Other(X, one)
    assert [leaf is one for leaf in tree_leaves(look_into([one]))] == [True]
    assert split(SimpleNamespace(x=X, y=Y, meta=one), 2)[0].meta is one


def test_shared_parts_are_searched_once() -> None:
    asked = list[int]()

    class Pair:
        __slots__ = ("left", "right")

        def __init__(self, part: Any) -> None:
            self.left = self.right = part

        def __getattribute__(self, name: str) -> Any:
            asked.append(1)
            return super().__getattribute__(name)

    thing: Any = None
    for _ in range(10):
        thing = Pair(thing)
    look_into([thing])
    assert len(asked) < 500


def loss(model: nn.Module, batch: Any) -> Tensor:
    difference: Tensor = model(batch.x) - batch.y
    return difference.square().mean()


class Branches(nn.Module):
    """Cannot be vmapped."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out if out.sum().item() > 0 else -out


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 3), Branches])
def test_members_have_objects_of_their_own(kind: str, make: Callable[[], nn.Module]) -> None:
    modules = [make() for _ in range(3)]
    fused, batch = fuse(modules), MAKERS[kind](X, Y)
    dry_run(fused, loss, batch) if make is not Branches else setattr(fused, "one_by_one", True)
    expected = torch.stack([loss(module, batch) for module in modules])
    torch.testing.assert_close(fused.map(loss, batch), expected)
    if kind != "Checked":  # whose class refuses other sizes
        own = MAKERS[kind](X.expand(3, 6, 4), Y.expand(3, 6, 3))
        torch.testing.assert_close(fused.map(loss, own, own_data=True), expected)
