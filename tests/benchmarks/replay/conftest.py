from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def small_groups_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Measuring what trains fastest takes seconds; threads of models this small wait for each other."""
    monkeypatch.setattr("benchmarks.replay.record.fastest_group", lambda task, configs, width: 4)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
