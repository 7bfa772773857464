"""Floats inside modules (dropout probability, label smoothing, multipliers) that differ from member to member.

Inside the vmapped call, such a float is a 0-dimensional tensor. Arithmetic works with it, and the rules handle the
operators that matter for speed. If another operator insists on a number, `PlainFloats` runs it member by member.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from threading import local
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_any

from fusion.evaluate.replaced import Replaced
from fusion.evaluate.rules.drawing import member_by_member
from fusion.evaluate.rules.member import Member, fold
from fusion.streams import Streams
from fusion.structure import FloatSlot


class Settings:
    """The floats in which members differ. Floats that are equal in all members stay plain numbers in the module.

    Args:
        members: `members[k][path]` is the place of a float in member k's module. The first member's module computes the
            results of all members.

    Attributes:
        values_K: path -> [K], float64 on the CPU.
    """

    def __init__(self, members: Sequence[Mapping[str, FloatSlot]]) -> None:
        given = {path: [slots[path].get() for slots in members] for path in members[0]}
        # Forward may have put a tensor in the place of a float. It is then no setting, but a value of each member.
        numbers = {path: own for path, own in given.items() if all(isinstance(value, int | float) for value in own)}
        values = {path: [*map(float, own)] for path, own in numbers.items()}
        # Compare floats by `float.hex`, because 0.0 and -0.0 give different results, and NaN must equal NaN.
        differing = {path: value for path, value in values.items() if len(set(map(float.hex, value))) > 1}
        self._slots = {path: members[0][path] for path in differing}
        self.values_K = {path: torch.tensor(value, dtype=torch.float64) for path, value in differing.items()}
        self._copies: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}

    def like(self, tensors: Iterable[Tensor]) -> dict[str, Tensor]:
        """Return the floats' values, [K] each, on the device of the first floating-point tensor in `tensors`.

        Their dtype is float64 if that tensor has it, else float32.
        """
        first = next((t for t in tensors if t.is_floating_point()), torch.empty(0))
        dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        if (first.device, dtype) in self._copies:
            return self._copies[first.device, dtype]
        scalars_K = {path: value.to(first.device, dtype, copy=True) for path, value in self.values_K.items()}
        for path, scalar_K in scalars_K.items():
            vars(scalar_K)["numbers"] = self.values_K[path].tolist()
        # Keep the copies on the device, so that later steps do not wait for new ones. Do not keep tensors that were
        # made in inference mode, because training cannot use them.
        if not torch.is_inference_mode_enabled():
            self._copies[first.device, dtype] = scalars_K
        return scalars_K

    def places(self) -> set[tuple[int, Any]]:
        """Return (id of the owner, key) of each float in which members differ, in the first member's module."""
        return {(id(slot.owner), slot.key) for slot in self._slots.values()}

    @contextmanager
    def bound(self, values: Mapping[str, Any]) -> Iterator[None]:
        """Let the module hold one member's values inside this context; they are numbers or 0-dimensional tensors."""
        before = {path: slot.get() for path, slot in self._slots.items()}
        for path, slot in self._slots.items():
            slot.set(values[path])
        try:
            yield
        finally:
            for path, slot in self._slots.items():
                slot.set(before[path])


