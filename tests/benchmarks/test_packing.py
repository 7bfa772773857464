"""The profiles are what they are said to be, and the published tables are those of the published numbers."""

import json
from statistics import fmean

import pytest

from benchmarks.packing import FILE, OURS, PAPERS, POLICIES, SYSTEMS, highs, markdown, occupancy, row_of
from benchmarks.packing_live import ARCHITECTURES, ONE, SEVERAL, WIDTHS, model, train
from benchmarks.packing_virtual import HIGHEST, LOWEST, SECONDS, h100s_and_a100s, problem, simulate_packing
from benchmarks.result_files import RESULTS, Row
from fusion import fusion_key
from hydro_rasda.schedulers import Job, Placed, Room, one_a_device


def test_jobs_are_of_24_kinds_within_the_slides_range_and_take_as_long_as_the_slides_did() -> None:
    drawn = problem(384, seed=0)
    assert len(drawn.jobs) == 384
    assert len({job.kind for job in drawn.jobs}) == 24
    assert all(LOWEST <= job.compute <= HIGHEST for job in drawn.jobs)
    assert fmean(job.seconds for job in drawn.jobs) == pytest.approx(SECONDS)
    assert drawn == problem(384, seed=0)
    assert drawn != problem(384, seed=1)


def test_without_packing_systems_take_as_long_as_on_the_slides() -> None:
    """2.1 h on 4 A100; 1.7 h on 4 H100; 49.5 minutes on 4 H100 and 6 A100."""
    drawn = problem(384, seed=0)
    for machines, minutes in (
        (SYSTEMS["4 A100"][0], 126),
        (h100s_and_a100s(4, 0), 102),
        (h100s_and_a100s(4, 6), 49.5),
    ):
        seconds = simulate_packing(one_a_device, drawn.jobs, machines, drawn.interference).seconds
        assert seconds / 60 == pytest.approx(minutes, rel=0.05)


def test_occupancy_counts_what_a_device_has_at_most() -> None:
    jobs = [Job("a", 1, 0.6, 1), Job("b", 1, 0.6, 1), Job("c", 1, 0.5, 1)]
    rooms = [Room("x", 9, 1), Room("y", 9, 1)]
    assert occupancy(jobs, rooms, [Placed("a", "x"), Placed("b", "x"), Placed("c", "y")]) == pytest.approx(0.75)


def test_highs_packs_the_best_that_fits() -> None:
    jobs = [Job(str(share), 1, share, 1) for share in (0.5, 0.4, 0.35, 0.3, 0.3)]
    assert highs(jobs, [Room("x", 9, 1)], seconds=10)[0] == pytest.approx(1.0)  # 0.4, 0.3 and 0.3
    assert highs(jobs, [Room("x", 2, 1)], seconds=10)[0] == pytest.approx(0.9)  # memory for two


def test_a_row_compares_all_policies_on_the_same_jobs() -> None:
    row = row_of("4 A100", 0.0, seeds=1)
    assert row["shorter"].keys() == POLICIES.keys()
    assert 1 < row["shorter"][PAPERS] < row["at_most"]
    assert row["ours_over_WFD"][1] == pytest.approx(row["shorter"][OURS] / row["shorter"][PAPERS])


def test_the_published_tables_are_those_of_the_published_numbers() -> None:
    results = json.loads((RESULTS / FILE).read_text())
    assert markdown(results) == (RESULTS / "packing.md").read_text()


WAYS = {"one at a time": 15.0, "packed": 10.0}


def test_a_run_is_told_with_its_kills() -> None:
    about = {"date": "2026-01-01", "cpu": "x", "cores": 2, "versions": {}, "load": 0, "option": ""}
    ways = {way: {"seconds": s, "failed": 0, "killed": 0, "started_again": 1} for way, s in WAYS.items()}
    row = {"pair": 0, "jobs": 48, "cores": 2, "ratio": 1.5, **ways}
    text = markdown({"run": {"environment": about, "rows": [row]}})
    assert "| 0 | 48 | 15 | 10 | 1.5 | 0 | 1 | 0 |" in text


def test_searches_are_told_with_their_median_and_what_was_not_run() -> None:
    about = {"date": "2026-01-01", "cpu": "x", "cores": 2, "versions": {}, "load": 0, "option": ""}
    found = {"trials": 24, "epochs": 100, "failed": 0, "device": "CPU", "best": 3, "loss": 0.25}

    def rows(place: str, least: float) -> list[Row]:
        ratios = [least, least + 1, least + 2]
        times = [({**found, "seconds": 10 * ratio}, {**found, "seconds": 10}, ratio) for ratio in ratios]
        return [
            {"pair": i, "place": place, ONE: one, SEVERAL: several, "ratio": ratio}
            for i, (one, several, ratio) in enumerate(times)
        ]

    local, there = ({"environment": about, "rows": rows(*of)} for of in (("local", 1.3), ("ray", 0.1)))
    text = markdown({"tune-local": local, "tune-ray": there})
    assert "| 0 | local | CPU | 24 | 100 and 100 | 13 | 10 | 1.3 | 0 | 0.2500 and 0.2500 | yes |" in text
    assert "`local`, median of 3: 2.30 [1.30, 3.30] times as fast." in text
    assert "`ray`, median of 3: 1.10 [0.10, 2.10] times as fast." in text
    assert "has not been run" in text


def test_no_two_models_that_are_tuned_can_be_fused() -> None:
    keys = {fusion_key(model(architecture, width)) for architecture in ARCHITECTURES for width in WIDTHS}
    assert len(keys) == len(ARCHITECTURES) * len(WIDTHS)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_training_learns(architecture: str) -> None:
    assert train(architecture, 0.003, 32, 3) > 0.2
