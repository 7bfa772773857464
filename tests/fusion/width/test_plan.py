import pytest

from fusion.width.plan import FusionPlan, best_width, is_clear, memory_limit, memory_line, next_width


def plan(width: int, **changes: object) -> FusionPlan:
    values: dict[str, object] = {"limit": None, "bytes_per_trial": 0, "fixed_bytes": 0, "throughput": {}}
    return FusionPlan(width=width, **{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("speedup", "limit", "width"),
    [
        ({}, None, 1),
        ({2: 0.5, 4: 0.9}, None, 1),
        ({2: 1.02}, None, 1),  # within the noise of a timing
        ({2: 1.5, 4: 2.0, 8: 1.8}, None, 4),
        ({2: 1.5, 4: 1.99, 8: 2.0}, None, 4),  # 8 is faster by less than 3 %
        ({2: 1.5, 4: 2.0, 8: 3.0}, 4, 4),
        ({2: 1.5, 4: 2.0}, 1, 1),
        ({2: 1.5, 4: 2.0}, 0, 1),
    ],
)
def test_best_width(speedup: dict[int, float], limit: int | None, width: int) -> None:
    assert best_width(speedup, limit) == width


def test_widths_double_up_to_all_trials() -> None:
    speedup: dict[int, float] = {}
    measured = []
    while (width := next_width(speedup, trials=12)) is not None:
        measured.append(width)
        speedup[width] = float(width)
    assert measured == [2, 4, 8, 12]


def test_widths_stop_growing_at_the_limit_or_after_two_losses() -> None:
    assert next_width({2: 1.5}, trials=32, limit=3) is None
    assert next_width({2: 1.5, 4: 1.2}, trials=32) == 8
    assert next_width({2: 1.5, 4: 1.2, 8: 1.3}, trials=32) is None
    assert next_width({2: 1.5, 4: 1.2, 8: 1.4}, trials=32) == 16
    assert next_width({}, trials=1) is None


def test_a_last_width_that_is_almost_all_trials_is_all_of_them() -> None:
    assert next_width({16: 5.0}, trials=36) == 36
    assert next_width({16: 5.0}, trials=36, limit=33) == 32
    assert next_width({16: 5.0}, trials=44) == 32
    assert (next_width({16: 5.0}, trials=40), next_width({16: 5.0}, trials=39)) == (32, 39)
    assert next_width({16: 5.0}, trials=36, limit=36) == 36


@pytest.mark.parametrize(
    ("measured", "best", "clear"),
    [
        ([1.2, 1.3, 1.11, 1.2, 1.2], 1.0, True),
        ([1.2, 1.3, 1.11, 1.2], 1.0, False),  # too few
        ([1.2, 1.3, 1.09, 1.2, 1.2], 1.0, False),
        ([0.8, 0.7, 0.89, 0.8, 0.8], 1.0, True),
        ([0.8, 0.7, 0.91, 0.8, 0.8], 1.0, False),
        ([0.8, 1.2, 0.8, 1.2, 0.8, 1.2], 1.0, False),
    ],
)
def test_a_width_is_clear_if_all_measurements_agree(measured: list[float], best: float, clear: bool) -> None:
    assert is_clear(measured, best) is clear


def test_memory_line_recovers_a_line() -> None:
    assert memory_line({K: 1000 + 70 * K for K in (2, 4, 8, 16)}) == (1000, 70)
    assert memory_line({K: 70 * K for K in (2, 4)}) == memory_line({4: 280}) == (0, 70)


@pytest.mark.parametrize("peaks", [{2: 100, 4: 90}, {2: 10, 8: 100}])
def test_memory_line_never_promises_that_members_are_free(peaks: dict[int, int]) -> None:
    fixed, per_trial = memory_line(peaks)
    assert fixed == 0
    assert per_trial == round(sum(K * p for K, p in peaks.items()) / sum(K * K for K in peaks))


def test_memory_limit() -> None:
    assert memory_limit(1000, 70, 1000 + 70 * 9 + 69) == 9
    assert memory_limit(1000, 70, 1069) == 0
    assert memory_limit(1000, 70, 10) == 0
    assert memory_limit(0, 0, 5) == 5


@pytest.mark.parametrize(
    ("width", "trials", "groups"),
    [(1, 3, [1, 1, 1]), (8, 0, []), (8, 8, [8]), (8, 9, [5, 4]), (8, 20, [7, 7, 6]), (8, 3, [3])],
)
def test_groups_are_few_and_equal(width: int, trials: int, groups: list[int]) -> None:
    assert plan(width).groups(trials) == groups