class PlainFloats(TorchFunctionMode):
    """Within this mode, code that needs plain numbers also accepts settings, which are tensors inside `vmap`.

    An operator that fails on such a tensor runs member by member, with numbers. A comparison (`if self.p > 0`) or a
    conversion (`int(10 * self.ratio)`) works if all members give the same result. `round` and the functions of `math`
    are replaced while the mode is active. The replacements compute each member's number.

    Args:
        scalars: The settings as tensors, as they are inside `vmap`.
        values: The K numbers of each setting.
    """

    def __init__(self, scalars: Iterable[Tensor], values: Iterable[list[float]], streams: Streams) -> None:
        super().__init__()
        scalars = [*scalars]
        self._values = {id(scalar): value for scalar, value in zip(scalars, values, strict=True)}
        self._dtype = scalars[0].dtype
        self._computed: list[Tensor] = []
        self._streams = streams

    def __enter__(self) -> Any:
        """Make `round` and the functions of `math` also accept floats that differ by member."""
        _here.active = (*_here.active, self)
        _REPLACED.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        """Restore `round` and the functions of `math`."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _here.active = _here.active[:-1]
        _REPLACED.__exit__()

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _AUGMENTED and id(args[0]) in self._values:
            func = _AUGMENTED[func]
        if func in _DECISIONS and (rows := self._rows(args)):
            decisions = [_DECISIONS[func](*row) for row in rows]
            if _agree(decisions):
                return decisions[0]
        try:
            result = func(*args, **kwargs)
            if func is torch.broadcast_tensors:  # these are no numbers: a member alone gets tensors, too
                result = tuple(x.view_as(x) for x in result)
            if (number := _ARITHMETIC.get(func)) and not kwargs and (rows := self._rows(args)):
                self._note(result, number, rows)
            return result
        except (RuntimeError, TypeError, ValueError) as error:
            if not tree_any(_is_scalar, (args, kwargs)):
                raise
            try:
                result = fold(member_by_member(func, self._streams, plain_scalars=True), args, kwargs)
            except (RuntimeError, TypeError, ValueError):
                result = NotImplemented
            if result is NotImplemented:
                raise error
            return result

    def of_numbers(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function of plain numbers. If an argument is a setting, call it once for each member.

        The result is a number if all members get the same number; otherwise it is a tensor.
        """
        if not (rows := self._rows(args)):
            return function(*args, **kwargs)
        first = next(x for x in args if isinstance(x, Tensor))
        values = [function(*row, **kwargs) for row in rows]
        if _agree(values):
            return values[0]
        if {*map(type, values)} not in ({int}, {float}):
            return function(*args, **kwargs)  # the tensor makes torch raise an error that explains the cause
        dtype = self._dtype if isinstance(values[0], float) else torch.int64
        written = tuple(float(value).hex() for value in values)
        result = fold(lambda K, x: Member(_stacked(written, dtype, x.value.device), 0), (first,), {})
        self._values[id(result)] = values
        self._computed.append(result)
        return result

    def _rows(self, args: Sequence[Any]) -> list[list[Any]] | None:
        """Return the arguments as numbers, one list for each member.

        Return None if no argument is a setting, or one is neither a setting nor a plain number.
        """
        own = [self._values.get(id(x)) if isinstance(x, Tensor) else x for x in args]
        count = next((len(x) for x in own if isinstance(x, list)), 0)
        if not count or any(x is None or isinstance(x, str) for x in own):
            return None
        return [[x[k] if isinstance(x, list) else x for x in own] for k in range(count)]

    def _note(self, result: Tensor, function: Callable[..., float], rows: Sequence[Sequence[Any]]) -> None:
        """Remember the K numbers for which `result` stands, so that it counts as a setting, too.

        `function` computes each number from the arguments of one member, which are one of `rows`.
        """
        try:
            self._values[id(result)] = [function(*row) for row in rows]
        except (ArithmeticError, TypeError):
            return
        self._computed.append(result)  # keep `result` alive, so that no other object gets its id


_COMPARISONS: dict[str, Callable[..., Any]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "gt", "ge", "lt", "le")
}
# Both names are listed: for `s > x`, torch calls `gt` or `__gt__`, depending on the operator and on torch's version.
_DECISIONS: dict[Any, Callable[..., Any]] = {
    Tensor.__bool__: bool,
    Tensor.__int__: int,
    Tensor.__float__: float,
    **{getattr(Tensor, name): decide for name, decide in _COMPARISONS.items()},
    **{getattr(Tensor, f"__{name}__"): decide for name, decide in _COMPARISONS.items()},
}


_OPERATIONS: dict[str, Callable[..., float]] = {
    **{"add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv, "pow": operator.pow},
    **{"neg": operator.neg, "abs": abs},
    **{"__rsub__": lambda x, y: y - x, "__rdiv__": lambda x, y: y / x, "__rpow__": lambda x, y: y**x},
}
_ARITHMETIC: dict[Any, Callable[..., float]] = {
    getattr(Tensor, name): function
    for known, function in _OPERATIONS.items()
    for name in (known, f"__{known}__")
    if hasattr(Tensor, name)
}
"""Maps functions that torch calls for arithmetic such as `1 - s` to the same functions of plain numbers."""

_OF_PYTHON = {
    **{name: name for name in ("add", "sub", "mul", "pow")},
    **{"div": "truediv", "floor_divide": "floordiv", "remainder": "mod"},
}
_AUGMENTED: dict[Any, Any] = {
    getattr(Tensor, name): getattr(Tensor, known)
    for known, of_python in _OF_PYTHON.items()
    for name in (f"{known}_", f"__i{of_python}__")
    if hasattr(Tensor, name)
}
"""Maps in-place functions (`s *= 2`) to ordinary ones (`s * 2`), because a setting, like a float, never changes."""


class _Modes(local):
    """The `PlainFloats` modes that this thread has entered, the innermost last."""

    active: tuple[PlainFloats, ...] = ()


_here = _Modes()


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if _here.active and any(isinstance(x, Tensor) for x in args):
        return _here.active[-1].of_numbers(function, *args, **kwargs)
    return function(*args, **kwargs)


_MATH = {name: partial(_call, x) for name, x in vars(math).items() if callable(x) and not name.startswith("_")}
_REPLACED = Replaced({math: _MATH, builtins: {"round": partial(_call, round)}})


def _agree(values: Sequence[Any]) -> bool:
    """Return whether all values are equal to the last bit: 0.0 differs from -0.0, and NaN equals NaN."""
    return len({*map(repr, values)}) == 1


@lru_cache(maxsize=64)
def _stacked(written: tuple[str, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make a tensor of the K numbers that `written` has as hexadecimal texts.

    The tensor is cached, so that later steps need not copy the numbers to the device.
    """
    values = [*map(float.fromhex, written)]
    with torch.inference_mode(False):
        values_K = torch.tensor(values, dtype=dtype, device=device)
    vars(values_K)["numbers"] = values
    return values_K


def _is_scalar(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim == 0 and x.is_floating_point()
