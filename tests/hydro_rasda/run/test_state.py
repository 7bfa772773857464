from __future__ import annotations

from pathlib import Path

from hydro_rasda.problem import Problem
from hydro_rasda.run.state import Run
from hydro_rasda.run.store import Store


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
