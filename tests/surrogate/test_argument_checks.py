from __future__ import annotations

from typing import Any

import pytest

from surrogate.argument_checks import check_width_ratio, require


@pytest.mark.parametrize("width_ratio", [0, -0.5, 1.5, float("nan"), float("inf"), "1/8", True, None])
def test_what_is_no_width_ratio(width_ratio: Any) -> None:
    with pytest.raises(ValueError, match=r"`width_ratio` is .*, but must be a number in \(0, 1\]"):
        check_width_ratio(width_ratio)


@pytest.mark.parametrize("width_ratio", [1, 1.0, 1 / 8])
def test_width_ratios(width_ratio: float) -> None:
    check_width_ratio(width_ratio)


def test_the_argument_is_named() -> None:
    with pytest.raises(ValueError, match="`seeds` is 0, but must be >= 1"):
        require(False, "seeds", 0, ">= 1")
    with pytest.raises(ValueError, match="`wide_width_ratio` is 2"):
        check_width_ratio(2, "wide_width_ratio")
