"""Public names of a package that are imported when they are first used.

Every worker process of a cluster imports these packages: each pays only for what it uses.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any


def lazy_exports(package: dict[str, Any], homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Make a package's `__getattr__` (PEP 562).

    Args:
        package: `globals()` of the package's `__init__`.
        homes: Names by the submodule that defines them, relative to the package.
    """

    def get(name: str) -> Any:
        home = next((home for home, names in homes.items() if name in names), None)
        if home is None:
            raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")
        value = getattr(_imported(f"{package['__name__']}.{home}"), name)
        package[name] = value
        return value

    return get


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
