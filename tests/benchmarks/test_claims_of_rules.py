"""Rows of rules and schedules, from result files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import population, schedules_live
from benchmarks.claims import rules

ENVIRONMENT: dict[str, Any] = {
    "cpu": "a CPU", "cores": 2, "torch": "2", "ray": "2", "date": "2026-01-01", "load": 0.1, "trials": 32, "epochs": 4,
    "command": "python -m benchmarks.x",
}  # fmt: skip


def test_a_population_is_as_fast_as_its_median_pair(tmp_path: Path) -> None:
    pairs = [
        {
            "one group": {"seconds": 2.0, "interval_seconds": 1.5, "copy_seconds": 0.015},
            "default": {"seconds": 4.0},
            "ray": {"seconds": seconds},
        }
        for seconds in (18.0, 22.0, 40.0)
    ]
    result = {"environment": ENVIRONMENT, "pairs": pairs}
    (tmp_path / population.FILE).write_text(json.dumps(result))
    faster, default, share = rules.of_a_population(tmp_path)
    assert (faster.measured, faster.met) == ("11.0x (9.0 to 20.0), 3 pairs", True)
    assert default.measured == "5.5x"
    assert (share.measured, share.met) == ("1.00%", True)
    assert "| 18.0, 22.0, 40.0 |  |" in population.markdown(result)


def test_a_searched_schedule_is_judged_by_the_spread_between_seeds(tmp_path: Path) -> None:
    tests = {
        "searched": [1.0, 2.0, 3.0],
        "constant": [3.0, 4.0, 5.0],
        "cosine": [-1.0, 0.0, 1.0],
        "linear": [1.0, 2.0, 3.0],
    }
    rows = [
        {"task": task, "arm": arm, "seed": seed, "tests": of, "config": {"lr": 0.1}, "full_trainings": 3.0}
        for task in ("shakespeare", "residual")
        for seed in (0, 1)
        for arm, of in tests.items()
    ]
    result = {"environment": ENVIRONMENT, "rows": rows}
    (tmp_path / schedules_live.FILE).write_text(json.dumps(result))
    loss, accuracy = rules.of_schedules(tmp_path)
    assert (loss.measured, loss.met) == ("+2.0 sd over constant, -2.0 sd over cosine, +0.0 sd over linear", False)
    assert accuracy.measured == "-2.0 sd over constant, +2.0 sd over cosine, +0.0 sd over linear"
    assert "| +2.0 sd |" in schedules_live.markdown(result)


def test_rules_of_the_replay_are_read_off_its_page() -> None:
    found = rules.in_the_replay(Path(rules.__file__).parents[1] / "results")
    titles = [f"{title} in the sweep, replayed" for title in rules.ASKED.values()]
    titles += [f"{title} for half of the sample, replayed" for title in rules.OF_HALF.values()]
    assert [claim.what for claim in found] == titles
    assert all("; halving" in claim.measured or "; uniform" in claim.measured for claim in found)


@pytest.mark.parametrize("part", [rules.in_the_replay, rules.of_a_population, rules.of_schedules])
def test_an_empty_folder_has_no_rows(part: Any, tmp_path: Path) -> None:
    assert part(tmp_path) == []
