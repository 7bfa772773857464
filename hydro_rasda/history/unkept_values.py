"""Configuration values that JSON cannot keep, such as tuples and classes.

The journal notes the place of each such value (the keys that lead to it), and its Python literal if it has one.
"""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

from hydro_rasda.common.secret_masking import HIDDEN, Place, put, value_at


def literals(config: Mapping[str, Any]) -> list[tuple[Place, str | None]]:
    """Return the place and the Python literal of each value that JSON would change; None for a value without literal.

    >>> literals({"lr": 0.1, "net": {"size": (3, 3), "clip": float("inf")}, "act": len})
    [(('net', 'size'), '(3, 3)'), (('net', 'clip'), 'inf'), (('act',), None)]
    """
    return [*_found(config, ())]


def _found(config: Mapping[str, Any], within: Place) -> Iterator[tuple[Place, str | None]]:
    for name, value in config.items():
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            yield from _found(value, (*within, name))
        elif not _is_kept(value):
            yield (*within, name), _literal(value)


def _is_kept(value: Any) -> bool:
    if isinstance(value, Enum):  # JSON turns an `IntEnum` into a number, but models compare enum members by `is`
        return False
    if isinstance(value, list):
        return all(map(_is_kept, value))
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_kept(each) for key, each in value.items())
    return value is None or isinstance(value, (int, str)) or (isinstance(value, float) and math.isfinite(value))


def _literal(value: Any) -> str | None:
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a NumPy number becomes a Python number
        value = value.item()
    text = repr(value)
    try:
        found = _value_of(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return text if type(found) is type(value) and repr(found) == text else None


def _value_of(literal: str) -> Any:
    return float(literal) if literal in ("inf", "-inf", "nan") else ast.literal_eval(literal)


def restored(config: Mapping[str, Any], noted: Sequence[tuple[Sequence[str], str | None]]) -> dict[str, Any]:
    """Return a configuration from the journal, with the values that have literals put back."""
    return put(config, {tuple(place): _value_of(literal) for place, literal in noted if literal is not None})


def changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Apply changes from the journal to a restored configuration; a list that replaces a tuple becomes a tuple."""
    tuples = {key for key, value in config.items() if isinstance(value, tuple)}
    return {**config, **{key: tuple(value) if key in tuples else value for key, value in changes.items()}}


def withholding(model_fn: Callable[..., Any], unkept: Collection[Place] = ()) -> Callable[..., Any]:
    """Return a model function that raises ValueError if it reads a secret, or a value at one of the places `unkept`."""

    def called(config: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        withheld = put(config, {place: _Unkept(value_at(config, place)) for place in unkept})
        return model_fn((_Strict if unkept else _Withheld)(withheld), *args, **kwargs)

    called.__signature__ = inspect.signature(model_fn)  # type: ignore[attr-defined]
    return called


class _Unkept:
    """A value of which the run's folder has only the text."""

    def __init__(self, shown: object) -> None:
        self.shown = shown


class _Withheld(dict[str, Any]):
    """A configuration, or a dict in it, that raises if a secret or a value of `_Unkept` is read."""

    def __init__(self, values: Mapping[str, Any], within: Place = ()) -> None:
        super().__init__(values)
        self._within = within

    def __getitem__(self, name: str) -> Any:
        return self._told(name, super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        return self._told(name, super().get(name, default))

    def pop(self, name: str, *default: Any) -> Any:
        return self._told(name, super().pop(name, *default))

    def __or__(self, other: Any) -> Any:
        return type(self)({**dict(dict.items(self)), **other}, self._within)

    def _told(self, name: str, value: Any) -> Any:
        place = (*self._within, name)
        read, again = _read(place), f"`best_model(model_fn=lambda config: model_fn({_with_another(place)}))`"
        if isinstance(value, str) and value == HIDDEN:
            raise ValueError(f"`{read}` is a secret, which no run's folder keeps: give it again, as by {again}")
        if isinstance(value, _Unkept):
            raise ValueError(
                f"`{read}` is only a text in the run's folder, {value.shown!r}: JSON cannot hold its value. "
                f"Give the value again, as by {again}"
            )
        return type(self)(dict(dict.items(value)), place) if isinstance(value, dict) else value


def _read(place: Place) -> str:
    return "config" + "".join(f"[{name!r}]" for name in place)


def _with_another(place: Place) -> str:
    """Return Python code for a copy of `config` that has another value at this place.

    >>> _with_another(("net", "act"))
    "config | {'net': config['net'] | {'act': ...}}"
    """
    code = "..."
    for depth in reversed(range(len(place))):
        code = f"{_read(place[:depth])} | {{{place[depth]!r}: {code}}}"
    return code


class _Strict(_Withheld):
    """A configuration that also raises if `f(**config)` or `dict(config)` reads all of its values."""

    def items(self) -> Any:
        return {name: self[name] for name in self.keys()}.items()

    def values(self) -> Any:
        return dict(self.items()).values()

    def copy(self) -> Any:
        return dict(self.items())

    # Without this method, `dict(config)` and `f(**config)` would copy the dict and never call `__getitem__`.
    def __iter__(self) -> Iterator[str]:
        return super().__iter__()
