"""Two modules that differ in one attribute, of any kind, fuse to what each computes alone, or are refused."""

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import math
import os
import pathlib
import random
import re
import subprocess
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fusion import fuse, fusion_key

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class User(nn.Module):
    """Computes with whatever it was given: `read` turns the attribute into a number, `hold` is where it lies."""

    def __init__(self, value: Any, read: Callable[[Any], Any], hold: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4).double()
        self.held = HOLDERS[hold][0](value)
        self.hold, self.read = hold, read

    def forward(self, x: Tensor) -> Tensor:
        value = HOLDERS[self.hold][1](self.held)
        out: Tensor = self.layer(x) * self.read(value)
        return out


@dataclasses.dataclass
class Plain:
    value: Any
    other: float = 0.5


@dataclasses.dataclass(slots=True)
class Slotted:
    value: Any
    __hidden: int = 3


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any


class Private:
    __slots__ = ("__value",)

    def __init__(self, value: Any) -> None:
        self.__value = value

    def get(self) -> Any:
        return self.__value


class Count(int):
    unit: Any


class Box(dict):
    unit: Any


class Row(list):
    unit: Any


class Word(str):
    unit: Any


Point = collections.namedtuple("Point", "x value")


def with_unit(base: Any) -> Callable[[Any], Any]:
    def make(value: Any) -> Any:
        base.unit = value
        return base

    return make


def closure(value: Any) -> Callable[[], Any]:
    return lambda: value


def class_of(value: Any) -> Any:
    class Made:
        constant = value

        @property
        def through_property(self) -> Any:
            return value

        @classmethod
        def through_class(cls) -> Any:
            return cls.constant

    return Made()


def function_with(value: Any) -> Any:
    def function() -> Any:
        return function.value  # type: ignore[attr-defined]

    function.value = value  # type: ignore[attr-defined]
    return function


def with_global(value: Any) -> Any:
    space: dict[str, Any] = {"value": value, "__name__": "nowhere"}
    exec("def read():\n    return value", space)
    return space["read"]


def default_of(value: Any) -> Any:
    return lambda given=value: given


def keyword_default_of(value: Any) -> Any:
    return lambda *, given=value: given


class Method:
    def __init__(self, value: Any) -> None:
        self.value = value

    def get(self) -> Any:
        return self.value


def enumeration(value: Any) -> Any:
    Made: Any = enum.Enum("Made", {"ONE": [value]})
    return Made["ONE"]


Holder = tuple[Callable[[Any], Any], Callable[[Any], Any]]
HOLDERS: dict[str, Holder] = {
    "itself": (lambda v: v, lambda h: h),
    "dict": (lambda v: {"optimizer": v}, lambda h: h["optimizer"]),
    "dict-step": (lambda v: {"step_size": v, "lr": 0.1}, lambda h: h["step_size"]),
    "dict-key": (lambda v: {3: 1, (2, "a"): v}, lambda h: h[2, "a"]),
    "list": (lambda v: [0, [v]], lambda h: h[1][0]),
    "tuple": (lambda v: (v, 0), lambda h: h[0]),
    "named": (lambda v: Point(1, v), lambda h: h.value),
    "deque": (lambda v: collections.deque([v], 3), lambda h: h[0]),
    "default": (lambda v: collections.defaultdict(closure(v)), lambda h: h.default_factory()),
    "ordered": (lambda v: collections.OrderedDict(gamma=v), lambda h: h["gamma"]),
    "plain": (Plain, lambda h: h.value),
    "slotted": (Slotted, lambda h: h.value),
    "frozen": (Frozen, lambda h: h.value),
    "private": (Private, lambda h: h.get()),
    "namespace": (lambda v: types.SimpleNamespace(schedule=v), lambda h: h.schedule),
    "count": (lambda v: with_unit(Count(3))(v), lambda h: h.unit),
    "box": (lambda v: with_unit(Box(a=1))(v), lambda h: h.unit),
    "row": (lambda v: with_unit(Row([1]))(v), lambda h: h.unit),
    "word": (lambda v: with_unit(Word("a"))(v), lambda h: h.unit),
    "closure": (closure, lambda h: h()),
    "default-value": (default_of, lambda h: h()),
    "keyword-default": (keyword_default_of, lambda h: h()),
    "partial": (lambda v: functools.partial(dict, a=v), lambda h: h()["a"]),
    "function": (function_with, lambda h: h()),
    "global": (with_global, lambda h: h()),
    "cached": (lambda v: functools.lru_cache(closure(v)), lambda h: h()),
    "class-property": (class_of, lambda h: h.through_property),
    "class-attribute": (class_of, lambda h: h.through_class()),
    "bound": (lambda v: Method(v).get, lambda h: h()),
    "enum": (enumeration, lambda h: h.value[0]),
    "proxy": (lambda v: types.MappingProxyType({"a": v}), lambda h: h["a"]),
    "module": (lambda v: _hand_made(v), lambda h: h.value),
    "weak": (lambda v: weakref.ref(_kept(v)), lambda h: h().value),
    "generator": (lambda v: (v for _ in range(9)), lambda h: next(h)),
    "iterator": (lambda v: iter([v] * 9), lambda h: next(h)),
    "array": (lambda v: np.array([v, None], dtype=object), lambda h: h[0]),
}
# Where a float may be each member's own, and what cannot be looked into.
WRITABLE = {"itself", "dict", "dict-step", "dict-key", "ordered", "list", "plain", "frozen", "slotted", "private"}
WRITABLE |= {"box", "row", "word", "count", "bound", "enum", "weak"}
NEVER = {"module", "generator"}
_ALIVE: list[Any] = []


