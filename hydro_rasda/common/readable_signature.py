"""Make `help()` show a signature with many arguments in lines, one for each argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])


class _Unquoted(str):
    """A string whose `repr` has no quotes."""

    def __repr__(self) -> str:
        return str(self)


class _Wrapped(inspect.Signature):
    """A signature whose text has a line for each argument."""

    def __str__(self) -> str:
        parameters = [*self.parameters.values()]
        shown, kinds = [*map(str, parameters)], [parameter.kind for parameter in parameters]
        if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
            shown.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
        return "(\n" + "".join(f"    {line},\n" for line in shown) + f") -> {self.return_annotation}"


def readable(function: F) -> F:
    """Give a function a signature that `help()` shows as in its source, with a line for each argument.

    >>> @readable
    ... def add(first: int, *, second: int | None = None) -> int: ...
    >>> print(inspect.signature(add))
    (
        first: int,
        *,
        second: int | None = None,
    ) -> int
    """
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=_Unquoted(p.annotation)) for p in signature.parameters.values()]
    written = _Wrapped(parameters, return_annotation=_Unquoted(signature.return_annotation))
    function.__signature__ = written  # type: ignore[attr-defined]
    return function
