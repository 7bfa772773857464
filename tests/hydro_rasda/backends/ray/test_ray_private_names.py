"""The installed Ray has each private name that is used, and no module but one uses any."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

import hydro_rasda
from hydro_rasda.backends.ray import ray_private_names
from hydro_rasda.backends.ray.ray_private_names import PRIVATE

ROOM = Path(hydro_rasda.__file__).parent
NAMES = {name for names in PRIVATE.values() for name in names}


@pytest.mark.parametrize("place", PRIVATE)
def test_ray_has_them(place: str) -> None:
    module, _, name = place.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    source = inspect.getsource(cls)
    for private, otherwise in PRIVATE[place].items():
        there = hasattr(cls, private) or re.search(rf"self\.{private}\b", source)
        assert there, f"{place}.{private}: {otherwise}"


def test_the_table_has_all_that_are_used() -> None:
    used = set(re.findall(r"(?:_controller|actors|groups)\.(_\w+)", inspect.getsource(ray_private_names)))
    used |= set(re.findall(r"self\.(_(?:request|pg|staging)_\w+)", inspect.getsource(ray_private_names.SettledGroups)))
    used |= set(re.findall(r'get\("(_\w+)"\)', inspect.getsource(ray_private_names)))
    assert used <= NAMES
    assert {"_staged_trials", "_request_to_staged_pgs", "_trainable_func"} <= used


def test_no_other_module_uses_one() -> None:
    elsewhere = [path for path in ROOM.rglob("*.py") if path != Path(ray_private_names.__file__)]
    found = {name for path in elsewhere for name in NAMES if re.search(rf"\b{name}\b", path.read_text())}
    assert found == {"_supports_buffered_results"}, "a scheduler says that of itself"