def _hand_made(value: Any) -> types.ModuleType:
    module = types.ModuleType("torch")
    module.__dict__["value"] = value
    return module


def _kept(value: Any) -> Plain:
    kept = Plain(value)
    _ALIVE.append(kept)
    return kept


class Shade(enum.Enum):
    LIGHT = 1
    DARK = 2


class Bits(enum.Flag):
    A = 1
    B = 2


def number(value: Any) -> Any:
    return value


# (a value, one that differs, how forward makes a number of it)
KINDS: dict[str, tuple[Any, Any, Callable[[Any], Any]]] = {
    "int": (2, 3, number),
    "bool": (True, 2, number),
    "bool-int": (True, 1, lambda v: 2 if v is True else 5),
    "float": (0.5, 1.5, number),
    "float-int": (1.0, 1, lambda v: 7 if isinstance(v, int) else 3),
    "nan": (float("nan"), 1.0, lambda v: 3 if v != v else 4),
    "inf": (float("inf"), 1.0, lambda v: 1 / (1 + v)),
    "zero": (0.0, -0.0, lambda v: 3 if math.copysign(1, v) > 0 else 4),
    "branch": (0.2, 0.8, lambda v: 1 if v > 0.5 else 3),
    "float-loop": (2.0, 4.0, lambda v: sum(range(int(v)))),
    "float-type": (0.5, np.float64(0.5), lambda v: 3 if type(v) is float else 4),
    "string": ("ab", "abc", len),
    "long-string": ("a" * 999, "a" * 998 + "b", lambda v: v.count("b") + 1),
    "bytes": (b"a", b"b", lambda v: v[0]),
    "none": (None, 0, lambda v: 4 if v is None else 5),
    "ellipsis": (..., None, lambda v: 4 if v is None else 5),
    "complex": (1j, 2j, abs),
    "range": (range(2), range(5), len),
    "slice": (slice(1), slice(2), lambda v: len([1, 2, 3][v])),
    "set": ({1, 2}, {1, 3}, sum),
    "set-order": ({0, 8}, {8, 0}, lambda v: next(iter(v)) + 1),
    "frozenset": (frozenset("ab"), frozenset("abc"), len),
    "set-types": ({1}, {True}, lambda v: 3 if True in v and next(iter(v)) is True else 5),
    "tuple-types": ((1, 2), (1.0, 2), lambda v: 3 if isinstance(v[0], int) else 4),
    "nested": ({"a": [1, {"b": (1, 2)}]}, {"a": [1, {"b": (1, 3)}]}, lambda v: v["a"][1]["b"][1]),
    "enum": (Shade.LIGHT, Shade.DARK, lambda v: v.value),
    "flag": (Bits.A, Bits.A | Bits.B, lambda v: v.value),
    "lambda": (lambda: 2, lambda: 3, lambda v: v()),
    "type": (int, float, lambda v: v("3") if v is int else 7),
    "function": (np.sum, np.prod, lambda v: float(v([2, 3]))),
    "builtin": (sum, max, lambda v: v([2, 3])),
    "ufunc": (np.add, np.multiply, lambda v: float(v(2, 5))),
    "torch-function": (torch.add, torch.mul, lambda v: v(2, torch.tensor(5))),
    "partial": (functools.partial(dict, a=1), functools.partial(dict, b=1), lambda v: 2 if "a" in v() else 3),
    "array": (np.array([1, 2]), np.array([1, 3]), lambda v: float(v.sum())),
    "array-shape": (np.ones((2, 3)), np.ones((3, 2)), len),
    "array-of-objects": (np.array([Plain(1)]), np.array([Plain(2)]), lambda v: v[0].value),
    "numpy-number": (np.float32(2), np.float32(3), float),
    "numpy-int": (np.int64(2), np.int64(3), int),
    "numpy-type": (np.dtype("f4"), np.dtype("f8"), lambda v: v.itemsize),
    "numpy-random": (np.random.RandomState(0), np.random.RandomState(1), lambda v: float(v.get_state()[1][1] % 7)),
    "tensor": (torch.tensor([1, 2]), torch.tensor([1, 3]), torch.sum),
    "tensor-number": (torch.tensor(1), torch.tensor(2), number),
    "tensor-type": (torch.ones(1), torch.ones(1).double(), lambda v: v.itemsize),
    "dtype": (torch.float32, torch.float64, lambda v: v.itemsize),
    "size": (torch.Size([2]), (2,), lambda v: 2 if isinstance(v, torch.Size) else 3),
    "date": (datetime.datetime(2020, 1, 1), datetime.datetime(2021, 1, 1), lambda v: v.year),
    "span": (datetime.timedelta(1), datetime.timedelta(2), lambda v: v.days),
    "decimal": (decimal.Decimal("1.1"), decimal.Decimal("1.2"), float),
    "fraction": (fractions.Fraction(1, 2), fractions.Fraction(1, 3), float),
    "path": (pathlib.Path("a"), pathlib.Path("a/b"), lambda v: len(v.parts)),
    "pattern": (re.compile("a"), re.compile("a", re.IGNORECASE), lambda v: 2 if v.match("A") else 3),
    "counter": (collections.Counter("aa"), collections.Counter("aaa"), lambda v: v["a"]),
    "user-int": (Count(2), Count(3), int),
    "user-or-int": (Count(2), 2, lambda v: 3 if type(v) is int else 4),
    "user-dict": (Box(a=1), Box(a=2), lambda v: v["a"]),
    "user-list": (Row([1]), Row([2]), sum),
    "user-word": (Word("a"), Word("ab"), len),
    "random": (random.Random(1), random.Random(2), lambda v: v.getstate()[1][0] % 11),
    "deque": (collections.deque([1], 2), collections.deque([1], 3), lambda v: v.maxlen),
    "module": (torch, np, lambda v: 2 if v is torch else 3),
    "method": ("ab".count, "b".count, lambda v: v("a") + 1),
    "itemgetter": ({"a": 1}.get, {"a": 2}.get, lambda v: v("a")),
}


