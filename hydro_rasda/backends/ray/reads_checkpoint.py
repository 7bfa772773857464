"""Whether a training function of Ray Tune's seems to go on from its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

_NAME = "get_checkpoint"
_MOST = 1000
_LIBRARIES = ("ray.", "torch.")
"""Of their functions, only closures are followed: Ray wraps a training function in one."""


@cache
def reads_checkpoint(cls: type) -> bool:
    """Whether the function of a trainable class, or one that it could call, names `get_checkpoint`.

    Functions are followed through closures, globals and attributes of modules. Where none is found, or too many are,
    the answer is yes.
    """
    found: set[FunctionType] = set()
    waiting = [*_functions(vars(cls).get("_trainable_func"))]
    users = 0
    while waiting:
        function = waiting.pop()
        if function in found:
            continue
        found.add(function)
        users += not _of_a_library(function)
        if len(found) > _MOST or (not _of_a_library(function) and _NAME in _names(function.__code__)):
            return True
        waiting += [called for thing in _reached(function) for called in _functions(thing)]
    return not users


def _names(code: CodeType) -> set[str]:
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)


def _reached(function: FunctionType) -> Iterator[Any]:
    """What a function refers to."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
    if _of_a_library(function):
        return
    names = _names(function.__code__)
    for thing in [function.__globals__[name] for name in names & function.__globals__.keys()]:
        yield thing
        if isinstance(thing, ModuleType):
            yield from (vars(thing)[name] for name in names & vars(thing).keys())


def _functions(thing: Any) -> Iterator[FunctionType]:
    """The functions of what may be one, a partial one, a method, a class or an object that can be called."""
    thing = thing.func if isinstance(thing, partial) else thing
    thing = thing.__func__ if isinstance(thing, MethodType) else thing
    if isinstance(thing, FunctionType):
        yield thing
        return
    cls = thing if isinstance(thing, type) else type(thing)
    if not _of_a_library(cls):
        yield from (member for member in vars(cls).values() if isinstance(member, FunctionType))


def _of_a_library(thing: type | FunctionType) -> bool:
    return f"{thing.__module__}.".startswith(_LIBRARIES)
