"""The package's page names what a user calls; its program is run with all pages."""

from __future__ import annotations

from pathlib import Path

import surrogate


def test_every_public_name_that_a_user_calls_is_on_the_page() -> None:
    page = (Path(surrogate.__file__).parent / "README.md").read_text()
    functions = [name for name in surrogate.__all__ if name[0].islower() and name != "plain_score_fn"]
    assert [name for name in functions if f"`{name}" not in page] == []
