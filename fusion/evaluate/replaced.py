"""Replaces functions of torch and of Python's modules while a fused model is evaluated."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import getattr_static
from threading import Lock
from typing import Any


class Replaced:
    """Context manager that replaces attributes of modules and classes. Several threads may be inside at once.

    All threads of the process see the replacements. So a replacement must call the original if its own thread is not
    inside. The last thread that leaves restores the originals.

    Args:
        replacements: `replacements[owner][name]` is the new attribute. Attributes that the owner lacks are left out.

    Attributes:
        originals: `originals[owner][name]` is the attribute as it was when the first thread entered. A method of a
            class is not bound.
    """

    def __init__(self, replacements: Mapping[Any, Mapping[str, Any]]) -> None:
        self._replacements = replacements
        self._lock, self._inside = Lock(), 0
        self.originals: dict[Any, dict[str, Any]] = {}

    def __enter__(self) -> None:
        """Set the replacements, unless a thread is already inside: this one or another."""
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                for owner, new in self._replacements.items():
                    self.originals[owner] = {name: getattr_static(owner, name) for name in new if hasattr(owner, name)}
                    _set(owner, {name: new[name] for name in self.originals[owner]})

    def __exit__(self, *error: object) -> None:
        """Restore the originals, unless a thread is still inside: this one or another."""
        with self._lock:
            self._inside -= 1
            if not self._inside:
                for owner, known in self.originals.items():
                    _set(owner, known)


def _set(owner: Any, attributes: Mapping[str, Any]) -> None:
    for name, attribute in attributes.items():
        setattr(owner, name, attribute)
