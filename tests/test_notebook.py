"""Test that the notebook has README's program, runs, and is stored with its outputs.

After a change of the program or of its output, store the notebook again: `python -m tests.test_notebook`.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "examples" / "digits.ipynb"
PROGRAM = (ROOT / "examples" / "digits.py").read_text()

INTRODUCTION = """\
# Tune an MLP on images of digits

The program of README, step by step. It takes about half a minute on two cores. [Start in five
minutes](../docs/start.md) explains each step."""


def written() -> Any:
    """Return the notebook without outputs."""
    from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

    parts = re.split(r"^(?=def model_fn|space = |model = )", PROGRAM, flags=re.MULTILINE)
    cells = [new_code_cell(part.strip("\n"), id=f"part-{i}") for i, part in enumerate([*parts, "result"])]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return new_notebook(
        cells=[new_markdown_cell(INTRODUCTION, id="introduction"), *cells], metadata={"kernelspec": kernel}
    )


def executed(folder: Path) -> Any:
    """Run the notebook in a folder, and return it with its outputs. Raise an error if a cell does."""
    from nbclient import NotebookClient

    resources = {"metadata": {"path": str(folder)}}
    return NotebookClient(written(), timeout=600, resources=resources, record_timing=False).execute()


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def html(notebook: Any) -> str:
    """Return all HTML that a notebook shows."""
    return "".join(output.get("data", {}).get("text/html", "") for output in outputs(notebook))


def text(notebook: Any) -> str:
    """Return all text that a notebook prints."""
    return "".join(output.get("text", "") or output.data.get("text/plain", "") for output in outputs(notebook))


def check(notebook: Any) -> None:
    """Check that the progress bar is full, the table has the best trials, and the model is good."""
    shown = html(notebook)
    assert re.search("━━━.*100%", shown), shown
    assert shown.count("<tr>") > 5, shown
    (accuracy,) = re.findall(r"Test accuracy: ([\d.]+)", text(notebook))
    assert float(accuracy) > 0.95


def stored() -> Any:
    import nbformat

    return nbformat.read(NOTEBOOK, as_version=4)


def test_the_notebook_is_the_program() -> None:
    kept, fresh = ([(cell.cell_type, cell.source) for cell in each.cells] for each in (stored(), written()))
    assert kept == fresh


def test_what_is_stored_is_small_and_names_no_machine() -> None:
    check(stored())
    assert not re.search(r"(?<![<\w.])/(home|root|tmp|work|Users|var)/", text(stored()) + html(stored()))
    assert NOTEBOOK.stat().st_size < 60_000


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    notebook = executed(tmp_path)
    check(notebook)
    shows = [[bool(cell.get("outputs")) for cell in each.cells] for each in (notebook, stored())]
    assert shows[0] == shows[1]


if __name__ == "__main__":
    import nbformat

    with tempfile.TemporaryDirectory() as folder:
        told = nbformat.writes(executed(Path(folder))).replace(f"{folder}/", "")
    NOTEBOOK.write_text(f"{told}\n")
