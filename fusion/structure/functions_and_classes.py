"""Description of functions and classes by plain values: by name if the name leads to them, else by their parts."""

from __future__ import annotations

import functools
import hashlib
import sys
import types
from collections.abc import Iterator
from typing import Any

# Entries of a class that do not affect its computation: names, annotations, bookkeeping of dataclasses and ABCs.
CLASS_NOTES = {"__module__", "__qualname__", "__dict__", "__weakref__", "__annotations__", "_abc_impl"}
CLASS_NOTES |= {"__dataclass_fields__", "__dataclass_params__", "__match_args__", "__orig_bases__", "__parameters__"}
CLASS_NOTES |= {
    "__firstlineno__",
    "__static_attributes__",
    "__annotate__",
    "__annotate_func__",
    "__annotations_cache__",
}

BUILTINS = (
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
WRAPPERS = (property, staticmethod, classmethod, functools.cached_property, functools._lru_cache_wrapper)


def name_of(thing: Any) -> str:
    """Return the module and name of a class or function."""
    return f"{getattr(thing, '__module__', None)}.{getattr(thing, '__qualname__', '')}"


def found_by_name(thing: Any) -> bool:
    """Return whether a class or function is found under its name in its module, so that all users share one object."""
    found: Any = sys.modules.get(getattr(thing, "__module__", None) or "")
    for part in getattr(thing, "__qualname__", "").split("."):
        found = getattr(found, part, None)
    return found is thing


def wrapped(wrapper: Any) -> list[Any]:
    """Return the functions that a property, static method or other wrapper calls, and a cache's settings."""
    if isinstance(wrapper, property):
        return [wrapper.fget, wrapper.fset, wrapper.fdel]
    if isinstance(wrapper, functools.cached_property):
        return [wrapper.func]
    if isinstance(wrapper, functools._lru_cache_wrapper):
        return [wrapper.__wrapped__, wrapper.cache_parameters()]
    return [wrapper.__func__]


def captured(function: types.FunctionType) -> Iterator[Any]:
    """Yield a function's code, defaults and closure. Together with arguments and globals, they determine its result."""
    yield code_digest(function.__code__)
    yield function.__defaults__
    yield tuple((function.__kwdefaults__ or {}).items())
    for cell in function.__closure__ or ():
        # Do not read an empty cell, because that would raise an error.
        yield cell.cell_contents if cell != types.CellType() else ("empty",)


def own_globals(function: types.FunctionType) -> dict[str, Any]:
    """Return the globals that a function reads; {} if they are the globals of a module, which its users share."""
    space = function.__globals__
    module = sys.modules.get(space.get("__name__", ""))
    if getattr(module, "__dict__", None) is space:
        return {}
    return {name: space[name] for name in sorted(_names(function.__code__)) if name in space}


def code_digest(code: types.CodeType) -> bytes:
    """Return a digest of a function's code, including inner functions. File and line do not affect it."""
    signature = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    constants = [_steady(constant) for constant in code.co_consts]
    table = getattr(code, "co_exceptiontable", b"")
    return hashlib.sha256(repr((code.co_code, signature, names, constants, table)).encode()).digest()


def _names(code: types.CodeType) -> set[str]:
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inner)


def _steady(constant: Any) -> str:
    """Return a text that describes a constant. Unlike the order of a set, it is the same in every process."""
    if isinstance(constant, types.CodeType):
        return code_digest(constant).hex()
    if isinstance(constant, frozenset):
        return f"frozenset({sorted(map(_steady, constant))})"
    if isinstance(constant, tuple):
        return f"({', '.join(map(_steady, constant))})"
    return repr(constant)
