"""Every backend keeps the contract."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydro_rasda import LocalBackend, RayBackend
from hydro_rasda.testing import Check, backend_checks
from hydro_rasda.testing.backends import check_failures, check_groups

each_check = pytest.mark.parametrize("check", backend_checks(), ids=lambda check: check.__name__)
quick_first = pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, marks=[] if check in (check_groups, check_failures) else pytest.mark.slow)
        for check in backend_checks()
    ],
    ids=lambda check: check.__name__,
)
"""Those that `make test` has show that such devices train, and that a failure is its trial's alone."""


@each_check
def test_one_device_of_this_machine(check: Check, tmp_path: Path) -> None:
    check(lambda: LocalBackend(["cpu"]), tmp_path)


@quick_first
def test_two_devices_of_this_machine(one_process: None, check: Check, tmp_path: Path) -> None:
    check(lambda: LocalBackend(["cpu", "cpu"]), tmp_path)


@pytest.mark.slow
@each_check
def test_two_devices_on_ray(ray8: None, one_process: None, check: Check, tmp_path: Path) -> None:
    check(lambda: RayBackend(resources_per_worker={"CPU": 4}), tmp_path)


@pytest.mark.parametrize("check", [check_groups, pytest.param(check_failures, marks=pytest.mark.slow)])
def test_two_devices_on_ray_with_one_cpu_each(ray2: None, one_process: None, check: Check, tmp_path: Path) -> None:
    check(lambda: RayBackend(resources_per_worker={"CPU": 1}), tmp_path)
