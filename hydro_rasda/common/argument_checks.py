"""Checks of arguments. Each raises ValueError for a wrong type or a wrong value.

Messages have the form of `fusion.argument_checks`: name, value and rule. Needs neither torch nor Ray.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeGuard

from fusion.argument_checks import check_flag as check_flag
from fusion.argument_checks import is_int as is_int
from fusion.argument_checks import is_number as is_number
from fusion.argument_checks import refusal as refusal
from fusion.argument_checks import require as require


def in_order(value: set[Any] | frozenset[Any], show: Callable[[Any], str] = repr) -> str:
    """Return a set as text that is the same in every process, unlike `repr`, whose order may differ.

    >>> in_order({"b", "a"}), in_order(frozenset({2, 1})), in_order(set())
    ("{'a', 'b'}", 'frozenset({1, 2})', 'set()')
    """
    if not value:
        return repr(value)
    items = "{" + ", ".join(sorted(map(show, value))) + "}"
    return items if type(value) is set else f"{type(value).__name__}({items})"


def is_metric(value: object) -> TypeGuard[float]:
    """Return whether a value is a number that a training may report. Infinities and NaN count; a bool does not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_text(value: object) -> TypeGuard[str]:
    """Return whether a value is a string that files and other processes accept: valid in UTF-8, without NUL bytes."""
    try:
        return isinstance(value, str) and "\0" not in value and bool(value.encode() or True)
    except UnicodeEncodeError:  # UTF-8 has no bytes for half of a surrogate pair
        return False


def check_int(name: str, value: object, at_least: int, optional: bool = False, at_most: float = math.inf) -> None:
    """Raise ValueError unless `value` is an integer from `at_least` to `at_most`, or None if it is `optional`."""
    holds = (optional and value is None) or (is_int(value) and at_least <= value <= at_most)
    bound = f">= {at_least}" if at_most == math.inf else f"from {at_least} to {at_most}"
    require(holds, name, value, f"{'None or ' if optional else ''}an integer {bound}")


def check_number(name: str, value: object, above: float | None = None) -> None:
    """Raise ValueError unless `value` is a number > `above`; without `above`, a number >= 0."""
    holds = is_metric(value) and (value >= 0 if above is None else value > above)
    require(holds, name, value, "a number >= 0" if above is None else f"a number > {above:g}")


def check_is(name: str, value: object, kind: type, several: bool = False) -> None:
    """Raise ValueError unless `value` is an instance of `kind`; if `several`, a list or tuple of instances."""
    if several:
        require(isinstance(value, list | tuple), name, value, f"a list of {kind.__name__}s")
        assert isinstance(value, list | tuple)
        for i, item in enumerate(value):
            check_is(f"{name}[{i}]", item, kind)
    else:
        require(isinstance(value, kind), name, value, f"of the class {kind.__name__}")


def check_path(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a path."""
    holds = isinstance(value, str | PathLike) and isinstance(os.fspath(value), str) and "\0" not in str(value)
    require(holds and len(str(value)) < 4096, name, value, "a path")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    require(isinstance(value, str) and value in choices, name, value, f"one of {tuple(choices)}")


def check_text(name: str, value: object, optional: bool = False) -> None:
    """Raise ValueError unless `value` is a string that is not empty, or None if it is `optional`."""
    holds = (optional and value is None) or (isinstance(value, str) and bool(value))
    require(holds, name, value, f"{'None or ' if optional else ''}a text")


def check_function(name: str, value: object, *counts: int, rule: str, or_class: bool = False) -> None:
    """Raise ValueError unless `value` can be called with one of the numbers of arguments `counts`.

    The message says that it must be `rule`. If `or_class` is False, classes are refused, too.
    """
    holds = callable(value) and (or_class or not isinstance(value, type))
    try:
        signature = inspect.signature(value)  # type: ignore[arg-type]
        holds = holds and any(binds(signature, count) for count in counts)
    except TypeError:
        holds = False
    except ValueError:  # a function written in C may lack a signature: then do not count its arguments
        holds = holds and not isinstance(value, type)
    require(holds, name, value, rule)


def binds(signature: inspect.Signature, count: int) -> bool:
    """Return whether a function can be called with `count` positional arguments."""
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def check_folder(name: str, value: object) -> Path:
    """Return the absolute path of a folder that exists or can be made.

    Raises:
        ValueError: If `value` is anything else, such as the address of a store.
    """
    rule = "the path of a folder that is there, or can be made"
    check_path(name, value)
    store = "a folder, such as one at which the store is mounted (on each node of a cluster), not a store's address"
    require("://" not in str(value), name, value, store)
    require(str(value) != "", name, value, rule)
    try:
        folder = Path(value).expanduser().absolute()  # type: ignore[arg-type]
        there = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
        require(there.exists(), name, value, f"{rule}: the link {there} leads to nothing")
        require(there.is_dir() and (there == folder or os.access(there, os.W_OK)), name, value, rule)
    except (OSError, RuntimeError) as error:  # a name that is too long, or `~user` of an unknown user
        told = getattr(error, "strerror", None) or error
        raise ValueError(f"{refusal(name, value, rule)} ({told})") from None
    return folder


def check_name(name: str, value: object) -> None:
    """Raise ValueError unless `value` can be the name of a folder."""
    holds = is_text(value) and value not in ("", ".", "..") and not {"/", os.sep} & {*value}
    require(holds and len(str(value).encode()) <= 255, name, value, "a folder's name of at most 255 bytes, without '/'")


def check_mode(mode: object) -> None:
    """Raise ValueError unless `mode` is "min" or "max"."""
    require(isinstance(mode, str) and mode in ("min", "max"), "mode", mode, "'min' or 'max'")
