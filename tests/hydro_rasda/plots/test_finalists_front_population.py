"""The figure of a population, against the run's own lineages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hydro_rasda import TuneResult, choice, loguniform, plots, uniform
from hydro_rasda.history.lineage import decided_copies
from hydro_rasda.plots.figure_style import is_empty
from hydro_rasda.records.timeline import journal_of


@pytest.mark.usefixtures("one_process")
def test_a_population_is_drawn_with_its_copies_and_the_best_lineage(
    quick: Callable[..., TuneResult], tmp_path: Path
) -> None:
    space: dict[str, Any] = {"lr": loguniform(1e-3, 0.3), "momentum": uniform(0.1, 0.9), "batch_size": 64}
    found = quick(space=space, num_samples=8, max_t=9, sweep={"rule": "pbt", "fusion": 8})
    copies = [copy for together in decided_copies(journal_of(found)) for copy in together]
    trials, copied, lineage = plots.population(found, "momentum").data
    # Each trial's line runs from the first epoch to the last, in a span for each of its configurations.
    assert sum(stop - start for start, stop in zip(trials.x[::3], trials.x[1::3], strict=True)) == 8 * 4
    assert len(trials.x) == 3 * (8 + len(copies))
    assert list(copied.x[::3]) == [copy.epoch for copy in copies]
    for before, after, text, copy in zip(copied.y[::3], copied.y[1::3], copied.text[::3], copies, strict=True):
        assert (before, after) == (
            pytest.approx(copy.before["momentum"], rel=1e-3),
            pytest.approx(copy.after["momentum"], rel=1e-3),
        )
        assert text == f"trial {copy.trial} copies trial {copy.source}"
    ancestors = found.lineage(found.best_trial)
    assert list(lineage.x) == [at for of in ancestors for at in (of.start, of.stop)]
    assert is_empty(plots.population(found, "dropout"))
    found.report(tmp_path / "report.html")
    assert "<h2>Population</h2>" in (tmp_path / "report.html").read_text()


@pytest.mark.usefixtures("one_process")
def test_a_population_is_drawn_by_what_its_copies_change(quick: Callable[..., TuneResult]) -> None:
    space: dict[str, Any] = {"lr": 0.05, "momentum": uniform(0.1, 0.9), "act": choice(["relu", "tanh"])}
    found = quick(space=space, num_samples=8, max_t=9, sweep={"rule": "pbt", "fusion": 8})
    figure = plots.population(found)
    assert figure.layout.yaxis.title.text == "momentum"
    assert figure.to_json() == plots.population(found, "momentum").to_json()
    assert is_empty(plots.population(found, "act"))  # copies keep its names, which no axis of numbers holds
