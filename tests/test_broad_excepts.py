"""Test that a handler of any error uses the error, raises again, or has a comment that says why it drops the error."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

BROAD = {"Exception", "BaseException"}


def is_broad(caught: ast.expr | None) -> bool:
    """Tell whether a handler catches errors of any kind."""
    names = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(name is None or (isinstance(name, ast.Name) and name.id in BROAD) for name in names)


def tells(handler: ast.ExceptHandler) -> bool:
    """Tell whether a handler raises again, or uses the error or its traceback."""
    parts = [part for line in handler.body for part in ast.walk(line)]
    named = {part.id for part in parts if isinstance(part, ast.Name)}
    named |= {part.attr for part in parts if isinstance(part, ast.Attribute)}
    return any(isinstance(part, ast.Raise) for part in parts) or bool({handler.name, "format_exc"} & named)


def silent(source: str) -> list[int]:
    """Return lines that catch and drop errors of any kind, if no comment is there, on the line before or after."""
    lines, found = source.splitlines(), []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler):
            drops = is_broad(node.type) and not tells(node)
        elif isinstance(node, ast.Call):
            drops = getattr(node.func, "attr", "") == "suppress" and any(map(is_broad, node.args))
        else:
            continue
        if drops and not any("# " in line for line in lines[max(0, node.lineno - 2) : node.lineno + 1]):
            found.append(node.lineno)
    return found


@pytest.mark.parametrize("package", ["fusion", "surrogate", "hydro_rasda"])
def test_no_error_is_dropped_without_a_word(package: str) -> None:
    paths = sorted((ROOT / package).rglob("*.py"))
    assert [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in silent(path.read_text())] == []


@pytest.mark.parametrize(
    ("handler", "found"),
    [
        ("except Exception:\n    pass", True),
        ("except:\n    pass", True),
        ("except (OSError, Exception) as error:\n    x = 1", True),
        ("except Exception:  # of the user's own, told elsewhere\n    pass", False),
        ("except Exception:\n    # It is told elsewhere.\n    pass", False),
        ("except OSError:\n    pass", False),
        ("except BaseException:\n    undo()\n    raise", False),
        ("except Exception as error:\n    warn(error)", False),
        ("except Exception:\n    send(traceback.format_exc())", False),
    ],
)
def test_a_silent_handler_is_seen(handler: str, found: bool) -> None:
    assert silent(f"try:\n    f()\n{handler}\n") == ([3] if found else [])
    assert silent("\nwith contextlib.suppress(Exception):\n    f()\n") == [2]
