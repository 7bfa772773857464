"""Keys of a configuration that nothing reads: misspelled, most often, and yet part of the best configuration."""

from __future__ import annotations

import difflib
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from fusion.keys import KEYS, is_read

from .problem import Problem, Trial

Unread = dict[str, str | None]
"""By key that was not read (`net.depth` where it is nested), the one that was probably meant."""


def build_noting(problem: Problem, trial: Trial) -> tuple[nn.Module, Unread]:
    """A trial's surrogate, and which keys of its configuration neither `model_fn` nor the library reads.

    A configuration that the model keeps may be read later, all of it; so may one that `model_fn` fails on.
    """
    notes = _Notes()
    try:
        surrogate = replace(problem, model_fn=notes.taken_by(problem.model_fn)).surrogate(trial)
    except Exception:  # of the model's own, or as it takes no stand-in for a dict: building it again tells
        return problem.surrogate(trial), {}
    if notes.kept:
        return problem.surrogate(trial), {}
    return surrogate, notes.unread(trial.config)


def warn_of_unread(found: Iterable[Unread]) -> None:
    """Warn of what was unread in every trial.

    Warns:
        UserWarning: where there is such a key.
    """
    first, *others = found
    names = [_told(key, meant) for key, meant in first.items() if all(key in other for other in others)]
    if names:
        warnings.warn(
            f"neither `model_fn` nor the library reads {', '.join(names)}: what `space` says there changes nothing, "
            "though the best configuration will name it",
            stacklevel=4,
        )


def _told(key: str, meant: str | None) -> str:
    if key in KEYS:
        return f"`{key}` (read where `{KEYS[key].under}` is {' or '.join(KEYS[key].defaults)})"
    return f"`{key}`" if meant is None else f"`{key}` (did you mean `{meant}`?)"


class _Notes:
    """What was read of the configurations that a model function was given.

    Attributes:
        read: Keys, with those around them: `net.depth`.
        asked: Keys that were looked for in vain.
        kept: Whether a configuration is still held by someone when the model function is done.
    """

    def __init__(self) -> None:
        self.read: set[str] = set()
        self.asked: set[str] = set()
        self.kept = False

    def taken_by(self, model_fn: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        """The model function, called with a configuration that notes what is read of it."""

        def noting(config: dict[str, Any], *args: Any, **kwargs: Any) -> nn.Module:
            given: list[weakref.ref[_Noted]] = []
            model = model_fn(_Noted(config, self, "", given), *args, **kwargs)
            self.kept |= any(ref() is not None for ref in given)
            return model

        noting.__signature__ = inspect.signature(model_fn)  # type: ignore[attr-defined]
        return noting

    def unread(self, config: Mapping[str, Any]) -> Unread:
        known = (self.asked | KEYS.keys()) - set(_paths(config))
        unread = [path for path in _paths(config) if path not in self.read]
        return {path: _closest(path, known) for path in unread if path not in KEYS or not is_read(path, config)}


def _paths(config: Mapping[str, Any], within: str = "") -> Iterator[str]:
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from _paths(value, f"{within}{key}.")
        else:
            yield f"{within}{key}"


def _closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like another, in whatever order their words are.

    >>> [_closest(name, ["weight_decay", "grad_clip"]) for name in ("weight_deacy", "clip_grad", "width")]
    ['weight_decay', 'grad_clip', None]
    """
    by_words = {_words(other): other for other in sorted(known)}
    found = difflib.get_close_matches(_words(name), by_words, n=1, cutoff=0.75)
    return by_words[found[0]] if found else None


def _words(name: str) -> str:
    return "_".join(sorted(name.lower().split("_")))


class _Noted(dict[str, Any]):
    """A configuration that notes which of its keys are read; whoever goes through all reads all."""

    def __init__(self, config: Mapping[str, Any], notes: _Notes, within: str, given: list[weakref.ref[_Noted]]) -> None:
        nested = {key: value for key, value in config.items() if type(value) is dict}
        inner = {key: _Noted(value, notes, f"{within}{key}.", given) for key, value in nested.items()}
        super().__init__({**config, **inner})
        self._notes, self._within = notes, within
        given.append(weakref.ref(self))

    def _note(self, key: object) -> None:
        known = self._notes.read if super().__contains__(key) else self._notes.asked
        known.add(f"{self._within}{key}")

    def plain(self) -> dict[str, Any]:
        """The configuration as an ordinary dict, all of which counts as read."""
        plain = {key: value.plain() if isinstance(value, _Noted) else value for key, value in dict.items(self)}
        self._notes.read |= set(_paths(plain, self._within))
        return plain

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.plain(),)

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._note(key)
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._note(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        self._note(key)
        return super().pop(key, *default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        self._note(key)
        return super().setdefault(key, default)


def _going_through(method: Callable[..., Any]) -> Callable[..., Any]:
    def noting(config: _Noted, *args: Any) -> Any:
        config.plain()
        return method(config, *args)

    return noting


for _name in ("__iter__", "__reversed__", "__eq__", "__or__", "__ror__", "copy", "items", "keys", "popitem", "values"):
    setattr(_Noted, _name, _going_through(getattr(dict, _name)))
