"""The public names of a package, each imported when it is first used: a process pays only for what it uses."""

from __future__ import annotations

import ast
import gc
import importlib
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

Exports = tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]


def lazy_exports(package: str) -> Exports:
    """Make a package's `__all__`, `__getattr__` and `__dir__` (PEP 562) of the imports that it has for type checkers.

    `__getattr__` also imports the modules of the package: `fusion.optim` works after `import fusion` alone.

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
