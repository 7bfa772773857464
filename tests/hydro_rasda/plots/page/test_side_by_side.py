"""Runs side by side: what the page says, and its figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hydro_rasda.cli import main
from hydro_rasda.plots.page.write import Page, sections_of
from hydro_rasda.records.records import RunRecord
from tests.hydro_rasda.conftest import Said
from tests.hydro_rasda.journals import write_run

Sorts = dict[str, RunRecord]


def test_cost_best_configurations_and_curves_stand_beside_each_other(sorts: Sorts) -> None:
    pair = [sorts["over"], sorts["large"]]
    made = {section.title: section for section in sections_of(pair)}
    assert made["Answer"].sentences[0].startswith("large is better: val_loss ")
    heads, *rows = made["Answer"].table
    assert heads == ["", "over", "large"]
    assert ["trials", "27", "2000"] in rows
    _, *rows = made["Best configurations"].table
    best = [record.trials[record.best_trial].used for record in pair]
    assert ["lr", *(f"{config['lr']:.6g}" for config in best)] in rows
    assert [row[0] for row in made["Cost"].table] == [
        "",
        "wall time",
        "sweep",
        "race",
        "full training",
        "spared",
    ]
    assert ["num_samples", "27", "2000"] in made["What was asked"].table
    drawn = {name: json.loads(each.drawn().served) for name, each in Page(*pair).drawings.items()}
    assert drawn.keys() == {"costs", "best-scores", "winners-curves"}
    for name in ("best-scores", "winners-curves"):
        titles = [trace["name"] for trace in drawn[name]["data"]]
        assert [title.split(",")[0] for title in titles] == ["over", "over", "large", "large"]
        first, second, third, _ = (trace["line"] for trace in drawn[name]["data"])
        assert first["color"] == second["color"] != third["color"]
        assert (first["dash"], second["dash"]) == ("dot", "solid")
    seconds = [sum(bar["x"][i] for bar in drawn["costs"]["data"]) for i in range(2)]
    assert seconds == pytest.approx([record.cost.seconds for record in pair], rel=1e-4)


@pytest.mark.parametrize("sort", ["interrupted", "swept", "single", "failed", "empty"])
def test_runs_of_every_sort_stand_beside_one_that_is_over(sorts: Sorts, sort: str) -> None:
    made = Page(sorts["over"], sorts[sort])
    assert f"<title>over, {sort}" in made.html()
    assert all(each.drawn().served for each in made.drawings.values())


def test_nothing_is_said_of_the_data_of_a_run_whose_folder_is_gone(sorts: Sorts, tmp_path: Path) -> None:
    gone = replace(sorts["large"], path=tmp_path / "gone")
    made = {section.title: section for section in sections_of([sorts["over"], gone])}
    told = "Not to be compared: the folder of gone is gone, which told the data and the loss."
    assert made["Answer"].sentences == [told]
    assert not made["What was asked"].table
    assert made["What was asked"].sentences == ["What differs is not known: a run's folder is gone."]


def test_scores_of_two_metrics_share_no_axis(sorts: Sorts) -> None:
    made = Page(sorts["over"], replace(sorts["single"], mode="max"))
    assert "Not to be compared: val_loss (min) and val_loss (max)." in made.html(live=True)
    assert {name: each.drawn().note for name, each in made.drawings.items()} == {
        "best-scores": "the metrics differ",
        "winners-curves": "the metrics differ",
        "costs": "",
    }


def test_runs_without_a_score_have_no_curves(sorts: Sorts) -> None:
    made = Page(sorts["empty"], sorts["empty"])
    notes = {name: each.drawn().note for name, each in made.drawings.items() if name != "costs"}
    assert notes == dict.fromkeys(("best-scores", "winners-curves"), "no trial has a score yet")


def test_three_runs_of_one_name(tmp_path: Path, said: Said) -> None:
    paths = [str(write_run(tmp_path / name / "a", num_samples=3 + i).path) for i, name in enumerate("xyz")]
    heads, *_, last = said("compare", *paths, "--out", tmp_path / "page.html").splitlines()
    assert heads.split() == paths
    assert last == str(tmp_path / "page.html")
    assert all(path in (tmp_path / "page.html").read_text() for path in paths)
    assert main(["compare", paths[0]]) == 2
