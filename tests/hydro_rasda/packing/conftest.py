"""Each test packs where nothing was learnt before."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where it is kept."""
    path = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("HYDRO_RASDA_CACHE", str(path))
    return path
