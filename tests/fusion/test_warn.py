"""A warning names the line outside the library from which it was called."""

import contextlib
import types
from collections.abc import Callable, Iterator

import pytest

import fusion.warn


def called_within(package: str, depth: int) -> Callable[[], None]:
    """`warn` called below so many functions of a module of a package."""
    module = types.ModuleType(f"{package}.deep")
    vars(module).update(warn=fusion.warn.warn, contextmanager=contextlib.contextmanager, Iterator=Iterator)
    exec(
        "def go(depth):\n"
        "    with within():\n"
        "        warn('late') if depth == 0 else go(depth - 1)\n"
        "@contextmanager\n"
        "def within():\n"
        "    yield\n"
        "@contextmanager\n"
        "def on_entry():\n"
        "    warn('early')\n"
        "    yield\n",
        vars(module),
    )
    return lambda: module.go(depth)


@pytest.mark.parametrize("package", ["fusion", "surrogate", "hydro_rasda"])
@pytest.mark.parametrize("depth", [0, 1, 5])
def test_any_depth(package: str, depth: int) -> None:
    with pytest.warns(UserWarning, match="late") as told:
        called_within(package, depth)()
    assert [warning.filename for warning in told] == [__file__]
