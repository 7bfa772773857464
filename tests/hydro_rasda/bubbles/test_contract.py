"""In bubbles, too, the contract of backends is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydro_rasda.bubbles import BubbleBackend
from hydro_rasda.testing import Check, backend_checks
from hydro_rasda.testing.backends import check_results
from tests.hydro_rasda.bubbles.conftest import waiting_hosts


@pytest.mark.slow
@pytest.mark.parametrize("check", backend_checks(), ids=lambda check: check.__name__)
def test_bubbles_keep_the_contract(check: Check, one_process: None, two_hosts: Path, tmp_path: Path) -> None:
    check(lambda: BubbleBackend(two_hosts), tmp_path / "run")


@pytest.mark.slow
def test_guests_that_nobody_stops_come_to_the_same_by_quanta(one_process: None, tmp_path: Path) -> None:
    with waiting_hosts(tmp_path / "bubbles", 1, preempt=False) as (guest,):
        check_results(lambda: BubbleBackend(tmp_path / "bubbles"), tmp_path / "run")
        assert 0 < guest.open <= guest.waited
