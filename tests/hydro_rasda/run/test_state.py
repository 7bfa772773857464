from __future__ import annotations

from pathlib import Path

from hydro_rasda.problem import Problem
from hydro_rasda.run.run_folder import Store
from hydro_rasda.run.state import ERROR_CHARS, Run, failure_line


def test_a_decision_is_taken_once_over_the_same_candidates_and_anew_over_others(
    problem: Problem, tmp_path: Path
) -> None:
    def decided(candidates: list[int], kept: list[int]) -> list[int]:
        with Store.open(tmp_path / "run", {}, "auto") as store:
            run = Run(problem, store)
            return run.decide("surrogate/to-3/kept", candidates, lambda: kept)

    assert decided([0, 1, 2], [2]) == [2]
    assert decided([2, 1, 0], [0]) == [2]
    assert decided([0, 1, 2, 3], [3]) == [3]
    assert decided([0, 1, 4], [4]) == [4]
    assert decided([0, 1, 2], [1]) == [2]


def test_a_traceback_is_kept_as_far_as_a_person_would_read_it() -> None:
    short, long = "Traceback\nValueError: 3", "Traceback" + "x" * 10**6 + "ValueError: 3"
    assert failure_line(0, short)["error"] == short
    kept = failure_line(0, long)["error"]
    assert len(kept) < ERROR_CHARS + 100
    assert kept.startswith("Traceback")
    assert kept.endswith("ValueError: 3")
    assert f"[{len(long) - ERROR_CHARS} characters are left out]" in kept
