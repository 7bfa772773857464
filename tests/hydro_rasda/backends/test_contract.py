"""Every backend keeps the contract."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydro_rasda import LocalBackend, RayBackend
from hydro_rasda.testing import Check, backend_checks

each_check = pytest.mark.parametrize("check", backend_checks(), ids=lambda check: check.__name__)


@each_check
def test_one_device_of_this_machine(check: Check, tmp_path: Path) -> None:
    check(lambda: LocalBackend(["cpu"]), tmp_path)


@pytest.mark.slow
@each_check
def test_two_devices_of_this_machine(one_process: None, check: Check, tmp_path: Path) -> None:
    check(lambda: LocalBackend(["cpu", "cpu"]), tmp_path)


@pytest.mark.slow
@each_check
def test_two_devices_on_ray(ray8: None, one_process: None, check: Check, tmp_path: Path) -> None:
    check(lambda: RayBackend(resources_per_worker={"CPU": 4}), tmp_path)
