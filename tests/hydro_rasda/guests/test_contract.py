"""In bubbles, too, the contract of backends is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydro_rasda import BubbleBackend
from hydro_rasda.testing import Check, backend_checks


@pytest.mark.slow
@pytest.mark.parametrize("check", backend_checks(), ids=lambda check: check.__name__)
def test_bubbles_keep_the_contract(check: Check, one_process: None, two_hosts: Path, tmp_path: Path) -> None:
    check(lambda: BubbleBackend(two_hosts), tmp_path / "run")
