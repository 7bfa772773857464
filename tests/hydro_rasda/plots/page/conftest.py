from __future__ import annotations

import pytest

from hydro_rasda.records.records import RunRecord
from tests.hydro_rasda.journals import runs_of_all_sorts


@pytest.fixture(scope="package")
def sorts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunRecord]:
    """A run for each way in which one can be; nobody writes to them."""
    return runs_of_all_sorts(tmp_path_factory.mktemp("sorts"))
