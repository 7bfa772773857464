"""A reader copies one block of a page: it names its imports, or those of the blocks above it in its section."""

from __future__ import annotations

import re
import symtable
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

import hydro_rasda

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "AGENTS.md", "fusion/README.md", "surrogate/README.md")),
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name in ("docs", "guides", "migrate")),
]
_PART = re.compile(
    r"^(?P<heading>#+ [^\n]*)$|^(?P<fence> *)```(?P<kind>\w*)[^\n]*\n(?P<code>.*?)^ *```$", re.MULTILINE | re.DOTALL
)


def names(code: str) -> tuple[set[str], set[str]]:
    """Return the names that a block imports, and those that it uses from elsewhere.

    >>> names("from a import b\\ndef f(x): return b(x) + g(x)")
    ({'b'}, {'g'})
    """
    top = symtable.symtable(code, "block", "exec")
    inner, used = [*top.get_children()], set[str]()
    while inner:
        scope = inner.pop()
        inner += scope.get_children()
        used |= {symbol.get_name() for symbol in scope.get_symbols() if symbol.is_global()}
    own = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    used |= {symbol.get_name() for symbol in top.get_symbols() if symbol.is_referenced()}
    return {symbol.get_name() for symbol in top.get_symbols() if symbol.is_imported()}, used - own


def lacking(page: str) -> Iterator[tuple[int, set[str]]]:
    """Yield the line of each Python block, and the names that it uses and that only another section imports."""
    known, section = {*vars(hydro_rasda)["__all__"]}, set[str]()
    for part in _PART.finditer(page):
        if part["heading"]:
            section = set()
        elif part["kind"] in ("python", "py"):
            imported, used = names(dedent(part["code"]))
            known |= imported
            section |= imported
            # In `tune(..., name="a")`, a reader's own call is meant.
            own = {"tune"} if "..." in part["code"] else set()
            yield page[: part.start()].count("\n") + 1, (used & known) - section - own


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_block_imports_what_it_uses(page: Path) -> None:
    assert {line: found for line, found in lacking(page.read_text(encoding="utf-8")) if found} == {}


def test_imports_of_another_section_do_not_count() -> None:
    page = "# A\n```python\nfrom a import b\nb()\n```\n```python\nb()\n```\n## B\n```py\nb(); tune(c)\ntune()\n```\n"
    assert [found for _, found in lacking(page)] == [set(), set(), {"b", "tune"}]
