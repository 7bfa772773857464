"""The content of a value, as text that is the same in every process.

For a function, the byte code, defaults and closures count. So do the user's functions, classes and constants that it
names, at any depth. Comments and line numbers do not count. Code of the standard library or of an installed package
counts by name and version. Very large tensors are sampled.
"""

from __future__ import annotations

import dis
import hashlib
import inspect
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusion.streams import preserved_generators, seed_generators
from fusion.structure.functions_and_classes import code_digest
from hydro_rasda.data import Data

BYTES = 32 * 2**20
"""Largest number of bytes of a tensor that count. In a larger tensor, evenly spaced rows of this total size count."""

_LENGTH = 4096
_NODES = 50_000
_DEPTH = 60
_OWN = ("hydro_rasda", "fusion", "surrogate")
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.layout)
_INCIDENTAL = {
    *("__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__annotations__", "__annotate_func__"),
    *("__firstlineno__", "__static_attributes__", "__slotnames__", "__abstractmethods__", "_abc_impl"),
}

Content = dict[str, str]
"""Content of a value: maps each path within the value to a short text. The texts of equal values are equal."""


def content(value: Any) -> Content:
    """Collect all parts of a value that determine its behavior.

    The content leaves out memory addresses, the order of sets and dicts, hashes that an object keeps, devices,
    environment variables, and the state of random generators.
    """
    walk = _Walk()
    walk.follow("", value, 0)
    return walk.found


def unchanged(before: Content, after: Content) -> Content:
    """Return the content that is the same before and after calls. So a function's counters and caches do not count."""
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    return {path: words for path, words in before.items() if changed.isdisjoint(_up(path))}


def _up(path: str) -> Iterator[str]:
    """Yield a path within a value, and the paths of all parts of the value that contain it."""
    yield path
    while path:
        path = path.rpartition("/")[0]
        yield path


def digest(found: Content) -> str:
    """Return a short digest of content, which is equal for equal content."""
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()[:16]


class _Walk:
    """The content of a value, as far as it has been collected."""

    def __init__(self, above: Iterable[int] = ()) -> None:
        self.found: Content = {}
        self._above = [*above]  # the ids of the values that contain the value at hand
        self._seen: dict[int, str] = {}
        self._alive: list[Any] = []  # keeps values alive, so that no new object gets the address of an earlier one

    def follow(self, path: str, value: Any, depth: int) -> None:
        if not isinstance(value, _PLAIN):
            if id(value) in self._seen:
                self.found[path] = f"that of {self._seen[id(value)]}"
                return
            if id(value) in self._above:
                self.found[path] = "one that this is a part of"
                return
            self._seen[id(value)] = path
            self._alive.append(value)
        self._above.append(id(value))
        words, parts = _taken_apart(value, self._without_order)
        self.found[path] = words
        if depth < _DEPTH and len(self._alive) < _NODES:
            for name, part in parts:
                self.follow(f"{path}/{name}", part, depth + 1)
        self._above.pop()

    def _without_order(self, value: Any) -> str:
        """Return the digest of an item that has no position: an item of a set, or a key of a dict."""
        walk = _Walk(self._above)
        walk.follow("", value, len(self._above))
        return digest(walk.found)


Parts = Iterable[tuple[str, Any]]


