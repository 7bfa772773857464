"""Check that Python finds this library's packages `fusion` and `surrogate`, not others of the same names.

The package index has other packages of these names, and a script may lie beside a file `fusion.py`. Python imports the
first one that it finds. Without this check, users would see an error about a missing name, which does not tell the
cause.
"""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from importlib.util import find_spec

DISTRIBUTION = "hydro-rasda"
"""A text that the `__init__.py` of each of this library's packages contains."""


def refuse_other_packages(*names: str) -> None:
    """Raise ImportError if Python finds another package than ours under one of `names`. No code of that package runs.

    The error names the file that Python finds, its distribution if known, and what to do.
    """
    for name in names:
        try:
            spec = find_spec(name)
        except ValueError:  # raised for a module that code has put into `sys.modules` without a spec
            spec = None
        if spec is None or not _is_ours(spec):
            raise ImportError(_told(name, spec), name=name, path=None if spec is None else spec.origin)


def _is_ours(spec: ModuleSpec) -> bool:
    if spec.origin is None:  # a folder without `__init__.py`
        return False
    get_source = getattr(spec.loader, "get_source", lambda name: None)
    source = get_source(spec.name)
    # A package that is shipped without its sources cannot be checked, so it is accepted.
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
