"""Record the keys that a model function reads from its configuration.

The model function does the same for all configurations that agree in these keys.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from hydro_rasda.common.secret_masking import Secret

Reads = frozenset[tuple[str, str]]
"""Pairs (key, value as text) that were read from a configuration. The key "" has the list of all keys as its value."""

_PLAIN = (bool, int, float, str, Secret, type(None))


class ConfigKept(Exception):
    """After the model function has returned, something, usually the model, still refers to the configuration."""


class Notes:
    """Record of the keys that a model function read from its configurations.

    Args:
        may_be_kept: True if a model may keep its configuration and read more keys later; False to raise `ConfigKept`
            then.

    Attributes:
        read: The keys that were read; nested keys as `net.depth`.
        asked: The keys that were looked up but are missing.
    """

    def __init__(self, *, may_be_kept: bool = True) -> None:
        self.read: set[str] = set()
        self.asked: set[str] = set()
        self._may_be_kept = may_be_kept

    def taken_by(self, model_fn: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        """Wrap the model function so that its reads of the configuration are recorded.

        The wrapper raises `ConfigKept` if the model keeps its configuration, unless `may_be_kept` is true.
        """

        def noting(config: dict[str, Any], *args: Any, **kwargs: Any) -> nn.Module:
            given: list[weakref.ref[_Noted]] = []
            model = model_fn(_Noted(config, self, "", given), *args, **kwargs)
            if not self._may_be_kept and any(ref() is not None for ref in given):
                raise ConfigKept
            return model

        noting.__signature__ = inspect.signature(model_fn)  # type: ignore[attr-defined]
        return noting

    def noting(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a stand-in for a configuration; these `Notes` record each key that is read from the stand-in."""
        return _Noted(config, self, "", [])

    def of(self, config: Mapping[str, Any]) -> Reads | None:
        """Return the keys that were read, with their values in `config`; None if a value cannot be compared as text."""
        read = {(path, text) for path, text in _texts(config) if path in self.read or not path}
        return None if any(text is None for _, text in read) else frozenset(read)  # type: ignore[arg-type]


def all_of(config: Mapping[str, Any]) -> frozenset[tuple[str, str | None]]:
    """Return all keys and values of a configuration.

    If the `Notes.of` of another configuration is a subset of this result, a model function does the same for both.
    """
    return frozenset(_texts(config))


def _texts(config: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    yield "", repr(list(paths(config)))
    for path, value in leaves(config):
        yield path, repr(value) if is_plain(value) else None


def is_plain(value: Any) -> bool:
    """Tell whether a value is a number, a string, None, an empty dict, or a list or tuple of such values."""
    if type(value) in (list, tuple):
        return all(map(is_plain, value))
    return type(value) in _PLAIN or (type(value) is dict and not value)


def leaves(config: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of a configuration with their values; nested keys as `net.depth`."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{within}{key}.")
        else:
            yield f"{within}{key}", value


def paths(config: Mapping[str, Any], within: str = "") -> Iterator[str]:
    """Yield the keys of a configuration; nested keys as `net.depth`."""
    return (path for path, _ in leaves(config, within))


class _Noted(dict[str, Any]):
    """A configuration that records which of its keys are read; iterating over it counts as reading all keys."""

    def __init__(self, config: Mapping[str, Any], notes: Notes, within: str, given: list[weakref.ref[_Noted]]) -> None:
        plain = dict(dict.items(config)) if isinstance(config, dict) else dict(config)
        nested = {key: value for key, value in plain.items() if type(value) in (dict, _Noted)}
        inner = {key: _Noted(value, notes, f"{within}{key}.", given) for key, value in nested.items()}
        super().__init__({**plain, **inner})
        # If `config` records its reads itself, its notes also get the reads of this stand-in.
        self._notes: tuple[Notes, ...] = (notes, *getattr(config, "_notes", ()))
        self._within = within
        given.append(weakref.ref(self))

    def _note(self, key: object) -> None:
        there = dict.__contains__(self, key)
        for notes in self._notes:
            (notes.read if there else notes.asked).add(f"{self._within}{key}")

    def plain(self) -> dict[str, Any]:
        """Return the configuration as an ordinary dict; all of its keys count as read."""
        plain = {key: value.plain() if isinstance(value, _Noted) else value for key, value in dict.items(self)}
        for notes in self._notes:
            notes.read |= set(paths(plain, self._within))
        return plain

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.plain(),)


def _noting(method: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    """Return a method of `dict` that first records the keys that it reads."""

    def noted(config: _Noted, *args: Any) -> Any:
        note(config, *args)
        return method(config, *args)

    return noted


_LOOK_UP = ("__contains__", "__getitem__", "get", "pop", "setdefault")
_GO_THROUGH = (
    *("__iter__", "__reversed__", "__eq__", "__ne__", "__or__", "__ror__", "__repr__"),
    *("copy", "items", "keys", "popitem", "values"),
)
for _name in _LOOK_UP:
    setattr(_Noted, _name, _noting(getattr(dict, _name), lambda config, key, *_: config._note(key)))
for _name in _GO_THROUGH:
    setattr(_Noted, _name, _noting(getattr(dict, _name), lambda config, *_: config.plain()))