def _taken_apart(value: Any, digest_of: Callable[[Any], str]) -> tuple[str, Parts]:
    """Return a short description of a value without its parts, and the parts."""
    kind = type(value).__name__
    if isinstance(value, _PLAIN):
        # The `repr` of a secret hides its text, but here the text counts.
        text = str.__repr__(value) if isinstance(value, str) else repr(value)
        return f"{kind} {text}", ()
    if isinstance(value, (Tensor, np.ndarray)):
        return _array(value)
    if isinstance(value, (torch.device, type(os.environ), *_GENERATORS)):
        return kind, ()
    if type(value) in (list, tuple):
        return f"{kind} of {len(value)}", ((str(i), value[i]) for i in spread_indices(len(value), _LENGTH))
    if isinstance(value, Mapping) and type(value).__module__ in ("builtins", "collections"):
        return f"{kind} of {len(value)}", _items(value, digest_of)
    if isinstance(value, (set, frozenset)):
        return f"{kind} {sorted(map(digest_of, value))}", ()
    if isinstance(value, ModuleType):
        return f"module {value.__name__} {_version(value.__name__)}", ()
    if isinstance(value, type):
        if (package := _version(value.__module__)) is not None:
            return f"class {package} {value.__module__}.{value.__qualname__}", ()
        own = {name: part for name, part in vars(value).items() if name not in _INCIDENTAL}
        return "class", [("bases", value.__bases__), *sorted(own.items())]
    if isinstance(value, FunctionType):
        return _function(value)
    if isinstance(value, MethodType):
        return kind, (("self", value.__self__), ("function", value.__func__))
    if isinstance(value, (staticmethod, classmethod)):
        return kind, (("function", value.__func__),)
    if isinstance(value, property):
        return kind, (("get", value.fget), ("set", value.fset))
    if isinstance(value, BuiltinFunctionType) or inspect.isroutine(value) or inspect.isdatadescriptor(value):
        # For wrappers such as `lru_cache`, `cached_property` or Numba's, the wrapped function counts.
        wrapped = [(name, getattr(value, name)) for name in ("__wrapped__", "func") if hasattr(value, name)]
        return f"{kind} {getattr(value, '__qualname__', '')}", wrapped
    return _object(value)


