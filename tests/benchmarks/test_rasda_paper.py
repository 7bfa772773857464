"""The settings are the paper's, and the published tables are those of the published numbers."""

import json
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.rasda_paper import markdown, speed_up
from benchmarks.rasda_settings import (
    AM,
    APPLICATIONS,
    CFD,
    CV,
    Application,
    Assumptions,
    asha,
    cluster,
    cost_model,
    rasda,
)
from benchmarks.result_files import RESULTS, table
from hydro_rasda.simulator import Spread, Workload, power_law, simulate

PARAMETRIC = Assumptions(serial=0.1, curves="power law")


@pytest.mark.parametrize(
    ("app", "milestones", "workers"),
    [(CV, (5, 10, 20, 40), [2, 4, 8, 16]), (AM, (5, 10, 20), [8, 16, 32]), (CFD, (5, 10, 20, 40), [8, 16, 32, 64])],
    ids=lambda value: getattr(value, "name", None),
)
def test_workers_grow_as_in_figure_7(app: Application, milestones: tuple[int, ...], workers: list[int]) -> None:
    rule = rasda(app).rule
    assert rule.milestones == asha(app).rule.milestones == milestones
    assert [rule.workers_at(t) for t in (0, *milestones[:-1])] == workers
    assert app.trials * app.workers == app.gpus


@pytest.mark.parametrize("app", APPLICATIONS, ids=lambda app: app.name)
@pytest.mark.parametrize("serial", [0.0, 0.2])
def test_an_epoch_takes_what_the_papers_asha_took(app: Application, serial: float) -> None:
    cost = cost_model(app, Assumptions(serial=serial))
    nodes = -(-app.workers // 4)
    assert cost.epoch(Spread(app.workers, nodes)) == pytest.approx(app.asha_seconds / app.max_t, rel=0.01)


@pytest.mark.parametrize("app", APPLICATIONS, ids=lambda app: app.name)
def test_ideal_scaling_of_a_single_trial_in_closed_form(app: Application) -> None:
    """Nothing serial, no noise, no restart: epochs 1-5, 6-10, 11-20 and 21-40 at 1, 1/2, 1/4 and 1/8 of the time."""
    ideal = Assumptions(restart_seconds=0, checkpoint_seconds=0, jitter=0, epoch_noise=0, link_latency=0)
    cost = replace(cost_model(app, ideal), gradient_bytes=0)
    one = power_law(1, app.max_t, seed=0)
    single = Workload(one.scores, one.work, one.mode)
    plain, elastic = (simulate(plan, single, cluster(app), cost).seconds for plan in (asha(app), rasda(app)))
    epochs = {40: 5 + 5 / 2 + 10 / 4 + 20 / 8, 20: 5 + 5 / 2 + 10 / 4}
    assert plain / elastic == pytest.approx(app.max_t / epochs[app.max_t])


def test_a_ratio_is_of_simulated_times() -> None:
    """A larger serial share, a smaller speed-up: the number comes from the model, and moves with it."""
    rows = [speed_up(CV, replace(PARAMETRIC, serial=s), range(6)) for s in (0.0, 0.1, 0.3)]
    assert rows[0]["ratio"] > rows[1]["ratio"] > rows[2]["ratio"]
    for row in rows:
        assert row["ratio"] == row["ASHA_s"] / row["RASDA_s"]


def test_tables() -> None:
    rows: list[dict[str, Any]] = [{"a_b": 1234.5, "ok": True, "c": [1, 2]}, {"a_b": 0.12345, "ok": False, "c": "x"}]
    assert table(rows).splitlines() == [
        "| a b | ok | c |",
        "|---|---|---|",
        "| 1,234 | yes | 1, 2 |",
        "| 0.123 | no | x |",
    ]


def test_the_published_tables_are_those_of_the_published_numbers() -> None:
    results = json.loads((RESULTS / "rasda_paper.json").read_text())
    assert markdown(results) == (RESULTS / "rasda_paper.md").read_text()
