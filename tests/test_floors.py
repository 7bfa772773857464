"""Test that imports go downward only: no module imports from a higher floor, not even for annotations."""

from __future__ import annotations

import ast
import graphlib
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

FLOORS = (
    {"common"},
    {"data", "schedulers"},
    {"settings"},
    {"history", "problem", "space"},
    {"run"},
    {"contracts", "packing", "processes", "records", "simulator"},
    {"loggers", "plots", "training"},
    {"backends", "heats", "results"},
    {"bubbles", "cli", "dry_run", "testing"},
    {"tuner"},
    {"integrations"},
)
"""The folders and modules ("rooms") of hydro_rasda by floor, the lowest first. They import from lower floors only."""

LOOSE = {"contracts", "loggers", "tuner"}
"""Rooms that are one module: the interface of plug-ins, callbacks for users, and `tune` itself."""

USES = {
    "packing": {"common", "history", "run", "schedulers"},
    "simulator": {"common", "history", "run", "schedulers", "settings"},
}
"""Maps rooms that are independent of the tuner to the only rooms that they may import."""

USERS = {"packing": {"backends"}, "simulator": {"cli"}}
"""Maps rooms that are independent of the tuner to the only rooms that may import them."""

FACADES = {"hydro_rasda"}
"""Modules of public names. They may import from all rooms, and no room may import them."""

FUSION = (
    {"argument_checks", "lazy_names", "streams", "warn"},
    {"keys", "structure"},
    {"evaluate"},
    {"members"},
    {"check", "optim"},
    {"graph"},
    {"width"},
)
"""The rooms of fusion by floor, the lowest first. The first floor has all modules outside of folders; only these may
import from their own floor."""

IMPURE = {"fusion", "os", "pathlib", "random", "ray", "surrogate", "time", "torch"}
"""Modules that the rules in `schedulers` must not import."""


def modules(package: str) -> dict[str, Path]:
    """Map the full name of each module of a package to its path."""
    found = {}
    for path in (ROOT / package).rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path) -> Iterator[str]:
    """Yield the full names of everything that a file imports, also in functions and for type checking."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import, line {node.lineno}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(name: str) -> str:
    """Return the room of a full name. For a public name of the facade, return this name; for the facade itself, ""."""
    return name.partition(".")[2].partition(".")[0]


HEIGHTS = {name: height for height, rooms in enumerate(FLOORS) for name in rooms}


def allowed(user: str, used: str) -> bool:
    """Tell whether a room may import another. No room may import public names from the facade."""
    if user == used:
        return True
    apart = used in USES.get(user, {used}) and user in USERS.get(used, {user})
    return apart and HEIGHTS.get(used, math.inf) < HEIGHTS[user]


def test_every_room_has_its_floor() -> None:
    rooms = {room(name) for name in modules("hydro_rasda") if name not in FACADES}
    assert rooms == HEIGHTS.keys()
    assert {path.stem for path in (ROOT / "hydro_rasda").glob("*.py")} - {"__init__"} == LOOSE


def test_contributing_tells_what_each_room_is_for() -> None:
    rows = (ROOT / "CONTRIBUTING.md").read_text().partition("| room |")[2].partition("\n- **")[0]
    told = re.findall(r"\| `(\w+)/(\w+)(?:/|\.py)` \|", rows)
    own = [name for package, name in told if package == "hydro_rasda"]
    assert sorted(own) == sorted(HEIGHTS)
    assert own == sorted(own, key=HEIGHTS.__getitem__), "the table begins at the bottom"
    fusion = {path.parent.name for path in (ROOT / "fusion").glob("*/__init__.py")}
    assert {name for package, name in told if package == "fusion"} == fusion


@pytest.mark.parametrize("package", ["fusion", "surrogate"])
def test_packages_for_everyone_know_no_tuner(package: str) -> None:
    others = {"fusion", "surrogate", "hydro_rasda", "ray"} - {package}
    found = [
        f"{name} imports {used}"
        for name, path in modules(package).items()
        for used in imports(path)
        if used.split(".")[0] in others
    ]
    assert not found


def test_arrows_run_downward() -> None:
    found = [
        f"{name} imports {used}"
        for name, path in modules("hydro_rasda").items()
        if name not in FACADES
        for used in imports(path)
        if used.split(".")[0] == "hydro_rasda" and not allowed(room(name), room(used))
    ]
    assert not found


def test_arrows_of_fusion_run_downward() -> None:
    height = {name: floor for floor, rooms in enumerate(FUSION) for name in rooms}
    known = {name: path for name, path in modules("fusion").items() if name != "fusion"}
    assert {room(name) for name in known} == height.keys()
    assert sum("." not in name.partition(".")[2] and path.name != "__init__.py" for name, path in known.items()) <= 4
    found = [
        f"{name} imports {used}"
        for name, path in known.items()
        for used in imports(path)
        if used.startswith("fusion.")
        and room(used) != room(name)
        and not 0 <= height.get(room(used), math.inf) < max(1, height[room(name)])
    ]
    assert not found


@pytest.mark.parametrize("package", ["fusion", "surrogate", "hydro_rasda"])
def test_no_two_modules_know_each_other(package: str) -> None:
    known = modules(package)
    parts = {name: path for name, path in known.items() if path.name != "__init__.py"}
    graph = {name: {part for used in imports(path) for part in owner(used, parts)} for name, path in parts.items()}
    graphlib.TopologicalSorter(graph).prepare()


def owner(used: str, parts: Mapping[str, Path]) -> set[str]:
    """Return the module from which a full name is imported: the name is a module, or a name in a module."""
    return {name for name in (used, used.rpartition(".")[0]) if name in parts}


def test_decisions_are_pure() -> None:
    found = [
        f"{name} imports {used}"
        for name, path in modules("hydro_rasda").items()
        if room(name) == "schedulers"
        for used in imports(path)
        if used.split(".")[0] in IMPURE
    ]
    assert not found


def test_an_arrow_upward_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from hydro_rasda.heats.sweep import sweep\n"
        "def f():\n    import hydro_rasda.tuner\n"
    )
    assert [*imports(file)][1:] == ["hydro_rasda.heats.sweep.sweep", "hydro_rasda.tuner"]
    assert room("hydro_rasda.run.run_folder.Store") == "run"
    assert not allowed("problem", room("hydro_rasda"))
    assert not allowed("problem", room("hydro_rasda.TuneResult"))
    assert not allowed("backends", "heats")
    assert not allowed("run", "tuner")
    assert not allowed("training", "simulator")
    assert not allowed("simulator", "data")
    assert allowed("heats", "training")
