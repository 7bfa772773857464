"""Pages of runs that are a closed form, against recorded pages: no colour, range, label or sentence changes unnoticed.

After a change that you mean, look at the page of such a run. Then record all pages anew: `python -m
tests.hydro_rasda.plots.page.test_recorded_pages`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from hydro_rasda import plots
from hydro_rasda.plots import hyperparameters
from hydro_rasda.plots.figure_style import begun
from hydro_rasda.plots.page import sections as page_sections
from hydro_rasda.plots.page.sections import Drawn, Section
from hydro_rasda.plots.page.write import sections_of
from hydro_rasda.records.records import RunRecord
from hydro_rasda.settings.config import TuneConfig
from tests.hydro_rasda.journals import Writer, write_run

RECORDED = Path(__file__).parent / "recorded_pages.json"

IMPORTANCE = {"lr": 0.6, "optimizer": 0.3, "dropout": 0.1}
"""In the place of the numbers that come out of a random forest, which change with its version."""


def as_told(parts: Iterable[Section]) -> dict[str, Any]:
    """All that a reader of these sections sees."""
    return {
        part.title: {
            "sentences": part.sentences,
            "facts": part.facts,
            "table": part.table,
            "failures": part.failures,
            "code": part.code,
            "grid": part.grid,
            "figures": {each.name: figure(each.drawn()) for each in part.drawings},
        }
        for part in parts
    }


def figure(drawn: Drawn) -> list[Any]:
    return [drawn.note or json.loads(drawn.json), drawn.height]


def pages(folder: Path) -> dict[str, Any]:
    runs: dict[str, RunRecord] = {
        "over": write_run(folder / "over", num_samples=12),
        "interrupted": write_run(folder / "interrupted", num_samples=9, rungs=2, fails=lambda number: False),
        "failed": write_run(folder / "failed", num_samples=3, rungs=1, fails=lambda number: True),
        "empty": Writer(folder / "empty", TuneConfig(num_samples=4)).record,
    }
    with pytest.MonkeyPatch.context() as patch:
        for module in (page_sections, hyperparameters):
            patch.setattr(module, "importance_of", lambda record: IMPORTANCE if begun(record) else {})
        found = {name: as_told(page_sections.sections(record)) for name, record in runs.items()}
        found["side by side"] = as_told(sections_of([runs["over"], runs["interrupted"]]))
    many = json.loads(plots.learning_curves(write_run(folder / "many", num_samples=64, width=16)).to_json())
    del many["layout"]["template"]
    found["curves of many trials"] = many
    # As the file has it: tuples are lists there, and the last digits are a machine's own.
    told: dict[str, Any] = json.loads(json.dumps(found), parse_float=lambda text: float(f"{float(text):.10g}"))
    return told


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return pages(tmp_path_factory.mktemp("recorded"))


@pytest.mark.parametrize("run", json.loads(RECORDED.read_text()))
def test_a_page_is_as_recorded(found: dict[str, Any], run: str) -> None:
    recorded = json.loads(RECORDED.read_text())
    assert recorded.keys() == found.keys()
    assert recorded[run].keys() == found[run].keys()
    for part, told in recorded[run].items():
        assert found[run][part] == told, part


def lines(value: Any, depth: int) -> str:
    """JSON with a line for each item of the outer objects."""
    if not depth or not isinstance(value, dict):
        return json.dumps(value, separators=(",", ":"))
    return "{\n" + ",\n".join(f"{json.dumps(name)}:{lines(each, depth - 1)}" for name, each in value.items()) + "\n}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as there:
        RECORDED.write_text(lines(pages(Path(there)), 3) + "\n")
