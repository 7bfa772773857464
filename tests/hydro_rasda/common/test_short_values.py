"""Values, counts and errors in a few characters."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch import nn

from hydro_rasda.common.short_values import all_of, counted, error_line, numbers_first, show


@pytest.mark.parametrize(
    ("value", "three", "two"),
    [
        (0.0, "0", "0"),
        (0.123456, "0.123", "0.12"),
        (-0.00001, "-1e-05", "-1e-05"),
        (1.0, "1", "1"),
        (-142.6, "-143", "-140"),
        (999_999.0, "1000000", "1000000"),
        (1e6, "1e+06", "1e+06"),
        (math.nan, "nan", "nan"),
        (-math.inf, "-inf", "-inf"),
        (1234567, "1234567", "1234567"),
        (True, "True", "True"),
        (None, "", ""),
        ("sgd", "sgd", "sgd"),
        (nn.ReLU, "ReLU", "ReLU"),
    ],
)
def test_floats_have_so_many_digits_and_other_values_their_names(value: Any, three: str, two: str) -> None:
    assert (show(value), show(value, 2)) == (three, two)


def test_one_thing_is_told_in_the_singular() -> None:
    assert [counted(count, "epoch") for count in (0, 1, 2)] == ["0 epochs", "1 epoch", "2 epochs"]
    days = [counted(count, "day") for count in (0.99, 1.04, 1.06, 250.0)]
    assert days == ["0.99 days", "1 day", "1.1 days", "250 days"]
    assert [all_of(count, "trial") for count in (1, 2)] == ["the only trial", "all 2 trials"]


TRACEBACK = """Traceback (most recent call last):
  File "a.py", line 1, in f
    g()
  File "b.py", line 2, in g
    h()
"""


@pytest.mark.parametrize(
    ("told", "line"),
    [
        (f"{TRACEBACK}RuntimeError: no memory\nTry this.\nOr that.", "RuntimeError: no memory"),
        (f"{TRACEBACK}    ^^^\nKeyError: 'a'\n", "KeyError: 'a'"),
        ("first\nlast\n", "last"),
        ("one", "one"),
        ("", ""),
        (None, ""),
    ],
)
def test_the_line_that_names_an_error_is_found(told: str | None, line: str) -> None:
    assert error_line(told) == line


def test_numbers_come_before_texts() -> None:
    given = ["b", 10**400, 3, "a", math.inf, 0.5, True, None]  # the first number is beyond all floats
    assert sorted(given, key=numbers_first) == [0.5, True, 3, 10**400, math.inf, None, "a", "b"]
