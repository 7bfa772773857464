"""Call functions with malformed values, and check that the functions refuse these values with a clear error."""

from __future__ import annotations

import itertools
import math
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

Right = Callable[[Any], bool]
"""Tells whether a call should accept a value."""

VALUES: Mapping[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "False": lambda: False,
    "0": lambda: 0,
    "1": lambda: 1,
    "-1": lambda: -1,
    "2": lambda: 2,
    "10**30": lambda: 10**30,
    "0.5": lambda: 0.5,
    "1.5": lambda: 1.5,
    "-0.5": lambda: -0.5,
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "-inf": lambda: -math.inf,
    "1j": lambda: 1j,
    "float64(0.5)": lambda: np.float64(0.5),
    "''": lambda: "",
    "'no'": lambda: "no",
    "'0.1'": lambda: "0.1",
    "long text": lambda: "x" * 100_000,
    "text with NUL": lambda: "a\0b",
    "address": lambda: "s3://bucket/x?region=nowhere&scheme=http&endpoint_override=127.0.0.1:9",
    "bytes": lambda: b"x",
    "path": lambda: Path("a/b"),
    "[]": lambda: [],
    "['a']": lambda: ["a"],
    "[nan]": lambda: [math.nan],
    "[None, None]": lambda: [None, None],
    "()": lambda: (),
    "{}": dict,
    "{'a': 1}": lambda: {"a": 1},
    "{1: 2}": lambda: {1: 2},
    "set": lambda: {1, 2},
    "endless": lambda: itertools.count(),
    "array": lambda: np.zeros((2, 2)),
    "tensor": lambda: torch.zeros(3),
    "type": lambda: int,
    "function of nothing": lambda: lambda: None,
    "object": object,
}

SECONDS = 5.0
"""CPU seconds of this process after which a call counts as hanging."""


class Reached(BaseException):
    """Raised once all arguments are accepted, in place of the work of the call."""


def begin(*args: Any, **kwargs: Any) -> Any:
    """Stand in for a user's function, which is called once all arguments are accepted."""
    raise Reached


def faults(call: Callable[[Any], object], argument: str, right: Right) -> list[str]:
    """Return a line for each of `VALUES` that a call does not accept or refuse as it should.

    Args:
        call: A function of one argument, the value.
        argument: The argument's name, which error messages must contain; or several names, separated by "|".
        right: Tells which values the call should accept. It should refuse all others.
    """
    found = []
    for label, make in VALUES.items():
        wanted = "taken" if right(make()) else "refused"
        if (outcome := _outcome(call, make(), argument)) != wanted:
            found.append(f"{argument}={label} should be {wanted}: {outcome}")
    return found


def _outcome(call: Callable[[Any], object], value: Any, argument: str) -> str:
    try:
        with _bounded():
            call(value)
    except Reached:
        return "taken"
    except (ValueError, IndexError, FileNotFoundError) as error:
        named = any(f"{before}{name}" in str(error) for name in argument.split("|") for before in ("`", "`len(", "."))
        return "refused" if named and len(str(error)) < 2000 else f"{type(error).__name__}: {str(error)[:200]}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return "taken"


@contextmanager
def _bounded() -> Iterator[None]:
    def end(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def nothing(value: Any) -> bool:
    return False


def flag(value: Any) -> bool:
    return isinstance(value, bool)


def number(least: float = -math.inf, most: float = math.inf, *, open_: bool = False) -> Right:
    """Accept finite numbers from `least` to `most`, ends included; if `open_` is True, ends excluded."""

    def right(value: Any) -> bool:
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            return False
        return least < value < most if open_ else least <= value <= most

    return right


def integer(least: int, most: float = math.inf) -> Right:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def instance(*kinds: type) -> Right:
    return lambda value: isinstance(value, kinds) and not isinstance(value, type)


def one_of(*values: Any) -> Right:
    return lambda value: any(value is known or (type(value) is type(known) and value == known) for known in values)


def either(*rights: Right) -> Right:
    return lambda value: any(right(value) for right in rights)


def empty_mapping(value: Any) -> bool:
    return isinstance(value, dict) and not value
