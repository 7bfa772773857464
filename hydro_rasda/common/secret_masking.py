"""Secrets among the constants of a space, such as `hf_token`: models get them, and nothing that is kept shows them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

HIDDEN = "(hidden)"
"""Stands in a secret's place."""

Place = tuple[str, ...]
"""Names that lead to a value of a configuration: `("hub", "token")`."""

_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_ALWAYS = {"secret", "secrets", "password", "passwords", "passwd", "passphrase", "credential", "credentials", "apikey"}
_OF_TEXTS = {"pad", "bos", "eos", "cls", "unk", "mask", "sep", "start", "end", "begin", "special", "image"}
"""Tokens of these names are words of a language model."""
_KEYS = {"api", "access", "private", "auth", "account", "encryption", "signing"}

_TEXT = re.compile(r"b?(['\"]).*\1|\[b?['\"].*['\"]\]", re.DOTALL)
_SHORT = 6


def is_secret(name: str) -> bool:
    """Return whether a name is that of a secret.

    >>> [is_secret(name) for name in ("hf_token", "WANDB_API_KEY", "clientSecret", "token_dropout", "pad_token", "key")]
    [True, True, True, False, False, False]
    """
    words = [word.lower() for word in _WORDS.findall(name)]
    last, before = (["", "", *words])[-1], (["", "", *words])[-2]
    token = last == "token" and before not in _OF_TEXTS
    return token or (last == "key" and before in _KEYS) or not _ALWAYS.isdisjoint(words)


def secrets_of(space: Mapping[str, Any]) -> frozenset[Place]:
    """Return the places of a space's secrets: constants that are texts, by their names. Searched values are none."""
    return frozenset(_found(space, _is_text, False))


def described_secrets(space: Any) -> frozenset[Place]:
    """The same of a space as `run.json` has it, in words."""
    return frozenset(_found(space, lambda words: isinstance(words, str) and bool(_TEXT.fullmatch(words)), False))


def _found(space: Any, is_text: Callable[[Any], bool], inside: bool) -> list[Place]:
    found: list[Place] = []
    for name, value in space.items() if isinstance(space, Mapping) else ():
        secret = inside or is_secret(str(name))
        if isinstance(value, Mapping):
            if value.keys() != {"grid_search"}:
                found += [(name, *rest) for rest in _found(value, is_text, secret)]
        elif secret and is_text(value):
            found.append((name,))
    return found


def _is_text(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(_is_text, value))
    return isinstance(value, (str, bytes))


def hide(config: Mapping[str, Any], places: Collection[Place], by: Any = HIDDEN) -> dict[str, Any]:
    """A configuration, or a space, with something else where it has secrets."""
    return put(config, dict.fromkeys(places, by))


def shown(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration in a message, where its space is not known."""
    return hide(config, secrets_of(config))


def restore(config: Mapping[str, Any], places: Collection[Place], space: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with the secrets that a space has in these places."""
    return put(config, {place: value_at(space, place) for place in places})


def put(config: Mapping[str, Any], values: Mapping[Place, Any]) -> dict[str, Any]:
    """Return a configuration with other values in the places that it has of these."""
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
    """Return the value of a configuration in a place; None if it has none there."""
    for name in place:
        config = config.get(name) if isinstance(config, Mapping) else None
    return config


def scrubbed(text: str, places: Collection[Place], space: Mapping[str, Any]) -> str:
    """A text, such as a traceback, without the secrets that a space has; very short ones could be any word."""
    for place in places:
        secret = value_at(space, place)
        if isinstance(secret, str) and len(secret) >= _SHORT:
            text = text.replace(secret, HIDDEN)
    return text