def check(first: nn.Module, second: nn.Module) -> bool:
    """Whether they were fused, which must then give what each gives alone."""
    try:
        fused = fuse([first, second])
    except (ValueError, TypeError):  # they differ; or they hold what cannot be copied
        return False
    try:
        found = fused(X)
    except Exception:  # vmap cannot follow, which a dry run finds
        fused.one_by_one = True
        found = fused(X)
    expected = torch.stack([first(X), second(X)])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9, equal_nan=True)
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_attribute_fuses_exactly_or_is_refused(kind: str) -> None:
    value, other, read = KINDS[kind]
    fused = {hold for hold in HOLDERS if check(User(value, read, hold), User(other, read, hold))}
    may_differ = isinstance(value, float) and type(value) is type(other)
    assert fused <= (WRITABLE if may_differ else set())


@pytest.mark.parametrize("hold", HOLDERS)
def test_equal_attributes_are_fused(hold: str) -> None:
    for value in (2, "ab", (1, 2), Shade.DARK, np.ones(2), fractions.Fraction(1, 3), np.float32(0.1)):
        fused = fusion_key(User(value, id, hold)) == fusion_key(User(value, id, hold))
        assert fused == (hold not in NEVER)


def test_floats_that_can_be_written_to_are_each_members_own() -> None:
    own = {hold for hold in HOLDERS if check(User(0.5, number, hold), User(1.5, number, hold))}
    assert own == WRITABLE


def test_equal_modules_have_equal_keys_in_every_process() -> None:
    """Sets have another order there, and objects other addresses."""
    environment = {**os.environ, "PYTHONHASHSEED": "5"}
    code = "from tests.fusion.test_property import digest; print(digest())"
    other = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == digest()


def digest() -> str:
    values = (2, {"a", "b", "c"}, {"a": frozenset("xyz")}, Shade.DARK, re.compile("a"), np.ones(2), print, np.add)
    keys = [fusion_key(User(value, id, hold)) for hold in sorted(HOLDERS.keys() - NEVER) for value in values]
    return hashlib.sha256(repr(keys).encode()).hexdigest()
