"""The settings are what their names say, and the published tables are those of the published numbers."""

import json
import math
from dataclasses import replace

import pytest

from benchmarks.rasda_beyond import CHOSEN, FILE, PAPER, Setting, faster, hours, markdown, measure, plans, recorded
from benchmarks.rasda_settings import CV, Assumptions, cost_model
from benchmarks.result_files import RESULTS
from hydro_rasda.schedulers import RASDA
from hydro_rasda.simulator import Spread


def test_the_paper_and_the_chosen_rule_are_what_they_are_called() -> None:
    rules = {name: plan.rule for name, plan in plans(Setting("CV", CV, 1)).items()}
    papers = RASDA(CV.max_t, 5, 2, 2, CV.workers, CV.gpus)
    assert rules[PAPER] == papers
    assert rules[CHOSEN] == replace(papers, wait=0.1, grow="efficient")
    assert rules["synchronous"].wait == math.inf


def test_an_epoch_of_a_new_trial_takes_as_long_with_a_noise_scale_and_one_of_four_batches_more_passes() -> None:
    plain, noisy = Setting("plain", CV, 1).cost(), Setting("noisy", CV, 1, noise=4.0).cost()
    assert plain == replace(cost_model(CV, Assumptions(serial=0.067)), noise_scale=math.inf)
    for workers, factor in ((2, 1.0), (8, 2 / 1.25)):
        took = [cost.epoch(Spread(workers, workers // 4 or 1)) * cost.passes(workers) for cost in (plain, noisy)]
        assert took[1] / took[0] == pytest.approx(factor, rel=1e-3)


def test_recorded_trainings_are_measured_as_others_are() -> None:
    setting = Setting("digits", replace(CV, trials=8, gpus=16, max_t=27), 3, recorded="digits")
    assert (setting.mode, setting.workload(0).scores.shape) == ("max", (8, 27))
    assert setting.workload(0).scores.tolist() != setting.workload(1).scores.tolist()
    assert all(workload.epochs == 27 for workload in recorded("digits"))
    row = measure(setting)
    assert (row["trials"], row["seeds"]) == (8, 3)
    assert faster(row, "ASHA") == hours(row, "ASHA") == 1.0
    assert faster(row, PAPER) > 1
    assert row["rules"]["synchronous"]["to_the_end"] >= 1 / 8  # those of equal accuracy go on together
    assert all(rule["regret"] >= 0 for rule in row["rules"].values())


def test_the_published_tables_are_those_of_the_published_numbers() -> None:
    results = json.loads((RESULTS / FILE).read_text())
    assert markdown(results) == (RESULTS / "rasda_beyond.md").read_text()