def _array(value: Tensor | np.ndarray[Any, Any]) -> tuple[str, Parts]:
    shape = tuple(value.shape)
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return f"array {shape}", (("items", value.ravel().tolist()),)
    if isinstance(value, Tensor) and value.layout == torch.sparse_coo:
        value = value.detach().coalesce()
        return f"sparse {shape}", (("indices", value.indices()), ("values", value.values()))
    size = value.nbytes
    if size > BYTES and shape[0] > 1:
        value = value[spread_indices(shape[0], max(1, BYTES * shape[0] // size))]  # copies only these rows
    if isinstance(value, Tensor):
        try:
            flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
            raw: Any = flat.view(torch.uint8).numpy()
        except (RuntimeError, NotImplementedError):  # sparse, quantized or meta tensors
            return f"{value.layout} {shape} {value.dtype}", ()
    else:
        raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    whole = hashlib.sha1(raw, usedforsecurity=False).hexdigest()
    return f"array {shape} {str(value.dtype).removeprefix('torch.')} {whole}", ()


def _items(mapping: Mapping[Any, Any], digest_of: Callable[[Any], str]) -> Parts:
    named = {repr(key) if isinstance(key, _PLAIN) else digest_of(key): item for key, item in mapping.items()}
    names = sorted(named)
    return [(names[i], named[names[i]]) for i in spread_indices(len(names), _LENGTH)]


def _function(function: FunctionType) -> tuple[str, Parts]:
    cells = [(name, _cell(cell)) for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ())]
    if (package := _version(function.__module__)) is not None:
        return f"function {package} {function.__module__}.{function.__qualname__}", cells
    code = function.__code__
    without_doc = code.replace(co_consts=tuple(c for c in code.co_consts if c is None or c != function.__doc__))
    parts = [("defaults", function.__defaults__), ("keyword defaults", function.__kwdefaults__)]
    return f"function {code_digest(without_doc).hex()}", [*parts, *cells, *_named(code, function.__globals__)]


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _named(code: CodeType, scope: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the globals that code names. For a user's module, yield the attributes that the code names."""
    names, attributes = _names(code)
    for name in sorted(names & scope.keys()):
        yield from _of_module(f"global {name}", scope[name], attributes, 0)


def _of_module(name: str, value: Any, attributes: set[str], depth: int) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, ModuleType) or _version(value.__name__) is not None or depth > 3:
        yield name, value
        return
    for attribute in sorted(attributes & vars(value).keys()):
        yield from _of_module(f"{name}.{attribute}", vars(value)[attribute], attributes, depth + 1)


def _names(code: CodeType) -> tuple[set[str], set[str]]:
    """Return the global names and the attributes that code reads, including nested functions."""
    names: set[str] = set()
    attributes: set[str] = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names.add(instruction.argval)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"):
            attributes.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner, inner_attributes = _names(constant)
            names |= inner
            attributes |= inner_attributes
    return names, attributes


def _object(value: Any) -> tuple[str, Parts]:
    """Describe an object for which `_taken_apart` has no case, by its class and the state that pickle would store."""
    cls = type(value)
    try:
        reduced = value.__reduce_ex__(2)
    except Exception:  # a user's `__reduce__` may raise anything
        reduced = (None, (), getattr(value, "__dict__", None))
    if isinstance(reduced, str):
        return f"object {reduced}", (("class", cls),)
    _, args, state, listed, mapped = (*reduced, None, None, None)[:5]
    parts = [
        ("class", cls),
        ("arguments", [arg for arg in args if arg is not cls]),
        ("state", _steady(cls, state)),
    ]
    parts += [("items", list(listed or ())), ("entries", dict(mapped or ()))]
    return "object", parts


def _steady(cls: type, state: Any) -> Any:
    """Return an object's state without the numbers that differ between processes.

    These are hashes of text, and memory addresses of its parts, which scikit-learn's vectorizers keep.
    """
    if not isinstance(state, dict):
        return state
    own: Any = cls.__hash__
    hashed, addresses = own not in (object.__hash__, None), {id(part) for part in state.values()}

    def differs(name: Any, part: Any) -> bool:
        # A small number is no hash but a setting, such as the number of hash functions.
        is_hash = hashed and str(name).endswith("hash") and type(part) is int and abs(part) >= 2**32
        return is_hash or (type(part) is int and part in addresses)

    return {name: part for name, part in state.items() if not differs(name, part)}


@lru_cache(maxsize=4096)
def _version(module: str | None) -> str | None:
    """Return name and version of a module's package; None if the module is the user's."""
    top = (module or "").partition(".")[0]
    if top in sys.stdlib_module_names or top in sys.builtin_module_names:
        return top
    package = sys.modules.get(top)
    file = getattr(sys.modules.get(module or ""), "__file__", None) or getattr(package, "__file__", None)
    installed = file is not None and not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
    return f"{top} {getattr(package, '__version__', '')}" if installed or top in _OWN else None


def spread_indices(length: int, count: int) -> Sequence[int]:
    """Return at most `count` indices at even distances; the first and last are included.

    >>> list(spread_indices(3, 5)), list(spread_indices(101, 5)), list(spread_indices(9, 2))
    ([0, 1, 2], [0, 25, 50, 75, 100], [0, 8])
    """
    if length <= count:
        return range(length)
    return [i * (length - 1) // max(1, count - 1) for i in range(count)]


ITEMS = 32
"""Number of examples of a data set that are read for its digest, at even distances."""


def are_tensors(data: Data) -> bool:
    """Tell whether data are tensors or arrays, which can be read without running the user's code."""
    return isinstance(data, (tuple, list)) and all(isinstance(t, (Tensor, np.ndarray)) for t in data)


def data_digest(data: Data, batch_size: int = 1) -> str:
    """Return a digest of a user's data: the bytes of tensors, some examples of a data set, a loader's first batch.

    Values that differ between two reads from the same seed are left out. A loader is asked for batches of `batch_size`.
    """
    if isinstance(data, (tuple, list)) and are_tensors(data):
        return digest(content(tuple(data)))
    read: Callable[[], Any]
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        length = len(data)
        own, read = content((type(data), length)), lambda: [data[i] for i in spread_indices(length, ITEMS)]
    else:
        assert callable(data)
        make_loader: Callable[[int], Iterable[Any]] = data
        own, read = content(data), lambda: next(iter(make_loader(batch_size)), None)
    with preserved_generators():
        once, again = (content(_seeded(read)) for _ in range(2))
    if isinstance(data, FunctionType):
        own = unchanged(own, content(data))
    return digest({**{f"own{path}": words for path, words in own.items()}, **unchanged(once, again)})


def _seeded(read: Callable[[], Any]) -> Any:
    seed_generators(0)
    return read()


def parameters(made: object) -> Content:
    """Return the content of a searcher or rule: its class and the arguments that it keeps, not what it has learned."""
    if made is None or isinstance(made, str):
        return content(made)
    cls = type(made)
    names = [name for name in inspect.signature(cls).parameters if name not in ("space", "metric", "mode")]
    found = {name: getattr(made, at) for name in names for at in (name, f"_{name}") if hasattr(made, at)}
    return content((cls, found))
