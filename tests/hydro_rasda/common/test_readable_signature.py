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


@readable
def any_number(first: int, *others: int, third: int = 0, **more: int) -> None:
    raise NotImplementedError


def test_arguments_in_any_number_need_no_bare_star() -> None:
    lines = ["(", "    first: int,", "    *others: int,", "    third: int = 0,", "    **more: int,", ") -> None"]
    assert str(inspect.signature(any_number)).splitlines() == lines
