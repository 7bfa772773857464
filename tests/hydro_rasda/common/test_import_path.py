"""The folders of modules, handed on to another process."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from hydro_rasda.common.import_path import import_path


def test_entries_that_python_ignores_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path: list[Any] = ["", "/a", Path("/b"), "/c"]
    monkeypatch.setattr(sys, "path", path)
    monkeypatch.chdir(tmp_path)
    assert import_path().split(os.pathsep) == [str(tmp_path), "/a", "/c"]
