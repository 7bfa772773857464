"""Print warnings for users of `tune`: one line each, without source code, after the run is announced."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


@contextlib.contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Within the context, print warnings without the line of source code. A user's own format is kept."""
    before = warnings.formatwarning
    if before.__module__ not in ("warnings", "_py_warnings"):
        yield
        return
    warnings.formatwarning = _in_one_line
    try:
        yield
    finally:
        if warnings.formatwarning is _in_one_line:
            warnings.formatwarning = before


def warns_in_one_line(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that passes `progress` on to `tune`, so that it prints warnings as `tune` does."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with warnings_in_one_line() if kwargs.get("progress", True) else contextlib.nullcontext():
            return function(*args, **kwargs)

    return called


def _in_one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    # Name the line of code, but not for a UserWarning: it is about arguments, and the line is one of the library's.
    where = "" if issubclass(category, UserWarning) else f" ({category.__name__}, {filename}:{lineno})"
    return f"warning: {message}{where}\n"


class HeldBack:
    """Warnings that are held back, so that the first lines on the screen are not warnings."""

    def __init__(self) -> None:
        self._caught: list[warnings.WarningMessage] = []

    @contextlib.contextmanager
    def catching(self) -> Iterator[None]:
        """Within the context, collect warnings instead of printing them."""
        with warnings.catch_warnings(record=True) as caught:
            try:
                yield
            finally:
                self._caught += caught

    def give(self) -> None:
        """Issue now the warnings that were held back, subject to the user's filters."""
        caught, self._caught = self._caught, []
        for one in caught:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno, source=one.source)

    def __enter__(self) -> HeldBack:
        return self

    def __exit__(self, *_: object) -> None:
        self.give()
