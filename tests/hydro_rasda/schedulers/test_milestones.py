import pytest

from hydro_rasda.schedulers import first_milestone, milestones


@pytest.mark.parametrize(
    ("min_t", "max_t", "factor", "expected"),
    [
        (1, 243, 3, (1, 3, 9, 27, 81, 243)),  # int(log(243) / log(3)) is 4: float logarithms lose a rung
        (1, 1000, 10, (1, 10, 100, 1000)),  # int(log(1000) / log(10)) is 2
        (5, 40, 2, (5, 10, 20, 40)),  # RASDA, section 4.1
        (5, 20, 2, (5, 10, 20)),  # RASDA, section 4.2
        (5, 30, 2, (5, 10, 20, 30)),
        (7, 7, 2, (7,)),
        (1, 2, 3, (1, 2)),
    ],
)
def test_milestones(min_t: int, max_t: int, factor: int, expected: tuple[int, ...]) -> None:
    assert milestones(min_t, max_t, factor) == expected


def test_large_numbers_stay_exact() -> None:
    assert milestones(1, 3**60, 3) == tuple(3**k for k in range(61))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 9, 3), ValueError, "`min_t` is 0, but must be an integer >= 1"),
        ((10, 9, 3), ValueError, "`max_t` is 9, but must be an integer >= 10"),
        ((1, 9, 1), ValueError, "`factor` is 1, but must be an integer >= 2"),
        ((1.0, 9, 3), ValueError, "`min_t` is 1.0, but must be an integer"),
        ((True, 9, 3), ValueError, "`min_t` is True, but must be an integer"),
    ],
)
def test_bad_input(arguments: tuple[int, int, int], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        milestones(*arguments)


@pytest.mark.parametrize(("warmup", "expected"), [(0, 1), (1, 1), (1.1, 3), (3, 3), (10, 27), (27, 27), (99, 27)])
def test_no_rung_before_the_warmup_is_over(warmup: float, expected: int) -> None:
    assert first_milestone(1, 27, 3, warmup) == expected


@pytest.mark.parametrize("warmup", [0, 1.5, 5, 11, 20, 30])
def test_what_is_left_are_the_milestones_that_are_not_before(warmup: float) -> None:
    left = milestones(first_milestone(5, 30, 2, warmup), 30, 2)
    assert left == tuple(m for m in milestones(5, 30, 2) if m >= warmup)
