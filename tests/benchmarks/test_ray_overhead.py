"""The table says what was measured, and under which load."""

from benchmarks.ray_overhead import markdown, summary

SECONDS = {
    "cold": {"1->2": [10.0, 30.0, 12.0], "32 short trials": [20.0, 21.0]},
    "warm": {"1->2": [2.0, 3.0, 4.0], "32 short trials": [5.0]},
}


def test_the_ratio_is_the_median_of_the_pairs() -> None:
    result = summary(SECONDS, [0.5, 3.0, 2.0])
    assert result["median of cold / warm"] == {"1->2": 5.0}  # of 5, 10 and 3; 12 / 3 would be 4
    assert result["load average"] == {"start": 0.5, "least": 0.5, "most": 3.0}


def test_other_work_is_named() -> None:
    quiet, disturbed = (summary(SECONDS, [load]) for load in (0.5, 1.6))
    assert "| 1->2 | 3 | 12.0 (10.0-30.0) | 3.0 (2.0-4.0) | 5.0 |\n" in markdown(quiet)
    assert "Other work" not in markdown(quiet)
    assert "**Other work was running" in markdown(disturbed)
