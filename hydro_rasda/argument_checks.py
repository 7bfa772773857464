"""The one form in which a bad argument is refused: its name, its value and the rule. Needs neither torch nor Ray.

A wrong type and a wrong value are refused alike, by a ValueError of one wording.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import reprlib
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from typing import Any, TypeGuard

_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = 200


def require(holds: bool, argument: str, value: object, rule: str) -> None:
    """Refuse an argument unless its rule holds: ValueError with argument, value (cut where it is long) and rule."""
    if not holds:
        raise ValueError(
            f"`{argument}` is {_shown.repr(value)}, but must be {rule}{_in_python(value)}{meant(value, rule)}"
        )


def meant(value: object, rule: str) -> str:
    """Return the word of a rule's list that a text is close to, as a question; empty if there is none.

    >>> meant("Adam", "one of sgd, adam, adamw"), meant("AdamW", "one of 'sgd', 'adamw'"), meant("new", "one of sgd")
    ('; did you mean "adam"?', '; did you mean "adamw"?', '')
    """
    if not isinstance(value, str) or not rule.startswith("one of "):
        return ""
    words = [word.strip("'\"[]() ") for word in re.split(r",|;| or ", rule.removeprefix("one of "))]
    close = get_close_matches(value.lower().replace("-", "_"), words, n=1, cutoff=0.75)
    return f'; did you mean "{close[0]}"?' if close else ""


def _in_python(value: object) -> str:
    """Say how a scalar of NumPy's or torch's, which breaks a rule by its type alone, becomes Python's own."""
    scalar = hasattr(value, "item") and getattr(value, "ndim", None) == 0
    return "; `.item()` makes Python's own of it" if scalar and not isinstance(value, int | float | str) else ""


def in_order(value: set[Any] | frozenset[Any], show: Callable[[Any], str] = repr) -> str:
    """A set as text, the same in every process; `repr` has the order of its hashes, which differ.

    >>> in_order({"b", "a"}), in_order(frozenset({2, 1})), in_order(set())
    ("{'a', 'b'}", 'frozenset({1, 2})', 'set()')
    """
    if not value:
        return repr(value)
    items = "{" + ", ".join(sorted(map(show, value))) + "}"
    return items if type(value) is set else f"{type(value).__name__}({items})"


def is_int(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number; a bool is none."""
    return is_metric(value) and abs(value) < math.inf


def is_metric(value: object) -> TypeGuard[float]:
    """Return whether a value is a number that a training may report, infinities and NaN included; a bool is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_text(value: object) -> TypeGuard[str]:
    """Return whether a value is a text that files and other processes can be given: in UTF-8, and without NUL bytes."""
    try:
        return isinstance(value, str) and "\0" not in value and bool(value.encode() or True)
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def check_int(name: str, value: object, at_least: int, optional: bool = False, at_most: float = math.inf) -> None:
    """Refuse what is no integer from `at_least` to `at_most`; where it is `optional`, None will do."""
    holds = (optional and value is None) or (is_int(value) and at_least <= value <= at_most)
    bound = f">= {at_least}" if at_most == math.inf else f"from {at_least} to {at_most}"
    require(holds, name, value, f"{'None or ' if optional else ''}an integer {bound}")


def check_number(name: str, value: object, above: float | None = None) -> None:
    """Refuse what is no number >= 0, or, where it is given, no number > `above`."""
    holds = is_metric(value) and (value >= 0 if above is None else value > above)
    require(holds, name, value, "a number >= 0" if above is None else f"a number > {above:g}")


def check_is(name: str, value: object, kind: type, several: bool = False) -> None:
    """Refuse what is no object of a class, or, of `several`, no list or tuple of them."""
    if several:
        require(isinstance(value, list | tuple), name, value, f"a list of {kind.__name__}s")
        assert isinstance(value, list | tuple)
        for i, item in enumerate(value):
            check_is(f"{name}[{i}]", item, kind)
    else:
        require(isinstance(value, kind), name, value, f"of the class {kind.__name__}")


def check_path(name: str, value: object) -> None:
    """Refuse what is no path."""
    holds = isinstance(value, str | PathLike) and isinstance(os.fspath(value), str) and "\0" not in str(value)
    require(holds and len(str(value)) < 4096, name, value, "a path")


def check_flag(name: str, value: object) -> None:
    """Refuse what is neither True nor False."""
    require(isinstance(value, bool), name, value, "True or False")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Refuse what is none of some words."""
    require(isinstance(value, str) and value in choices, name, value, f"one of {tuple(choices)}")


def check_text(name: str, value: object, optional: bool = False) -> None:
    """Refuse what is no text, or an empty one; where it is `optional`, None will do."""
    holds = (optional and value is None) or (isinstance(value, str) and bool(value))
    require(holds, name, value, f"{'None or ' if optional else ''}a text")


def check_function(name: str, value: object, *counts: int, rule: str, or_class: bool = False) -> None:
    """Refuse what cannot be called with so many arguments, or with so many others; and classes, unless they will do."""
    holds = callable(value) and (or_class or not isinstance(value, type))
    try:
        signature = inspect.signature(value)  # type: ignore[arg-type]
        holds = holds and any(binds(signature, count) for count in counts)
    except TypeError:
        holds = False
    except ValueError:  # what is written in C need not have one
        holds = holds and not isinstance(value, type)
    require(holds, name, value, rule)


def binds(signature: inspect.Signature, count: int) -> bool:
    """Return whether a function takes so many arguments."""
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def check_folder(name: str, value: object) -> Path:
    """The absolute path of a folder that is there or can be made; ValueError for all else, as a store's address."""
    rule = "the path of a folder that is there, or can be made"
    check_path(name, value)
    store = "a folder, such as one at which the store is mounted (on each node of a cluster), not a store's address"
    require("://" not in str(value), name, value, store)
    require(str(value) != "", name, value, rule)
    try:
        folder = Path(value).expanduser().absolute()  # type: ignore[arg-type]
        there = next(path for path in (folder, *folder.parents) if path.exists())
        require(there.is_dir() and (there == folder or os.access(there, os.W_OK)), name, value, rule)
    except (OSError, RuntimeError) as error:  # a name that is too long; the home of nobody
        told = getattr(error, "strerror", None) or error
        raise ValueError(f"`{name}` is {_shown.repr(value)}, but must be {rule} ({told})") from None
    return folder


def check_name(name: str, value: object) -> None:
    """Refuse what cannot be the name of a folder."""
    holds = is_text(value) and value not in ("", ".", "..") and not {"/", os.sep} & {*value}
    require(holds and len(str(value).encode()) <= 255, name, value, "a folder's name of at most 255 bytes")


def check_mode(mode: object) -> None:
    """Refuse what is neither "min" nor "max"."""
    require(isinstance(mode, str) and mode in ("min", "max"), "mode", mode, "'min' or 'max'")
