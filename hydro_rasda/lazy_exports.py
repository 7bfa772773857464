"""Public names of a package that are imported when they are first used.

Every worker process of a cluster imports these packages: each pays only for what it uses.
"""

from __future__ import annotations

import ast
import gc
import importlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from hydro_rasda.renames import refuse_name

Exports = tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]


def lazy_exports(package: str, moved: Mapping[str, str] | None = None) -> Exports:
    """Make a package's `__all__`, `__getattr__` and `__dir__` (PEP 562) of the imports that it has for type checkers.

    Args:
        package: Its name. Its source has an `if TYPE_CHECKING:` with `from module import name as name`, and no other
            list of its public names.
        moved: Names that it exported in earlier versions, each with its new place, relative to the package.
    """
    namespace, homes = vars(sys.modules[package]), _homes(package)

    def get(name: str) -> Any:
        if name in homes:
            namespace[name] = value = getattr(_imported(homes[name]), name)
            return value
        if moved and name in moved:
            refuse_name(package, name, moved[name])
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
        if collects:
            gc.enable()
