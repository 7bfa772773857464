"""Secrets among the constants of a space: models get them, but files, messages and loggers do not show them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from hydro_rasda.common.argument_checks import is_text, require

HIDDEN = "(hidden)"
"""Text that replaces a secret."""

Place = tuple[str, ...]
"""Keys that lead to a value of a configuration, such as `("hub", "token")`."""

_SHORT = 6


class Secret(str):
    """A string that `repr` does not show."""

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(HIDDEN)


def secret(value: str) -> str:
    """Mark a constant of the space as a secret, such as `"hf_token": secret(os.environ["HF_TOKEN"])`.

    `model_fn` and the other functions get the text. A run's folder, messages and loggers have "(hidden)" in its place.
    However, a secret of fewer than 6 characters stays in the text of errors and messages, because it could be part of
    any word.

    Args:
        value: A string of at least one character. The space may have it at its top level, or in nested dicts.

    Raises:
        ValueError: If `value` is not a string, or is empty.

    >>> secret("hf_JgK2"), secret("hf_JgK2") == "hf_JgK2"
    ('(hidden)', True)
    """
    require(is_text(value) and bool(value), "value", type(value).__name__, "a text of at least one character")
    return Secret(value)


def secrets_of(space: Mapping[str, Any]) -> frozenset[Place]:
    """Return the place of each secret in a space: the keys that lead to it."""
    return frozenset(_found(space, lambda value: isinstance(value, Secret)))


def described_secrets(space: Any) -> frozenset[Place]:
    """Return the places of the secrets in a space that was read from `run.json`, where values are texts."""
    return frozenset(_found(space, lambda words: bool(words == repr(HIDDEN))))


def _found(space: Any, is_one: Callable[[Any], bool]) -> list[Place]:
    found: list[Place] = []
    for name, value in space.items() if isinstance(space, Mapping) else ():
        if isinstance(value, Mapping):
            found += [(name, *rest) for rest in _found(value, is_one)]
        elif is_one(value):
            found.append((name,))
    return found


def holds_secret(value: Any) -> bool:
    """Tell whether a value is a secret, or contains one in a list, a dict or a choice."""
    if isinstance(value, Mapping):
        return any(map(holds_secret, value.values()))
    parts = value if isinstance(value, list | tuple) else getattr(value, "categories", ())
    return isinstance(value, Secret) or any(map(holds_secret, parts))


def hide(config: Mapping[str, Any], places: Collection[Place]) -> dict[str, Any]:
    """Return a configuration, or a space, with its secrets replaced by `HIDDEN`."""
    return put(config, dict.fromkeys(places, HIDDEN))


def restore(config: Mapping[str, Any], places: Collection[Place], space: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `hide`: put the secrets at `places` back into a configuration, with their values from `space`."""
    return put(config, {place: value_at(space, place) for place in places})


def put(config: Mapping[str, Any], values: Mapping[Place, Any]) -> dict[str, Any]:
    """Return a copy of `config` with the new `values` at their places. Places that `config` lacks are ignored."""
    copied = dict(config)
    for (name, *rest), value in values.items():
        if name in copied:
            inner = copied[name]
            if not rest:
                copied[name] = value
            elif isinstance(inner, Mapping):
                copied[name] = put(inner, {tuple(rest): value})
    return copied


def value_at(config: Any, place: Place) -> Any:
    """Return the value of a configuration at a place; None if it lacks the place."""
    for name in place:
        config = config.get(name) if isinstance(config, Mapping) else None
    return config


def scrubbed(text: str, places: Collection[Place], space: Mapping[str, Any]) -> str:
    """Return a text, such as a traceback, without the secrets of a space.

    Secrets of fewer than 6 characters are kept, because they could be part of any word.
    """
    for place in places:
        secret = value_at(space, place)
        if isinstance(secret, str) and len(secret) >= _SHORT:
            for written in (secret, str.__repr__(secret)[1:-1]):  # the second as in the message of a KeyError
                text = text.replace(written, HIDDEN)
    return text
