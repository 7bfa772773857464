"""The page's program runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import surrogate


def test_the_program_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(surrogate.__file__).parent / "README.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(program, "README.md", "exec"), {})
    rho, verdict = capsys.readouterr().out.split()
    assert float(rho) >= 0.8
    assert verdict in ("trusted", "doubtful")


def test_every_public_name_that_a_user_calls_is_on_the_page() -> None:
    page = (Path(surrogate.__file__).parent / "README.md").read_text()
    functions = [name for name in surrogate.__all__ if name[0].islower() and name != "plain_score_fn"]
    assert [name for name in functions if f"`{name}" not in page] == []
