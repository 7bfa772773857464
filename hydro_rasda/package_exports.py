"""The public names of a package: imported when first used, shown readably by `help()`, and not another package's.

Every worker process of a cluster imports these packages: each pays only for what it uses.

`fusion` and `surrogate` are names that others have on the package index, and a script may have a file of such a name
beside it. Python then imports whichever it finds first, which would end in an error about a name that is missing.
"""

from __future__ import annotations

import ast
import gc
import importlib
import inspect
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, TypeVar

Exports = tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]


def lazy_exports(package: str) -> Exports:
    """Make a package's `__all__`, `__getattr__` and `__dir__` (PEP 562) of the imports that it has for type checkers.

    `__getattr__` also imports the package's modules: `hydro_rasda.plots` works after `import hydro_rasda` alone.

    Args:
        package: Its name. Its source has an `if TYPE_CHECKING:` with `from module import name as name`, and no other
            list of its public names.
    """
    namespace, homes = vars(sys.modules[package]), _homes(package)

    def get(name: str) -> Any:
        if name in homes:
            namespace[name] = value = getattr(_imported(homes[name]), name)
            return value
        if not name.startswith("_") and find_spec(f"{package}.{name}") is not None:
            return _imported(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return sorted(homes), get, lambda: sorted({*namespace, *homes})


def _homes(package: str) -> dict[str, str]:
    """The module of each name that a package's source imports for type checkers."""
    spec = sys.modules[package].__spec__
    source = spec.loader.get_source(package) if spec else None  # type: ignore[union-attr]
    if source is None:
        raise ImportError(f"`{package}` is installed without its sources, but needs them: install hydro-rasda again")
    guarded = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    imports = [node for block in guarded for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


def _imported(module: str) -> ModuleType:
    """Import a module without passes of the garbage collector: they walk over all of torch, and imports leave no
    garbage."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        if not gc.get_freeze_count():
            # Else the collector would soon pass over all of them, as it does over young objects.
            gc.freeze()
            gc.unfreeze()
        if collects:
            gc.enable()


F = TypeVar("F", bound=Callable[..., object])


class _Written(str):
    """Text that is shown without quotes."""

    def __repr__(self) -> str:
        return str(self)


class _Wrapped(inspect.Signature):
    """A signature whose text has a line for each argument."""

    def __str__(self) -> str:
        shown: list[str] = []
        for parameter in self.parameters.values():
            if parameter.kind is parameter.KEYWORD_ONLY and "*" not in shown:
                shown.append("*")
            shown.append(str(parameter))
        returns = "" if self.return_annotation is self.empty else f" -> {self.return_annotation}"
        return "(\n" + "".join(f"    {line},\n" for line in shown) + f"){returns}"


def readable(function: F) -> F:
    """Give a function with many arguments a signature that reads as its source does.

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
    parameters = [p.replace(annotation=_Written(p.annotation)) for p in signature.parameters.values()]
    written = _Wrapped(parameters, return_annotation=_Written(signature.return_annotation))
    function.__signature__ = written  # type: ignore[attr-defined]
    return function


DISTRIBUTION = "hydro-rasda"
"""Stands in the `__init__.py` of each of the packages."""


def refuse_other_packages(*names: str) -> None:
    """Refuse packages of these names that are others than ours; nothing of them runs.

    The ImportError names the file that Python finds, its distribution if one is known, and what to do.
    """
    for name in names:
        try:
            spec = find_spec(name)
        except ValueError:  # a module that was put into `sys.modules` by hand
            spec = None
        if spec is None or not _is_ours(spec):
            raise ImportError(_told(name, spec), name=name, path=None if spec is None else spec.origin)


def _is_ours(spec: ModuleSpec) -> bool:
    get_source = getattr(spec.loader, "get_source", lambda name: None)
    source = get_source(spec.name)
    # A package that is shipped without its sources cannot be asked.
    return spec.submodule_search_locations is not None if source is None else DISTRIBUTION in source


def _told(name: str, spec: ModuleSpec | None) -> str:
    from importlib.metadata import packages_distributions, version

    again = f"install {DISTRIBUTION} again, with pip's options --force-reinstall --no-deps"
    if spec is None:
        return f"hydro_rasda comes with a package `{name}`, which Python does not find: {again}"
    where = spec.origin or ", ".join(spec.submodule_search_locations or ())
    others = [found for found in packages_distributions().get(name, ()) if found != DISTRIBUTION]
    told = f"hydro_rasda comes with a package `{name}`, but Python finds another one of this name: {where}"
    if others:
        told += f" (of {', '.join(f'{other} {version(other)}' for other in others)})"
    uninstall = f"If you do not need that, run `pip uninstall {' '.join(others or [name])}` and {again}"
    return f"{told}. {uninstall}. If you do, use an environment of its own for each. If the file is yours, rename it."
