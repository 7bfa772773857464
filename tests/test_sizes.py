"""Test that no module and no function is too long to be read at a time."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("fusion", "surrogate", "hydro_rasda", "benchmarks")
MODULE_LINES = 600
FUNCTION_LINES = 60

LONG_DOCSTRINGS = {"tune", "tune_trainer"}
"""Functions whose docstring explains a page of arguments. The lines of the docstring do not count."""


def functions(source: str) -> Iterator[tuple[str, int]]:
    """Yield the name and the number of lines of each function of a module, nested functions included.

    Lines count from the first decorator to the last statement. Docstring, comments and blank lines count, too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            left_out = docstring_lines(node) if node.name in LONG_DOCSTRINGS else 0
            yield node.name, (node.end_lineno or 0) - first + 1 - left_out


def docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of lines of a function's docstring."""
    if ast.get_docstring(node) is None:
        return 0
    return (node.body[0].end_lineno or 0) - node.body[0].lineno + 1


def sources() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each module."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text()


def test_no_module_is_long() -> None:
    lines = {name: len(text.splitlines()) for name, text in sources()}
    assert len(lines) > 300  # to be sure that modules were found
    assert {name: count for name, count in lines.items() if count > MODULE_LINES} == {}


def test_no_function_is_long() -> None:
    found = [(name, *of) for name, text in sources() for of in functions(text)]
    assert {name for _, name, _ in found} >= LONG_DOCSTRINGS
    assert [row for row in found if row[2] > FUNCTION_LINES] == []


def test_lines_of_a_function() -> None:
    inner = "    def inner(self):\n        '''Says it.'''\n        return 1\n"
    source = f"@first\n@second(\n    1,\n)\ndef outer(\n    a,\n):\n{inner}\n    # Why.\n    return inner\n"
    assert dict(functions(source)) == {"outer": 13, "inner": 3}
    documented = "def {}():\n    '''One.\n\n    Two.\n    '''\n    return 1\n"
    assert dict(functions(documented.format("tune"))) == {"tune": 2}
    assert dict(functions(documented.format("other"))) == {"other": 6}
