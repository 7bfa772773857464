"""Lazy public names of a package: each is imported when it is first used, so that unused modules cost nothing."""

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
    """Make `__all__`, `__getattr__` and `__dir__` (PEP 562) of a package from its imports for type checkers.

    `__getattr__` also imports modules of the package: `fusion.optim` works after `import fusion` alone.

    Args:
        package: Name of the package. Its source lists the public names only in an `if TYPE_CHECKING:` block, as
            `from module import name as name`.
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
    """Map each name that a package imports for type checkers to the module from which it is imported."""
    spec = sys.modules[package].__spec__
    source = spec.loader.get_source(package) if spec else None  # type: ignore[union-attr]
    if source is None:
        raise ImportError(f"`{package}` is installed without its sources, but needs them: install hydro-rasda again")
    guarded = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    imports = [node for block in guarded for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


def _imported(module: str) -> ModuleType:
    """Import a module while the garbage collector is off.

    The collector would visit all objects of torch again and again, although imports leave no garbage.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        if not gc.get_freeze_count():
            # Move the new objects to the oldest generation. Otherwise, the collector would soon visit all of them.
            gc.freeze()
            gc.unfreeze()
        if collects:
            gc.enable()
