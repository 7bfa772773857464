"""Signatures as `help()` shows them."""

from __future__ import annotations

import inspect

from hydro_rasda.common.readable_signature import readable


@readable
def several(first: int, second: str = "x", *, third: int | None = None, fourth: bool = False) -> list[int]:
    raise NotImplementedError


def test_each_argument_has_a_line() -> None:
    lines = ["(", "    first: int,", "    second: str = 'x',", "    *,"]
    lines += ["    third: int | None = None,", "    fourth: bool = False,", ") -> list[int]"]
    assert str(inspect.signature(several)).splitlines() == lines
