"""Each check lets through what holds, and names argument, value and rule where it does not."""

import math
from collections.abc import Callable

import pytest

from hydro_rasda.checks import check_int, check_mode, check_number


def test_what_holds_passes() -> None:
    check_int("workers", 2, at_least=2)
    check_number("latency", 0)
    check_number("bandwidth", math.inf, above=0.0)
    check_mode("min")
    check_mode("max")


@pytest.mark.parametrize(
    ("check", "error", "message"),
    [
        (lambda: check_int("workers", 1, at_least=2), ValueError, "`workers` is 1, but must be >= 2"),
        (lambda: check_int("workers", 2.0, at_least=2), TypeError, "`workers` is 2.0, but must be an integer >= 2"),
        (lambda: check_int("workers", True, at_least=1), TypeError, "`workers` is True, but must be an integer >= 1"),
        (lambda: check_number("latency", -0.5), ValueError, "`latency` is -0.5, but must be >= 0"),
        (lambda: check_number("speed", 0, above=0.0), ValueError, "`speed` is 0, but must be > 0"),
        (lambda: check_number("speed", math.nan), ValueError, "`speed` is nan, but must be >= 0"),
        (lambda: check_number("speed", "2"), TypeError, "`speed` is '2', but must be a number >= 0"),
        (lambda: check_mode("best"), ValueError, "`mode` is 'best', but must be 'min' or 'max'"),
    ],
)
def test_what_does_not_hold_is_named(check: Callable[[], None], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        check()
    assert str(raised.value) == message
