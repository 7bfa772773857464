"""The example on the package's page, which the pages' own tests run, is short."""

from pathlib import Path

import fusion


def test_the_example_has_20_lines() -> None:
    page = (Path(fusion.__file__).parent / "README.md").read_text(encoding="utf-8")
    code = page.split("```python\n", 1)[1].split("```", 1)[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
