import math
import random

import pytest

from hydro_rasda.schedulers import rank

NAN, INF = math.nan, math.inf


def test_best_first_ties_by_the_lower_index() -> None:
    assert rank([0.3, 0.1, 0.3, 0.2], "min") == [1, 3, 0, 2]
    assert rank([0.3, 0.1, 0.3, 0.2], "max") == [0, 2, 3, 1]


def test_what_is_not_finite_is_worst_in_both_modes() -> None:
    scores = [NAN, -INF, 1.0, INF, 0.0]
    assert rank(scores, "min") == [4, 2, 0, 1, 3]
    assert rank(scores, "max") == [2, 4, 0, 1, 3]


def test_max_mirrors_min() -> None:
    scores = [random.Random(0).choice([0.0, 0.5, 1.0, NAN, INF]) for _ in range(50)]
    assert rank(scores, "min") == rank([-s for s in scores], "max")


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="`mode` is 'best', but must be 'min' or 'max'"):
        rank([1.0], "best")  # type: ignore[arg-type]
